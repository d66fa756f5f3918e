"""A policy that does whatever is allowed, steps that overlap, requests that come and go: no token
changes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from golden.checks import compare_greedy_rounds, compare_sampled_rounds
from golden.comparison import Tally
from golden.oracle import Oracle
from golden.variations import NGRAM, REFERENCE_PARTS, Job
from golden.workloads import greedy_jobs, sampled_jobs, tiny_prompts
from hotshoe import LLM, CompletionOutput, SamplingParams
from hotshoe.api import PositionLogprobs, RequestView, Scheduler, StepPlanner, serve

pytestmark = pytest.mark.usefixtures("overlapped_executor")

SETTINGS: dict[str, dict[str, Any]] = {
    "uniproc": {},
    "uniproc_drafts": {"spec_decode": NGRAM},
    "overlapped": {"executor": "overlapped"},
    "overlapped_drafts": {"executor": "overlapped", "spec_decode": NGRAM},
}


class Chaos(Scheduler):
    """Runs and preempts at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schedule(self, step: StepPlanner) -> None:
        views: list[RequestView] = [*step.running, *step.waiting]
        self._random.shuffle(views)
        has_granted = False
        for view in views:
            if self._random.random() < 0.1:
                step.preempt(view)
            if self._random.random() < 0.7:
                limit = self._random.choice([None, 1, 2, 7, 20])
                has_granted |= bool(step.run(view, max_tokens=limit))
            if self._random.random() < 0.05:
                has_granted &= not step.preempt(view)
        if not has_granted:
            serve(step)


def engine(folder: Path, settings: dict[str, Any], seed: int) -> LLM:
    return LLM(
        str(folder),
        max_model_len=160,
        max_num_seqs=5,
        max_num_batched_tokens=48,
        cache={"num_blocks": 24, "block_size": 8},
        scheduler=Chaos(seed),
        **REFERENCE_PARTS,
        **settings,
    )


def check_scores(oracle: Oracle, prompt: list[int], entries: list[PositionLogprobs | None]) -> None:
    """Prompt log probabilities are complete, in order and right."""
    assert entries[0] is None
    scored = [entry.token for entry in entries[1:] if entry]
    assert [token.token_id for token in scored] == prompt[1:]
    rows = torch.from_numpy(oracle.logits(prompt)[:-1]).log_softmax(-1)
    expected = [row[token_id].item() for row, token_id in zip(rows, prompt[1:], strict=True)]
    assert [token.logprob for token in scored] == pytest.approx(expected, abs=1e-4)


def outputs_of(llm: LLM, jobs: list[Job]) -> list[list[CompletionOutput]]:
    outputs = llm.generate([job.prompt for job in jobs], [job.params for job in jobs])
    preempted = sum(
        choice.metrics.num_preemptions
        for output in outputs
        for choice in output.outputs
        if choice.metrics
    )
    assert preempted > 0
    assert llm.engine.kv_cache.num_free_blocks == llm.engine.kv_cache.num_blocks
    return [output.outputs for output in outputs]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_greedy_output_equals_generate(
    settings: dict[str, Any], tiny_folder: Path, tiny_oracle: Oracle, tally: Tally
) -> None:
    jobs = greedy_jobs(tiny_prompts(), 40)
    for seed in range(3):
        with engine(tiny_folder, settings, seed) as llm:
            rounds = [outputs_of(llm, jobs) for _ in range(2)]
        compare_greedy_rounds(tiny_oracle, rounds, jobs, tally)
    tally.check()


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_sampled_output_is_what_the_seeds_draw(
    settings: dict[str, Any], tiny_folder: Path, tiny_oracle: Oracle, tally: Tally
) -> None:
    jobs = sampled_jobs(tiny_prompts(), 40)
    for seed in range(2):
        with engine(tiny_folder, settings, seed) as llm:
            rounds = [outputs_of(llm, jobs)]
        compare_sampled_rounds(tiny_oracle, rounds, jobs, tally)
    tally.check()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_requests_that_are_aborted_leave_the_others_alone(
    settings: dict[str, Any], tiny_folder: Path, tiny_oracle: Oracle
) -> None:
    prompts = tiny_prompts()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=0)
    numbers = random.Random(5)
    with engine(tiny_folder, settings, 9) as llm:
        for prompt in prompts:
            stopped = [
                llm.stream(numbers.choice(prompts), SamplingParams(max_tokens=30)) for _ in range(3)
            ]
            for stream in stopped:
                for _ in range(numbers.randrange(1, 6)):
                    next(stream)
            [output] = llm.generate([prompt], params)
            for stream in stopped:
                stream.close()
            expected = tiny_oracle.greedy(prompt, 40).token_ids
            assert output.outputs[0].token_ids == expected
            assert output.prompt_logprobs is not None
            check_scores(tiny_oracle, prompt, output.prompt_logprobs)
        assert llm.engine.kv_cache.num_free_blocks == llm.engine.kv_cache.num_blocks
