"""An engine core in a process of its own gives the same tokens, whoever comes when."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from golden.checks import compare_greedy_rounds, compare_sampled_rounds
from golden.comparison import Tally
from golden.oracle import Oracle
from golden.variations import NGRAM, REFERENCE_PARTS, Job
from golden.workloads import greedy_jobs, sampled_jobs, tiny_prompts
from hotshoe import CompletionOutput
from hotshoe.entrypoints.async_llm import AsyncLLM


async def outputs_of(folder: Path, jobs: list[Job]) -> list[list[CompletionOutput]]:
    """Run jobs that arrive one after the other while earlier ones run."""
    llm = await AsyncLLM.start(
        str(folder),
        max_model_len=160,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        cache={"num_blocks": 40, "block_size": 8},
        spec_decode=NGRAM,
        **REFERENCE_PARTS,
    )

    async def one(job: Job, delay_s: float) -> list[CompletionOutput]:
        await asyncio.sleep(delay_s)
        async for output in llm.generate(job.prompt, job.params):
            last = output
        return last.outputs

    try:
        return await asyncio.gather(
            *(one(job, 0.005 * index) for index, job in enumerate(jobs)),
        )
    finally:
        await llm.close()


@pytest.mark.slow
def test_tokens_are_those_of_the_oracle(
    tiny_folder: Path, tiny_oracle: Oracle, tally: Tally
) -> None:
    greedy, sampled = greedy_jobs(tiny_prompts(), 40), sampled_jobs(tiny_prompts(), 40)

    outputs = asyncio.run(outputs_of(tiny_folder, greedy + sampled))

    compare_greedy_rounds(tiny_oracle, [outputs[: len(greedy)]], greedy, tally)
    compare_sampled_rounds(tiny_oracle, [outputs[len(greedy) :]], sampled, tally)
    tally.check()
