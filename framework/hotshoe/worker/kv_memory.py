"""Memory for KV pages, zeroed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hotshoe.api import KVLayout, KVTensor

# of a CPU's memory: what vectors and processor caches like, and what the system provides at a time
_PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20


def allocate_pages(
    layouts: Sequence[KVLayout], num_blocks: int, device: torch.device
) -> list[dict[str, Tensor]]:
    """A cache for each layout, by name of tensor: ``[num_blocks, *block_shape]``.

    On a CPU all of them lie in one piece of memory, which numpy asks the system to provide in huge
    pages: attention reads some KiB here and some there, each in another small page. It takes no
    memory before it is written to.
    """
    if device.type != "cpu":
        return [
            {one.name: _zeros(one, num_blocks, device) for one in layout.tensors}
            for layout in layouts
        ]
    tensors = [one for layout in layouts for one in layout.tensors]
    num_bytes = sum(_whole_pages(_block_bytes(one) * num_blocks) for one in tensors)
    memory = torch.from_numpy(np.zeros(num_bytes + _HUGE_PAGE_BYTES, np.uint8))
    rest = memory[-memory.data_ptr() % _HUGE_PAGE_BYTES :]
    caches = []
    for layout in layouts:
        cache = {}
        for one in layout.tensors:
            num_bytes = _block_bytes(one) * num_blocks
            cache[one.name] = rest[:num_bytes].view(_dtype(one)).view(num_blocks, *one.block_shape)
            rest = rest[_whole_pages(num_bytes) :]
        caches.append(cache)
    return caches


def _zeros(tensor: KVTensor, num_blocks: int, device: torch.device) -> Tensor:
    return torch.zeros((num_blocks, *tensor.block_shape), dtype=_dtype(tensor), device=device)


def _dtype(tensor: KVTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


def _block_bytes(tensor: KVTensor) -> int:
    return math.prod(tensor.block_shape) * _dtype(tensor).itemsize


def _whole_pages(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _PAGE_BYTES
