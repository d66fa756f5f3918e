"""Ways to run the same requests that must not change a token, and a driver that runs them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from hotshoe import LLM, CompletionOutput, SamplingParams

REFERENCE_PARTS: dict[str, Any] = {
    "dtype": "float32",
    "attention": "torch_sdpa",
    "kernels": "torch",
    "quantization": "none",
    "sampler": "standard",
}
NGRAM = {
    "name": "ngram",
    "options": {"min_ngram": 1, "max_ngram": 3, "num_draft_tokens": 3},
    "adaptive": False,
}


@dataclass(frozen=True, kw_only=True)
class Variation:
    """One way to run requests.

    Attributes:
        settings: of the engine, on top of ``REFERENCE_PARTS``.
        num_blocks: of the KV cache; None = plenty. A share of what all requests need together.
        is_shuffled: whether they arrive in another order.
        has_priorities: whether they have priorities, at random.
        num_rounds: how often the same engine runs them.
        must_preempt: whether preemption has to happen, or the variation says nothing.
        must_accept: whether drafts have to be accepted.
        must_hit: whether the prefix cache has to supply tokens.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    is_pool_small: bool = False
    is_shuffled: bool = False
    has_priorities: bool = False
    num_rounds: int = 1
    must_preempt: bool = False
    must_accept: bool = False
    must_hit: bool = False


def _chunks(size: int) -> dict[str, Variation]:
    return {
        f"batches_of_{size}_tokens": Variation(settings={"max_num_batched_tokens": size}),
        f"chunks_of_{size}": Variation(settings={"long_prefill_token_threshold": size}),
    }


VARIATIONS: dict[str, Variation] = {
    "no_prefix_cache": Variation(settings={"enable_prefix_caching": False}),
    "prefix_cache": Variation(num_rounds=2, must_hit=True),
    **_chunks(16),
    **_chunks(64),
    **_chunks(512),
    "preemption": Variation(is_pool_small=True, must_preempt=True),
    "preemption_without_prefix_cache": Variation(
        settings={"enable_prefix_caching": False}, is_pool_small=True, must_preempt=True
    ),
    "drafts": Variation(settings={"spec_decode": NGRAM}, must_accept=True),
    "shuffled": Variation(is_shuffled=True),
    "one_at_a_time": Variation(settings={"max_num_seqs": 1}),
    "four_at_a_time": Variation(settings={"max_num_seqs": 4}),
    "thirty_two_at_a_time": Variation(settings={"max_num_seqs": 32}),
    "small_blocks": Variation(settings={"block_size": 4}, num_rounds=2, must_hit=True),
    "priorities": Variation(
        settings={"scheduler": "priority", "max_num_seqs": 4}, has_priorities=True
    ),
    "priorities_with_preemption": Variation(
        settings={"scheduler": "priority"},
        is_pool_small=True,
        has_priorities=True,
        must_preempt=True,
    ),
    "everything": Variation(
        settings={
            "scheduler": "priority",
            "max_num_batched_tokens": 64,
            "long_prefill_token_threshold": 16,
            "spec_decode": NGRAM,
        },
        is_pool_small=True,
        is_shuffled=True,
        has_priorities=True,
        num_rounds=2,
        must_preempt=True,
        must_accept=True,
        must_hit=True,
    ),
}


@dataclass(frozen=True)
class Job:
    """A prompt with its parameters."""

    prompt: list[int]
    params: SamplingParams

    @property
    def max_num_tokens(self) -> int:
        """Prompt and longest output of one choice."""
        return len(self.prompt) + (self.params.max_tokens or 0)


@contextmanager
def running(model: str, variation: Variation, jobs: Sequence[Job]) -> Iterator[LLM]:
    """An engine set up as a variation says, with room for the jobs."""
    settings = REFERENCE_PARTS | dict(variation.settings)
    longest = max(job.max_num_tokens for job in jobs)
    block_size = settings.pop("block_size", 16)
    num_choices = sum(job.params.n for job in jobs)
    # lookahead and rounding up to whole blocks
    num_blocks = -(-longest // block_size) + 2
    if not variation.is_pool_small:
        num_blocks *= min(num_choices, 64)
    with LLM(
        model,
        max_model_len=longest,
        cache={"num_blocks": num_blocks, "block_size": block_size},
        **settings,
    ) as llm:
        yield llm


def run(llm: LLM, variation: Variation, jobs: Sequence[Job]) -> list[list[list[CompletionOutput]]]:
    """Run the jobs; what they returned by round and job.

    Raises:
        AssertionError: if what the variation is about did not happen, or KV blocks were lost.
    """
    numbers = random.Random(7)
    rounds = []
    for _ in range(variation.num_rounds):
        order = list(range(len(jobs)))
        if variation.is_shuffled:
            numbers.shuffle(order)
        priorities = [numbers.randrange(3) if variation.has_priorities else 0 for _ in order]
        outputs = llm.generate(
            [jobs[index].prompt for index in order],
            [jobs[index].params for index in order],
            priority=priorities,
        )
        by_job = dict(zip(order, outputs, strict=True))
        rounds.append([by_job[index].outputs for index in range(len(jobs))])
    _check_happened(variation, [choice for jobs in rounds for job in jobs for choice in job])
    assert llm.engine.kv_cache.num_free_blocks == llm.engine.kv_cache.num_blocks
    return rounds


def _check_happened(variation: Variation, choices: Sequence[CompletionOutput]) -> None:
    metrics = [choice.metrics for choice in choices if choice.metrics is not None]
    assert len(metrics) == len(choices)
    if variation.must_preempt:
        assert sum(one.num_preemptions for one in metrics) > 0
    if variation.must_accept:
        assert sum(one.num_accepted_tokens for one in metrics) > 0
    if variation.must_hit:
        assert sum(one.num_cached_tokens for one in metrics) > 0


def each_variation(**marks: Any) -> pytest.MarkDecorator:
    """Parametrize ``variation`` with all of them."""
    return pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS.keys())
