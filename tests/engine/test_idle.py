"""A policy may wait on purpose: the engine sleeps meanwhile instead of asking without end."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.api import Scheduler, StepPlanner, serve

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Pauses(Scheduler):
    """Idles for 0.3 seconds, once ``num_running`` requests run."""

    def __init__(self, num_running: int) -> None:
        self.num_running = num_running
        self.until: float | None = None
        self.num_idle = 0

    def schedule(self, step: StepPlanner) -> None:
        if len(step.running) >= self.num_running:
            if self.until is None:
                self.until = step.clock + 0.3
            if step.clock < self.until:
                self.num_idle += 1
                step.idle("for a while", until=self.until)
                return
        serve(step)


@pytest.mark.parametrize("num_running", [0, 1])
def test_idling_policy_is_asked_now_and_then_only(tiny_path: Path, num_running: int) -> None:
    policy = Pauses(num_running)
    with LLM(str(tiny_path), dtype="float32", max_model_len=64, scheduler=policy) as llm:
        outputs = llm.generate([[1, 2, 3], [4, 5]], PARAMS)
    assert [len(one.outputs[0].token_ids) for one in outputs] == [4, 4]
    # it may be asked every 50 ms; a loop that doesn't sleep asks thousands of times
    assert 1 <= policy.num_idle <= 50
