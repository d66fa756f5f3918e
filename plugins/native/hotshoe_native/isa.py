"""The instruction sets that the sources can be compiled for, and which of them this CPU has."""

from __future__ import annotations

import functools
import platform
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotshoe_native.errors import NativeError

Isa = Literal["auto", "avx512", "avx2", "portable"]
"""Type of the plugins' option ``isa``; ``auto`` is the widest that the CPU has."""

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One target of compilation.

    Attributes:
        cpu_flags: what the CPU must have, as ``/proc/cpuinfo`` spells it.
        compiler_flags: what makes the compiler use it. They name every extension, so that the same
            library runs on any CPU that has them.
    """

    name: str
    cpu_flags: tuple[str, ...] = ()
    compiler_flags: tuple[str, ...] = ()


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni")

INSTRUCTION_SETS = (
    InstructionSet(
        "avx512",
        (*_AVX512, *_AVX2),
        (
            *("-DHS_ISA_AVX512", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
            *("-mavx512bf16", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"),
        ),
    ),
    InstructionSet("avx2", _AVX2, ("-DHS_ISA_AVX2", "-mavx2", "-mfma", "-mf16c")),
    InstructionSet("portable"),
)
"""The widest first."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What the CPU has and the kernel lets programs use; empty where that can't be read."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def available(flags: Set[str] | None = None) -> list[InstructionSet]:
    """Instruction sets of a CPU with these flags, the widest first; None = of this one."""
    has = cpu_flags() if flags is None else flags
    return [isa for isa in INSTRUCTION_SETS if has >= set(isa.cpu_flags)]


def choose(name: str, flags: Set[str] | None = None) -> InstructionSet:
    """The instruction set of that name; for ``auto`` the widest that the CPU has.

    Args:
        name: also ``auto``.
        flags: of the CPU; None = of this one.

    Raises:
        NativeError: if there is none of that name, or the CPU lacks it.
    """
    has = cpu_flags() if flags is None else flags
    if name == "auto":
        return available(has)[0]
    found = next((isa for isa in INSTRUCTION_SETS if isa.name == name), None)
    usable = ", ".join(isa.name for isa in available(has))
    if found is None:
        raise NativeError(f"no instruction set named {name!r}; this CPU has: {usable}")
    missing = [flag for flag in found.cpu_flags if flag not in has]
    if missing:
        raise NativeError(
            f"isa is {name!r} but this CPU lacks {', '.join(missing)}; set isa to auto or one of: "
            f"{usable}"
        )
    return found
