"""Compile Triton kernels for GPUs that aren't there: for tests, and for reading what comes out.

    with compile_only(90) as launches:
        my_op(torch.empty(8, 64, dtype=torch.bfloat16, device="meta"))
    assert launches[0].shared_bytes < 100_000

What is launched inside is compiled for that GPU with the arguments it is launched with, as Triton
specialises on them, and not run: tensors may be on any device, and those of ``meta`` need no
memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from hotshoe_triton.runtime import is_interpreting

CAPABILITIES = (80, 90, 100)
"""What tests compile for: Ampere, Hopper and Blackwell data centre GPUs."""

_MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
_NUM_PROCESSORS = {80: 108, 90: 132, 100: 148}
_WARP_SIZE = 32


@dataclass(frozen=True, slots=True)
class CompiledLaunch:
    """A launch that was compiled instead.

    Attributes:
        name: of the kernel.
        capability: what it was compiled for: 90 is compute capability 9.0.
        grid: numbers of programs.
        num_warps: of each program.
        shared_bytes: shared memory of each program; more than the GPU has is an error earlier.
        cubin: the machine code.
    """

    name: str
    capability: int
    grid: tuple[int, int, int]
    num_warps: int
    shared_bytes: int
    cubin: bytes

    @property
    def num_registers(self) -> int:
        """Of each thread."""
        return _resources(self.cubin)["REG"]

    @property
    def local_bytes(self) -> int:
        """Memory of each thread for what didn't fit into registers."""
        found = _resources(self.cubin)
        return max(found["LOCAL"], found["STACK"])


@lru_cache
def _resources(cubin: bytes) -> dict[str, int]:
    """What a kernel takes, by the names that the disassembler gives."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(size) for name, size in re.findall(r"\b(REG|LOCAL|STACK):(\d+)", listed)}


@contextmanager
def compile_only(capability: int) -> Iterator[list[CompiledLaunch]]:
    """Compile what is launched inside for a GPU of that compute capability, and don't run it.

    Raises:
        ValueError: for a capability that is not among ``CAPABILITIES``.
        RuntimeError: if Triton interprets.
        triton.runtime.errors.OutOfResources: from a launch that takes more shared memory or threads
            than such a GPU has.
    """
    if capability not in CAPABILITIES:
        raise ValueError(f"capability is {capability!r}; allowed: {CAPABILITIES}")
    if is_interpreting():
        raise RuntimeError("kernels are interpreted, not compiled; unset TRITON_INTERPRET")
    try:
        before = driver.active
    except RuntimeError:  # there is no GPU
        before = None
    launches: list[CompiledLaunch] = []
    driver.set_active(_NoDevice(capability, launches))
    try:
        yield launches
    finally:
        driver.set_active(before)


# Triton keeps compiled kernels by device, with how they are launched: each context is one of its
# own, with a number that no GPU has.
_numbers = count(1000)


class _NoDevice(DriverBase):  # type: ignore[misc]  # triton is untyped
    """A driver whose device is only described: Triton compiles for it, and launches nothing."""

    def __init__(self, capability: int, launches: list[CompiledLaunch]) -> None:
        super().__init__()
        self._capability = capability
        self._number = next(_numbers)
        self.utils = _Loader(capability)
        self.launcher_cls = partial(_Launcher, capability, launches)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, _WARP_SIZE)

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise RuntimeError("there is no device: kernels are compiled, not run")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("nothing can be measured: kernels are compiled, not run")


class _Loader:
    """What Triton asks a driver's C part for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": _MAX_SHARED_BYTES[self._capability],
            "multiprocessor_count": _NUM_PROCESSORS[self._capability],
            "warpSize": _WARP_SIZE,
        }

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[None, bytes, int, int, int]:
        """Module, function (what the launcher is called with: the machine code), registers, spills,
        and most threads of a program.
        """
        return None, kernel, 0, 0, 1024


class _Launcher:
    """Notes each launch of one compiled kernel."""

    def __init__(
        self, capability: int, launches: list[CompiledLaunch], source: object, metadata: Any
    ) -> None:
        self._capability = capability
        self._launches = launches
        self._metadata = metadata

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: bytes, *arguments: object
    ) -> None:
        self._launches.append(
            CompiledLaunch(
                name=self._metadata.name,
                capability=self._capability,
                grid=(x, y, z),
                num_warps=self._metadata.num_warps,
                shared_bytes=self._metadata.shared,
                cubin=function,
            )
        )
