"""The conformance suite of logits processors finds what would make requests depend on chance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hotshoe.api import Component, LogitsBatch, LogitsProcessor
from hotshoe.testing.logits_processor import LogitsProcessorConformance

Change = Callable[[LogitsBatch, list[LogitsBatch]], object]
"""Gets the batch and those before it."""


class Changing(LogitsProcessor):
    def __init__(self, change: Change) -> None:
        self._change = change
        self._seen: list[LogitsBatch] = []

    def apply(self, batch: LogitsBatch) -> None:
        self._change(batch, self._seen)
        self._seen.append(batch)


def of_lengths(batch: LogitsBatch) -> torch.Tensor:
    return torch.tensor([[float(len(output))] for output in batch.output_token_ids])


def frozen_lengths(batch: LogitsBatch, seen: list[LogitsBatch]) -> torch.Tensor:
    known = {one: len(o) for b in reversed(seen) for one, o in row_ids(b)}
    return torch.tensor([[float(known.get(one, len(o)))] for one, o in row_ids(batch)])


def row_ids(batch: LogitsBatch) -> list[tuple[str, list[int]]]:
    outputs = [output.tolist() for output in batch.output_token_ids]
    return list(zip(batch.request_ids, outputs, strict=True))


WRONG: dict[str, tuple[str, Change]] = {
    "not a number": (
        "test_logits_stay_numbers_and_leave_a_token_to_choose",
        lambda batch, _: batch.logits[0].fill_(torch.nan),
    ),
    "masks everything": (
        "test_logits_stay_numbers_and_leave_a_token_to_choose",
        lambda batch, _: batch.logits.fill_(-torch.inf),
    ),
    "unmasks": (
        "test_a_masked_token_stays_masked",
        lambda batch, _: batch.logits.clamp_(min=-1000.0),
    ),
    "softmax of nothing": (
        "test_a_row_without_a_token_left_stays_so",
        lambda batch, _: batch.logits.copy_(batch.logits.log_softmax(-1)),
    ),
    "looks at its neighbours": (
        "test_a_row_does_not_depend_on_the_rows_beside_it",
        lambda batch, _: batch.logits.mul_(len(batch.request_ids)),
    ),
    "counts its calls": (
        "test_a_row_does_not_depend_on_earlier_calls",
        lambda batch, seen: batch.logits.mul_(1 + len(seen)),
    ),
    "remembers a length": (
        "test_a_request_that_has_grown_is_looked_at_again",
        lambda batch, seen: batch.logits.mul_(1 + frozen_lengths(batch, seen)),
    ),
    "draws": (
        "test_no_randomness_of_its_own_is_used",
        lambda batch, _: batch.logits.add_(torch.rand(1)),
    ),
}


def suite_of(change: Change) -> LogitsProcessorConformance:
    class Suite(LogitsProcessorConformance):
        def component(self) -> Component:
            return Component(
                contract="logits_processor/0", factory=lambda options, context: Changing(change)
            )

    return Suite()


@pytest.mark.parametrize(("name", "change"), WRONG.values(), ids=WRONG.keys())
def test_a_broken_promise_is_found(name: str, change: Change) -> None:
    with pytest.raises(AssertionError):
        getattr(suite_of(change), name)()


@pytest.mark.parametrize("name", sorted({name for name, _ in WRONG.values()}))
def test_a_processor_that_keeps_them_passes(name: str) -> None:
    getattr(suite_of(lambda batch, _: batch.logits.div_(1 + of_lengths(batch))), name)()
