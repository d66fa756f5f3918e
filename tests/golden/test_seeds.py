"""What a seed means, and requests that bring none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from golden.variations import REFERENCE_PARTS
from hotshoe import LLM, SamplingParams

PROMPT = list(range(20, 40))


@pytest.fixture
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), max_model_len=256, seed=3, **REFERENCE_PARTS) as one:
        yield one


def sampled(llm: LLM, **changes: object) -> list[tuple[int, list[int]]]:
    """Seed and tokens of every choice."""
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **changes})
    [output] = llm.generate([PROMPT], params)
    return [(choice.seed, choice.token_ids) for choice in output.outputs]


@pytest.mark.parametrize("n", [1, 3])
def test_the_reported_seed_brings_every_choice_again(llm: LLM, n: int) -> None:
    first = sampled(llm, n=n)
    assert len({tuple(token_ids) for _, token_ids in first}) == n

    sampled(llm)  # something in between
    assert sampled(llm, n=n, seed=first[0][0]) == first


def test_fewer_or_more_choices_leave_the_others_as_they_are(llm: LLM) -> None:
    three = sampled(llm, n=3, seed=11)
    assert sampled(llm, n=5, seed=11)[:3] == three
    assert sampled(llm, n=1, seed=11) == three[:1]


def test_requests_without_a_seed_get_different_ones(llm: LLM) -> None:
    found = [sampled(llm)[0] for _ in range(5)]
    assert len({seed for seed, _ in found}) == 5
    assert len({tuple(token_ids) for _, token_ids in found}) == 5


def test_an_engine_with_the_same_seed_repeats_itself(tiny_folder: Path, llm: LLM) -> None:
    first = [sampled(llm, n=2) for _ in range(3)]
    with LLM(str(tiny_folder), max_model_len=256, seed=3, **REFERENCE_PARTS) as again:
        assert [sampled(again, n=2) for _ in range(3)] == first
    with LLM(str(tiny_folder), max_model_len=256, seed=4, **REFERENCE_PARTS) as other:
        assert [sampled(other, n=2) for _ in range(3)] != first


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_every_64_bit_seed_has_a_stream_of_its_own(llm: LLM, seed: int) -> None:
    assert sampled(llm, seed=seed) == sampled(llm, seed=seed)
    assert sampled(llm, seed=seed)[0][1] != sampled(llm, seed=seed ^ (1 << 40))[0][1]
