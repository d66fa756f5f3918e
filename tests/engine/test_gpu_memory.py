"""What a GPU's memory is found to be used for, and what is said when there isn't enough."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotshoe import LLM, SamplingParams
from hotshoe.api import Weight
from hotshoe.errors import DeviceMemoryError
from hotshoe.kv_cache.sizing import MemoryUse
from hotshoe.worker.device_memory import memory_for
from hotshoe_kernels.torch import CAPABILITIES
from hotshoe_kernels.torch.kernels import TorchKernels

TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.20 GiB is free."
)


class Watched(TorchKernels):
    """Notes how many tokens go through the model, and how many rows of logits come out."""

    def __init__(self) -> None:
        super().__init__(CAPABILITIES)
        self.num_tokens: list[int] = []
        self.num_rows: list[int] = []
        self.has_memory = True

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        if not self.has_memory:
            raise torch.OutOfMemoryError(TORCH_SAYS)
        self.num_tokens.append(len(token_ids))
        return super().embedding(token_ids, weight)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        self.num_rows.append(len(x))
        return super().logits(x, weight)


class Memory:
    """A GPU's, which is asked before and after."""

    def __init__(self, kernels: Watched) -> None:
        self._kernels = kernels
        self.steps_before = -1

    def now(self) -> MemoryUse:
        return MemoryUse(100, 40)

    def watch(self) -> None:
        self.steps_before = len(self._kernels.num_tokens)

    def peak(self) -> MemoryUse:
        assert len(self._kernels.num_tokens) > self.steps_before >= 0
        return MemoryUse(100, 60)


@pytest.fixture
def kernels() -> Watched:
    return Watched()


@pytest.fixture
def worker(tiny_path: Path, kernels: Watched) -> Iterator[Any]:
    """A worker that believes to have a GPU's memory."""
    with LLM(
        str(tiny_path),
        dtype="float32",
        max_model_len=100,
        max_num_seqs=6,
        max_num_batched_tokens=250,
        kernels=kernels,
        attention="torch_sdpa",
    ) as llm:
        worker = llm.engine.executor._worker  # type: ignore[attr-defined]  # of uniproc
        worker.parts.memory = Memory(kernels)
        worker.llm = llm
        yield worker


def test_the_largest_step_runs_while_memory_is_watched_and_leaves_nothing_behind(
    worker: Any, kernels: Watched
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    before = worker.llm.generate([[1, 2, 3], [4] * 90], greedy)
    kernels.num_tokens.clear()
    kernels.num_rows.clear()

    assert worker.call("profile_memory") == MemoryUse(100, 60)

    assert kernels.num_tokens == [250]
    assert kernels.num_rows == [6]
    assert worker.call("num_requests") == 0
    after = worker.llm.generate([[1, 2, 3], [4] * 90], greedy)
    assert [one.outputs[0].token_ids for one in after] == [
        one.outputs[0].token_ids for one in before
    ]


def test_a_step_that_does_not_fit_says_which_settings_make_it_smaller(
    worker: Any, kernels: Watched
) -> None:
    kernels.has_memory = False
    with pytest.raises(DeviceMemoryError) as caught:
        worker.call("profile_memory")
    assert str(caught.value) == (
        "the GPU has no memory left for a step of as many tokens as there may be: 2.50 GiB were "
        "asked for, 1.20 GiB are free; lower scheduler.max_num_batched_tokens (250) or "
        "scheduler.max_num_seqs (6)"
    )


def test_weights_that_do_not_fit_say_how_large_they_are(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("hotshoe.engine.assemble.load_weights", full)
    with pytest.raises(DeviceMemoryError, match=r"weights \(0.00 GiB as they are stored\); end "):
        LLM(str(tiny_path), max_model_len=64)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_that_libraries_and_recordings_lack_is_explained_too(said: str) -> None:
    with (
        pytest.raises(DeviceMemoryError, match=r"^the GPU has no memory left for graphs; rec"),
        memory_for("graphs", "record fewer"),
    ):
        raise RuntimeError(said)


def test_other_errors_are_none_of_memory() -> None:
    with (
        pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access"),
        memory_for("graphs", "record fewer"),
    ):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_what_only_a_gpu_reads_is_named_on_a_cpu(
    tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hotshoe"):
        LLM(str(tiny_path), max_model_len=64, cache={"gpu_memory_utilization": 0.8}).close()
        LLM(str(tiny_path), max_model_len=64).close()
    (said,) = [one.getMessage() for one in caplog.records if "no effect" in one.message]
    assert said == (
        "cache.gpu_memory_utilization has no effect on a CPU; there it is cache.memory_fraction"
    )
