"""How a drafter's passes are run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafts.heads import HIDDEN, write_eagle3
from hotshoe.api import DraftPass, DraftSpans
from hotshoe.testing.drafting import DraftedRequest, DraftingRig
from hotshoe_spec_decode import eagle


@pytest.fixture
def rig(tiny_path: Path, tmp_path: Path) -> DraftingRig:
    """With a drafter, one request, and native kernels."""
    settings: dict[str, Any] = {"kernels": "cpu", "attention": "cpu", "dtype": "float32"}
    rig = DraftingRig(str(tiny_path), max_model_len=256, max_num_seqs=2, **settings)
    options = eagle.EagleOptions(model=str(write_eagle3(tmp_path / "head")))
    rig.use(eagle.build(options, rig.context()))
    rig.step({"one": DraftedRequest(token_ids=[1, 2, 3], num_kept=2)})
    return rig


class Doubled:
    """A function of a drafter that counts how often Python runs it."""

    def __init__(self, rig: DraftingRig) -> None:
        target = rig.context().require_target()
        self.forwards, self.kernels = target.forwards, target.kernels
        self.num_calls = 0

    def double(self, passes: Sequence[DraftPass], x: Tensor) -> tuple[Tensor, ...]:
        self.num_calls += 1
        return (self.kernels.add(x, x),)

    def run(self, x: Tensor, *num_tokens: int) -> Tensor:
        spans = [
            DraftSpans(requests=[0], first_positions=[0], num_tokens=[count])
            for count in num_tokens
        ]
        (result,) = self.forwards.run(self.double, spans, x)
        return result.clone()


def test_a_small_pass_that_comes_back_is_run_without_python(rig: DraftingRig) -> None:
    doubled = Doubled(rig)
    for number in range(6):
        x = torch.full((3, HIDDEN), float(number))
        assert doubled.run(x, 3).equal(x + x)
    assert doubled.num_calls == 2


def test_a_pass_in_python_is_told_which_rows_are_wanted(rig: DraftingRig) -> None:
    found: list[Tensor | None] = []

    def note(passes: Sequence[DraftPass], x: Tensor) -> tuple[Tensor, ...]:
        found.extend(one.step.wanted_rows for one in passes)
        return (x,)

    spans = [
        DraftSpans(requests=[0], first_positions=[0], num_tokens=[3], num_wanted=wanted)
        for wanted in ([2], [0], None)
    ]
    forwards = rig.context().require_target().forwards
    forwards.run(note, spans, torch.zeros(9, HIDDEN))
    assert [None if rows is None else rows.tolist() for rows in found] == [[1, 2], [], None]


def test_passes_over_many_tokens_are_not_recorded(rig: DraftingRig) -> None:
    doubled = Doubled(rig)
    for number in range(4):
        x = torch.full((3, HIDDEN), float(number))
        assert doubled.run(x, 200, 57).equal(x + x)
    assert doubled.num_calls == 4
