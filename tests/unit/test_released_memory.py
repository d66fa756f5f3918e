"""What loading has freed goes back to the system."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from hotshoe.weights.loader import release_freed_memory

NUM_TENSORS, NUM_BYTES = 1000, 100_000


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(one for one in status.splitlines() if one.startswith("VmRSS:"))
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to")
def test_memory_between_tensors_that_stay_is_given_back() -> None:
    tensors = [torch.ones(NUM_BYTES, dtype=torch.uint8) for _ in range(NUM_TENSORS)]
    last = tensors.pop()  # at the end of the heap, which glibc shortens on its own otherwise
    del tensors
    before = resident_bytes()
    release_freed_memory()
    assert before - resident_bytes() > NUM_TENSORS * NUM_BYTES // 2
    assert last.sum() == NUM_BYTES
