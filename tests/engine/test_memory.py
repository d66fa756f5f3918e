"""What an engine leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hotshoe import LLM, SamplingParams
from hotshoe.api import Candidates, SampleInput, Sampler


class Softmax(Sampler):
    """Lives as long as the worker that it is handed to."""

    def candidates(self, inputs: SampleInput) -> Candidates:
        return Candidates(inputs.logits.softmax(-1))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Reference counts alone: weights must not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_closed_engine_frees_its_worker_at_once(tiny_path: Path, no_collector: None) -> None:
    sampler = Softmax()
    reference = weakref.ref(sampler)
    with LLM(str(tiny_path), dtype="float32", max_model_len=64, sampler=sampler) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    del llm, sampler

    assert reference() is None


def test_a_closed_engine_frees_its_weights_at_once(tiny_path: Path, no_collector: None) -> None:
    def num_tensors() -> int:
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    with LLM(str(tiny_path), dtype="float32", max_model_len=64) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    del llm
    before = num_tensors()
    with LLM(str(tiny_path), dtype="float32", max_model_len=64) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        assert num_tensors() > before
    del llm

    assert num_tensors() == before
