"""What a GPU's memory is used for, and what is said when it isn't enough."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from hotshoe.errors import DeviceMemoryError
from hotshoe.kv_cache.sizing import MemoryUse


class DeviceMemory(Protocol):
    """The memory of a GPU."""

    def now(self) -> MemoryUse:
        """What is used by all programs together; memory that is only kept for later isn't."""

    def watch(self) -> None:
        """Begin to watch for ``peak``."""

    def peak(self) -> MemoryUse:
        """The most that was used since ``watch``, once the GPU has done what it was asked."""


class CudaMemory:
    """Memory of an NVIDIA GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> MemoryUse:
        """What is used by all programs together; memory that is only kept for later isn't."""
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return MemoryUse(total_bytes, total_bytes - free_bytes)

    def watch(self) -> None:
        """Begin to watch for ``peak``."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> MemoryUse:
        """The most that was used since ``watch``, once the GPU has done what it was asked."""
        torch.cuda.synchronize(self._device)
        most_reserved = torch.cuda.max_memory_reserved(self._device)
        # what lies between torch's tensors is lost to others, so what torch has taken counts
        kept = torch.cuda.memory_reserved(self._device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        torch.cuda.empty_cache()
        return MemoryUse(total_bytes, total_bytes - free_bytes - kept + most_reserved)


# What doesn't come from torch's allocator: recordings, the libraries' own memory, kernels' code.
_SAID_BY_OTHERS = re.compile(
    r"CUDA error: out of memory|Triton Error \[CUDA\]: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)


@contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """Say what didn't fit into a GPU's memory, and what can be done.

    Raises:
        DeviceMemoryError: instead of the error of torch, Triton or a library.
    """
    try:
        yield
    except RuntimeError as error:
        is_torchs = isinstance(error, torch.OutOfMemoryError)
        if not is_torchs and not _SAID_BY_OTHERS.search(str(error)):
            raise
        raise DeviceMemoryError(
            f"the GPU has no memory left for {what}{_details(str(error))}; {remedy}"
        ) from error


def _details(message: str) -> str:
    """What torch says about amounts."""
    wanted = re.search(r"allocate ([\d.]+ \w+)", message)
    free = re.search(r"([\d.]+ \w+) is free", message)
    found = [
        *([f"{wanted[1]} were asked for"] if wanted else ()),
        *([f"{free[1]} are free"] if free else ()),
    ]
    return f": {', '.join(found)}" if found else ""
