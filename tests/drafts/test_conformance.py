"""The drafters with weights in the conformance suite."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from drafts.heads import VOCAB, write_eagle1, write_eagle3, write_medusa
from hotshoe.api import Component
from hotshoe.testing.drafting import DraftedRequest
from hotshoe.testing.models import write_tiny_checkpoint
from hotshoe.testing.spec_decode import ProposerConformance
from hotshoe_spec_decode import draft_model, eagle, medusa


class WithTarget(ProposerConformance):
    vocab_size = VOCAB
    max_num_seqs = 16

    @pytest.fixture(autouse=True)
    def checkpoints(self, tiny_path: Path, tmp_path: Path) -> None:
        self.target = str(tiny_path)
        self.options = {"model": str(self.drafter(tmp_path / "drafter"))}

    def drafter(self, path: Path) -> Path:
        raise NotImplementedError

    @pytest.mark.parametrize("is_woken", [True, False])
    def test_what_a_dormant_request_puts_off_is_made_up_for(self, is_woken: bool) -> None:
        """By itself, or else by a request that shares its blocks when it has ended."""
        driven = self.driven()
        assert driven.rig is not None
        history = max(self.histories(), key=len)
        expected = self.propose_for(self.driven(), [history], [4]).token_ids[0]
        tokens, computed = history.tolist(), 0
        for kept in (1, 20, 3, 2, 1, 6):  # two blocks of 16
            computed += kept
            step = DraftedRequest(
                token_ids=tokens[: computed + 1], num_kept=kept, is_dormant=computed > 1
            )
            driven.rig.step({"first": step})
        name, start = "first", computed
        if not is_woken:
            name, start = "follower", 32
            driven.rig.share(name, "first", start)
            driven.proposer.forget(["first"])
        awake = DraftedRequest(
            token_ids=tokens, num_kept=len(tokens) - 1 - start, max_draft_tokens=4
        )
        assert driven.rig.step({name: awake}).token_ids[0] == expected


class TestEagle3(WithTarget):
    def drafter(self, path: Path) -> Path:
        return write_eagle3(path)

    def component(self) -> Component:
        return eagle.hotshoe_component()


class TestEagle3OnTorch(TestEagle3):
    engine_settings: ClassVar = {"kernels": "torch", "attention": "torch_sdpa"}


class TestEagle1(TestEagle3):
    def drafter(self, path: Path) -> Path:
        return write_eagle1(path)


class TestMedusa(WithTarget):
    def drafter(self, path: Path) -> Path:
        return write_medusa(path)

    def component(self) -> Component:
        return medusa.hotshoe_component()


class TestDraftModel(WithTarget):
    def drafter(self, path: Path) -> Path:
        return write_tiny_checkpoint(path, seed=5)

    def component(self) -> Component:
        return draft_model.hotshoe_component()
