"""Memory for weights, in huge pages: a decode step reads all of it, 4 KiB at a time otherwise."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_CHUNK_BYTES = 32 << 20
_HUGE_PAGE_BYTES = 2 << 20
_ALIGNMENT = 64


class WeightArena:
    """Hands out memory that lives as long as a tensor in it.

    Memory is reserved in chunks, and taken up as it is written: what has been handed out, and up to
    one huge page more per chunk.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def empty(self, num_bytes: int) -> Tensor:
        """One-dimensional uint8 of undefined content, aligned to 64 bytes."""
        size = num_bytes + -num_bytes % _ALIGNMENT
        if size > _CHUNK_BYTES:
            return _reserve(size)[:num_bytes]
        if size > self._chunk.numel():
            self._chunk = _reserve(_CHUNK_BYTES)
        taken, self._chunk = self._chunk[:num_bytes], self._chunk[size:]
        return taken


def _reserve(num_bytes: int) -> Tensor:
    memory = mmap.mmap(
        -1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    # only a hint: kernels may be built without huge pages
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]
