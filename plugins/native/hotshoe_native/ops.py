"""The loaded library: its ops, called now or recorded for later."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar


class OpArgs(ctypes.Structure):
    """Arguments of an op.

    Attributes:
        row_counts: fields with the number of rows that the op works on, which a recording may
            lower; None = it can't be lowered.
    """

    row_counts: ClassVar[tuple[str, ...] | None] = None


AddCall = Callable[[int, OpArgs, int], None]
"""Takes an op's address, its arguments, and the number of threads, in place of running it."""

# of this thread, and of all libraries: a list may hold ops of several instruction sets
_add_call: ContextVar[AddCall | None] = ContextVar("_add_call", default=None)


@contextmanager
def recording(add: AddCall) -> Iterator[None]:
    """Hand the ops that this thread calls to ``add`` instead of running them."""
    token = _add_call.set(add)
    try:
        yield
    finally:
        _add_call.reset(token)


class NativeLibrary:
    """The library of one instruction set, loaded into this process.

    Attributes:
        isa: ``avx512``, ``avx2`` or ``portable``.
        path: of the shared object.

    Raises:
        OSError: if the file is no library.
    """

    def __init__(self, isa: str, path: Path) -> None:
        self.isa = isa
        self.path = path
        self._cdll = ctypes.CDLL(str(path))

    def op(self, name: str) -> NativeOp:
        """The op that the sources define with ``HS_DEFINE_OP(name, ...)``."""
        return NativeOp(self, name)

    def function(self, name: str) -> Any:
        """An exported function; the caller sets ``argtypes`` and ``restype``."""
        return getattr(self._cdll, name)


class NativeOp:
    """One operation of the library.

    Attributes:
        address: of the function that a recorded list of ops holds.
    """

    __slots__ = ("_function", "address")

    def __init__(self, library: NativeLibrary, name: str) -> None:
        function = library.function(f"hs_{name}")
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        function.restype = None
        address = ctypes.cast(library.function(f"hs_op_{name}"), ctypes.c_void_p).value
        assert address is not None
        self._function = function
        self.address = address

    def __call__(self, args: OpArgs, num_threads: int) -> None:
        """Run it on so many threads, or record it; ``args`` may be reused either way."""
        add = _add_call.get()
        if add is None:
            self._function(ctypes.byref(args), num_threads)
        else:
            add(self.address, args, num_threads)
