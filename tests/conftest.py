"""Models that many tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hotshoe import LLM
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint

UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
LOGGERS = ("", "hotshoe", "hotshoe_schedulers", *UVICORN)


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    """Tiny tensors gain nothing from more threads, and lose when tests share a small machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Commands that run in this process set up its log; the next test finds it as it was."""
    with kept_log():
        yield


@pytest.fixture(scope="module", autouse=True)
def log_as_before_the_module() -> Iterator[None]:
    """As ``log_as_before``, for commands that fixtures run."""
    with kept_log():
        yield


@contextmanager
def kept_log() -> Iterator[None]:
    """What a command sets up is undone."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    states = [(list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, states, strict=True):
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights and a byte tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def roomy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with room for 8192 tokens: answers that last while something else happens."""
    config = tiny_llama_config(max_position_embeddings=8192)
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "roomy", config)


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    """An engine on the tiny model, shared by the tests of a module; blocks are back after each."""
    with LLM(str(tiny_path), dtype="float32", max_model_len=256, max_num_seqs=8) as one:
        yield one
