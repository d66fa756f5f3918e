"""Models for the command line, as flags that select them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import LETTER_IDS
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint


@pytest.fixture(scope="session")
def model_flags(tiny_path: Path) -> list[str]:
    """The tiny model of the other tests."""
    limits = ["--max-model-len", "256", "--max-num-seqs", "8"]
    return ["--model", str(tiny_path), "--dtype", "float32", *limits]


@pytest.fixture(scope="session")
def letter_flags() -> list[str]:
    """Let a model with the byte tokenizer write letters only."""
    return ["--allowed-token-ids", ",".join(map(str, LETTER_IDS))]


@pytest.fixture(scope="session")
def long_model_flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny model with room for an answer that takes many seconds."""
    config = tiny_llama_config(max_position_embeddings=16384)
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "long", config)
    return ["--model", str(path), "--dtype", "float32", "--max-num-seqs", "1"]


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """A command sets up the log of its process; in a test that must end with the test."""
    logger = logging.getLogger("hotshoe")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
