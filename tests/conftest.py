"""Models that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hotshoe import LLM
from hotshoe.testing.models import write_tiny_checkpoint


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    """Tiny tensors gain nothing from more threads, and lose when tests share a small machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights and a byte tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    """An engine on the tiny model, shared by the tests of a module; blocks are back after each."""
    with LLM(str(tiny_path), dtype="float32", max_model_len=256, max_num_seqs=8) as one:
        yield one
