"""Requests that arrive together compute the common part of their prompts once."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.api import PendingResult, StepPlan, StepRecord, StepResult
from hotshoe.engine.request import EngineRequest
from hotshoe.errors import HotshoeError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BLOCK_SIZE = 16
COMMON = [(7 * place) % 90 + 4 for place in range(5 * BLOCK_SIZE)]


def prompts(count: int) -> list[list[int]]:
    """Prompts that differ after five blocks."""
    return [[*COMMON, 10 + index, 20 + index, 30 + index] for index in range(count)]


@pytest.mark.parametrize("budget", [1024, 48])
def test_a_common_prompt_is_computed_once(tiny_path: Path, budget: int) -> None:
    with LLM(str(tiny_path), dtype="float32", max_num_batched_tokens=budget) as llm:
        expected = [llm.generate([prompt], GREEDY)[0].text for prompt in prompts(6)]
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts(6), GREEDY)
        assert [output.text for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [0, *[len(COMMON)] * 5]


def test_choices_of_one_prompt_compute_it_once(tiny_path: Path) -> None:
    with LLM(str(tiny_path), dtype="float32") as llm:
        params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=4, ignore_eos=True)
        llm.generate(prompts(1), params)
        assert llm.engine.kv_cache.stats.num_hit_tokens == 3 * len(COMMON)


def test_nobody_waits_for_a_prompt_that_may_not_be_shared(tiny_path: Path) -> None:
    with LLM(str(tiny_path), dtype="float32") as llm:
        params = [
            SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0),
            SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0),
        ]
        steps: list[StepRecord] = []
        llm.on_step(steps.append)
        outputs = llm.generate(prompts(2), params)
        assert [output.num_cached_tokens for output in outputs] == [0, 0]
        assert steps[0].num_running == 2


def test_a_waiting_request_takes_over_when_the_one_it_waits_for_is_aborted(tiny_path: Path) -> None:
    with LLM(str(tiny_path), dtype="float32", max_num_batched_tokens=32) as llm:
        core = llm.engine
        for index, prompt in enumerate(prompts(2)):
            core.add_request(
                EngineRequest(
                    request_id=str(index), prompt_token_ids=prompt, sampling_params=GREEDY
                )
            )
        core.step()
        assert list(core.planner.running) == ["0"]
        core.abort(["0"])
        finished = []
        while core.has_work:
            finished += [one.request_id for one in core.step() if one.finish_reason == "length"]
        assert finished == ["1"]
        assert core.kv_cache.num_free_blocks == core.kv_cache.num_blocks


def test_a_step_that_fails_leaves_nobody_waiting(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(tiny_path), dtype="float32", max_num_batched_tokens=32) as llm:
        expected = llm.generate(prompts(2)[1:], GREEDY)[0].text
        llm.reset_prefix_cache()
        submit = llm.engine.executor.submit

        def fail_once(plan: StepPlan) -> PendingResult:
            monkeypatch.setattr(llm.engine.executor, "submit", submit)
            future: Future[StepResult] = Future()
            future.set_exception(RuntimeError("out of order"))
            return future

        monkeypatch.setattr(llm.engine.executor, "submit", fail_once)
        streams = [llm.stream(prompt, GREEDY) for prompt in prompts(2)]
        with pytest.raises(HotshoeError, match="out of order"):
            list(streams[0])
        *_, last = streams[1]
        assert last.outputs[0].text == expected
