"""Runs of many jobs, compared with the oracle."""

from __future__ import annotations

from collections.abc import Sequence

from golden.comparison import Tally, compare_draws, compare_greedy
from golden.oracle import Oracle
from golden.variations import Job, Variation, run, running
from hotshoe import CompletionOutput

Outputs = Sequence[Sequence[CompletionOutput]]
"""Choices by job."""


def check_greedy(
    model: str, oracle: Oracle, variation: Variation, jobs: Sequence[Job], tally: Tally
) -> None:
    """Greedy output is that of ``generate``."""
    with running(model, variation, jobs) as llm:
        rounds = run(llm, variation, jobs)
    compare_greedy_rounds(oracle, rounds, jobs, tally)


def compare_greedy_rounds(
    oracle: Oracle, rounds: Sequence[Outputs], jobs: Sequence[Job], tally: Tally
) -> None:
    """What jobs returned, against ``generate``."""
    for number, outputs in enumerate(rounds):
        for index, (job, [choice]) in enumerate(zip(jobs, outputs, strict=True)):
            expected = oracle.greedy(job.prompt, job.params.max_tokens or 0)
            what = f"round {number} prompt {index}"
            compare_greedy(tally, what, expected, choice.token_ids)
    tally.check()


def check_sampled(
    model: str, oracle: Oracle, variation: Variation, jobs: Sequence[Job], tally: Tally
) -> None:
    """Sampled output is what the seeds draw from the model's distributions."""
    with running(model, variation, jobs) as llm:
        rounds = run(llm, variation, jobs)
    compare_sampled_rounds(oracle, rounds, jobs, tally)


def compare_sampled_rounds(
    oracle: Oracle, rounds: Sequence[Outputs], jobs: Sequence[Job], tally: Tally
) -> None:
    """What jobs returned, against what their seeds draw."""
    for number, outputs in enumerate(rounds):
        for index, (job, choices) in enumerate(zip(jobs, outputs, strict=True)):
            assert [choice.index for choice in choices] == list(range(job.params.n))
            for choice in choices:
                assert choice.seed == job.params.seed
                expected = oracle.draws(
                    job.prompt, choice.token_ids, job.params, choice.seed, choice.index
                )
                what = f"round {number} prompt {index} choice {choice.index}"
                compare_draws(tally, what, expected, choice.token_ids)
    tally.check()
