"""The compiled library of one instruction set, and the ops in it."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from hotshoe_native.ops import NativeLibrary, NativeOp

__all__ = ["NativeLibrary", "NativeOp", "load"]

_SOURCES = Path(__file__).parent / "src"
_FLAGS = {
    "avx512": "-DHS_ISA_AVX512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mfma",
    "avx2": "-DHS_ISA_AVX2 -mavx2 -mfma -mf16c",
    "portable": "",
}


@functools.cache
def load(isa: str = "avx512") -> NativeLibrary:
    """The library for an instruction set."""
    import torch

    gomp = next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    out = Path(tempfile.mkdtemp()) / "lib.so"
    sources = " ".join(map(str, sorted(_SOURCES.glob("*.cpp"))))
    subprocess.run(
        f"g++ -std=c++17 -O3 {_FLAGS[isa]} -fPIC -shared -fvisibility=hidden -o {out} {sources} {gomp}",
        shell=True,
        check=True,
    )
    return NativeLibrary(isa, out)
