"""Drafting as it pays: whatever is drafted, tokens are the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hotshoe import LLM, SamplingParams
from hotshoe.api import StepRecord

PROMPTS = [[7, 8, 9, 10] * 6, [5] * 30, list(range(40)), [3, 1, 4, 1, 5, 9, 2, 6] * 3]
PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=seed)
    for seed, temperature in enumerate((0.0, 0.7, 0.0, 1.0))
]


def run(
    tiny_path: Path, spec_decode: dict[str, Any] | None
) -> tuple[list[tuple[int, ...]], list[StepRecord]]:
    """Token ids of two rounds, and the steps."""
    records: list[StepRecord] = []
    with LLM(
        str(tiny_path),
        dtype="float32",
        max_model_len=96,
        max_num_seqs=3,
        spec_decode=spec_decode,
    ) as llm:
        llm.on_step(records.append)
        outputs = [one for _ in range(2) for one in llm.generate(PROMPTS, PARAMS)]
    return [tuple(one.outputs[0].token_ids) for one in outputs], records


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> list[tuple[int, ...]]:
    return run(tiny_path, None)[0]


@pytest.mark.parametrize("is_adaptive", [True, False])
def test_tokens_do_not_depend_on_how_much_is_drafted(
    tiny_path: Path, expected: list[tuple[int, ...]], is_adaptive: bool
) -> None:
    token_ids, records = run(tiny_path, {"name": "ngram", "adaptive": is_adaptive})
    assert token_ids == expected
    if not is_adaptive:
        assert sum(one.num_accepted_tokens for one in records) > 0
        assert not any(one.num_requests_not_drafted for one in records)


@pytest.mark.parametrize("is_adaptive", [True, False])
def test_larger_batches_than_allowed_have_no_drafts(
    tiny_path: Path, expected: list[tuple[int, ...]], is_adaptive: bool
) -> None:
    settings = {"name": "ngram", "adaptive": is_adaptive, "max_batch_size": 2}
    token_ids, records = run(tiny_path, settings)
    assert token_ids == expected
    for before, record in pairwise(records):
        if len(before.request_ids) > 2:
            assert record.num_draft_tokens == 0
            assert before.num_requests_not_drafted > 0 or before.num_prefill_tokens
