"""Memory of KV pages: how tensors lie in it, and that it isn't taken before it is written to."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from hotshoe.api import KVLayout, KVTensor
from hotshoe.worker.kv_memory import allocate_pages

LAYOUTS = [
    KVLayout(
        tensors=(
            KVTensor(name="k", block_shape=(3, 7), dtype="bfloat16"),
            KVTensor(name="scales", block_shape=(1,), dtype="float32"),
        ),
        bytes_per_block=46,
    ),
    KVLayout(
        tensors=(KVTensor(name="pages", block_shape=(2, 5, 3), dtype="int8"),), bytes_per_block=30
    ),
]


def test_tensors_are_zeroed_aligned_and_apart() -> None:
    caches = allocate_pages(LAYOUTS, 11, torch.device("cpu"))

    tensors = [tensor for cache in caches for tensor in cache.values()]
    assert [list(cache) for cache in caches] == [["k", "scales"], ["pages"]]
    assert [tuple(tensor.shape) for tensor in tensors] == [(11, 3, 7), (11, 1), (11, 2, 5, 3)]
    assert [tensor.dtype for tensor in tensors] == [torch.bfloat16, torch.float32, torch.int8]
    assert all(tensor.data_ptr() % 4096 == 0 and tensor.is_contiguous() for tensor in tensors)
    assert not any(tensor.any() for tensor in tensors)
    for value, tensor in enumerate(tensors, start=1):
        tensor.fill_(value)
    assert [{*tensor.flatten().tolist()} for tensor in tensors] == [{1}, {2}, {3}]


@pytest.mark.skipif(sys.platform != "linux", reason="what is resident is read from /proc")
def test_memory_is_taken_as_it_is_written_to() -> None:
    layout = KVLayout(
        tensors=(KVTensor(name="pages", block_shape=(1 << 20,), dtype="int8"),),
        bytes_per_block=1 << 20,
    )
    before = resident_bytes()

    caches = allocate_pages([layout] * 4, 256, torch.device("cpu"))  # a gigabyte
    assert resident_bytes() - before < 64 << 20

    caches[3]["pages"][:100].fill_(1)
    assert 90 << 20 < resident_bytes() - before < 164 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
