"""The drafters with weights in the conformance suite."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from drafts.heads import VOCAB, write_eagle1, write_eagle3, write_medusa
from hotshoe.api import Component
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
