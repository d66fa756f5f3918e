"""The compiled library of one instruction set, and the ops in it."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

_SOURCES = Path(__file__).parent / "src"
_FLAGS = {
    "avx512": "-DHS_ISA_AVX512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mfma",
    "avx2": "-DHS_ISA_AVX2 -mavx2 -mfma -mf16c",
    "portable": "",
}


class NativeOp:
    """One operation of the library.

    Attributes:
        address: of the function that a recorded list of ops holds.
    """

    def __init__(self, function: Callable[..., None], address: int) -> None:
        self._function = function
        self.address = address

    def __call__(self, args: ctypes.Structure, num_threads: int) -> None:
        """Run it now, on so many threads."""
        self._function(ctypes.byref(args), num_threads)


class NativeLibrary:
    """The library of one instruction set, loaded into this process.

    Attributes:
        isa: ``avx512``, ``avx2`` or ``portable``.
        path: of the shared object.
    """

    def __init__(self, isa: str, path: Path) -> None:
        self.isa = isa
        self.path = path
        self._cdll = ctypes.CDLL(str(path))

    def op(self, name: str) -> NativeOp:
        """The op that the sources define with ``HS_DEFINE_OP(name, ...)``."""
        function = getattr(self._cdll, f"hs_{name}")
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        function.restype = None
        address = ctypes.cast(getattr(self._cdll, f"hs_op_{name}"), ctypes.c_void_p).value
        assert address is not None
        return NativeOp(function, address)

    def function(self, name: str) -> Callable[..., None]:
        """An exported function; the caller sets ``argtypes`` and ``restype``."""
        return getattr(self._cdll, name)


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
