"""Record the ops of a forward pass once, and run them again as one list without Python.

Python's part of a forward pass costs about 5 us an op: a millisecond for a model of 30 layers, as
much as a tenth of a decode step. A recording runs the same ops with the same arguments; what
changes from step to step lies in tensors that stay where they are. A recording that is told which
numbers of rows it was made with can be made to compute fewer.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotshoe.api import NotRecordableError, Recording
from hotshoe_native.ops import NativeLibrary, OpArgs, recording

_ALIGNMENT = 64
# Views by their schemas, but seen when values go from a tensor to Python or to NumPy, and when a
# tensor comes from there, which would be gone at the first replay.
_NO_VIEWS = frozenset(("resolve_conj", "resolve_neg", "lift_fresh"))
_ALLOCATIONS = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))


class _OpEntry(ctypes.Structure):
    _fields_ = [("run", ctypes.c_void_p), ("args", ctypes.c_void_p)]


class OpRecording(Recording):
    """Recorded ops, with the tensors between them laid out in one arena.

    Attributes:
        outputs: what the recorded function returned; overwritten by each replay.
    """

    def __init__(
        self,
        library: NativeLibrary,
        calls: Sequence[_Call],
        outputs: tuple[Tensor, ...],
        arena: Tensor,
        sizes: Sequence[int],
    ) -> None:
        self.outputs = outputs
        self._rows = [_Rows(size) for size in sizes]
        for call in calls if sizes else ():
            _assign_rows(call.args, self._rows)
        # entries and arguments are only referred to by address
        self._keep = (arena, [call.args for call in calls])
        self._count = len(calls)
        self._num_threads = calls[0].num_threads if calls else 1
        entries = (_OpEntry * len(calls))()
        for entry, call in zip(entries, calls, strict=True):
            entry.run, entry.args = call.address, ctypes.addressof(call.args)
        self._entries = entries
        self._run = library.function("hs_run")
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._run.restype = None

    def resize(self, sizes: Sequence[int]) -> None:
        for rows, size in zip(self._rows, sizes, strict=True):
            rows.resize(size)

    def replay(self) -> None:
        self._run(self._entries, self._count, self._num_threads)


class _Rows:
    """Everything that has to know how many rows of one kind there are."""

    def __init__(self, recorded: int) -> None:
        self.recorded = self._now = recorded
        self._counts: list[tuple[ctypes.c_int64, int]] = []

    def add(self, args: OpArgs, field: str) -> None:
        """Keep a field of arguments the multiple of the rows that it is."""
        offset: int = getattr(type(args), field).offset
        multiple = getattr(args, field) // self.recorded
        self._counts.append((ctypes.c_int64.from_buffer(args, offset), multiple))

    def resize(self, size: int) -> None:
        if not 0 <= size <= self.recorded:
            raise ValueError(f"recorded with {self.recorded} rows, so it can't have {size}")
        if size != self._now:
            for count, multiple in self._counts:
                count.value = multiple * size
            self._now = size


def _assign_rows(args: OpArgs, kinds: Sequence[_Rows]) -> None:
    name = type(args).__name__.removesuffix("Args")
    if args.row_counts is None:
        raise NotRecordableError(f"the op of {name} has no number of rows that can be lowered")
    for field in args.row_counts:
        count = getattr(args, field)
        fitting = [rows for rows in kinds if count and count % rows.recorded == 0]
        if len(fitting) != 1:
            sizes = " or ".join(str(rows.recorded) for rows in kinds)
            raise NotRecordableError(
                f"{name} works on {count} rows, which is not a multiple of one number that varies, "
                f"{sizes}"
            )
        fitting[0].add(args, field)


class OpRecorder:
    """Makes recordings, which share one arena: only one of them runs at a time."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._arena = torch.empty(0, dtype=torch.uint8)

    def record(
        self, run: Callable[[], tuple[Tensor, ...]], sizes: Sequence[int] = ()
    ) -> OpRecording:
        """Record what ``run`` calls, without running it.

        Args:
            run: as for ``Kernels.record``, as are ``sizes``.

        Raises:
            NotRecordableError: if it does anything but call native ops, allocate tensors, and take
                views; or if its ops run on different numbers of threads, or on numbers of rows
                that are no multiple of one of ``sizes``.
        """
        watch = _TensorWatch()
        calls: list[_Call] = []

        def add(address: int, args: OpArgs, num_threads: int) -> None:
            calls.append(_Call(address, type(args).from_buffer_copy(args), num_threads))

        with recording(add), watch:
            outputs = run()
        _refuse_different_teams(calls)
        buffers = _Buffers(watch.allocated)
        last_use = _last_uses(calls, buffers)
        for output in outputs:
            if not output.is_contiguous() or buffers.find(output.data_ptr()) is None:
                raise NotRecordableError("a result is not a tensor that the recorded ops allocated")
            last_use[buffers.index(output.data_ptr())] = len(calls)
        offsets, num_bytes = _plan(_first_uses(calls, buffers), last_use, buffers.sizes)
        arena = self._arena_of(num_bytes)
        _move(calls, buffers, offsets, arena.data_ptr())
        placed = tuple(_placed(output, buffers, offsets, arena) for output in outputs)
        return OpRecording(self._library, calls, placed, arena, sizes)

    def _arena_of(self, num_bytes: int) -> Tensor:
        """Grown by doubling: earlier recordings keep the smaller one that they were laid out in."""
        if num_bytes > self._arena.shape[0]:
            size = max(num_bytes, 2 * self._arena.shape[0]) + _ALIGNMENT
            memory = torch.empty(size, dtype=torch.uint8)
            self._arena = memory[-memory.data_ptr() % _ALIGNMENT :]
        return self._arena


@dataclass(slots=True)
class _Call:
    address: int
    args: OpArgs
    num_threads: int


class _TensorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Sees every torch operation: keeps what is allocated, lets views pass, refuses the rest."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.allocated: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # there's nothing to skip, and to say so torch would import its compiler: more than a second
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _ALLOCATIONS:
            result = func(*args, **(kwargs or {}))
            self.allocated.append(result)
            return result
        # refused before it runs: it would run once more, op by op, and tensors hold nothing yet
        if _is_view(func) and name not in _NO_VIEWS:
            result = func(*args, **(kwargs or {}))
            # some copy when they have to, such as reshape
            if _shares_memory(result, args[0]):
                return result
        raise NotRecordableError(f"it calls torch's {name}, which is not a native op")


def _refuse_different_teams(calls: Sequence[_Call]) -> None:
    """One team runs a whole recording, and an op has memory for as many threads as it named."""
    teams = sorted({call.num_threads for call in calls})
    if len(teams) > 1:
        listed = " and ".join(map(str, teams))
        raise NotRecordableError(
            f"its ops run on different numbers of threads ({listed}); "
            f"give the options num_threads of kernels and attention one value"
        )


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )


def _shares_memory(result: Any, tensor: Tensor) -> bool:
    views = result if isinstance(result, list | tuple) else [result]
    start = tensor.untyped_storage().data_ptr()
    return all(view.untyped_storage().data_ptr() == start for view in views)


class _Buffers:
    """The tensors allocated while recording, by address."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # the tensors stay alive until everything is laid out, so that no two share an address
        self._tensors = sorted((one for one in tensors if one.nbytes), key=Tensor.data_ptr)
        self._starts = [one.data_ptr() for one in self._tensors]
        self.sizes = [one.nbytes for one in self._tensors]

    def find(self, address: int) -> int | None:
        """Index of the buffer that an address points into."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._starts[index] + self.sizes[index]:
            return None
        return index

    def index(self, address: int) -> int:
        """As ``find``, for an address known to lie in one."""
        found = self.find(address)
        assert found is not None
        return found

    def moved(self, address: int, offsets: Sequence[int]) -> int:
        """Where an address within a buffer has come to lie, from the start of the arena."""
        index = self.index(address)
        return offsets[index] + address - self._starts[index]


def _pointers(args: OpArgs) -> Iterator[tuple[str, int]]:
    for field in args._fields_:
        if field[1] is ctypes.c_void_p:
            value = getattr(args, field[0])
            if value:
                yield field[0], value


def _uses(calls: Sequence[_Call], buffers: _Buffers) -> Iterator[tuple[int, int]]:
    """Call and buffer index of every pointer into a buffer."""
    for at, call in enumerate(calls):
        for _, address in _pointers(call.args):
            index = buffers.find(address)
            if index is not None:
                yield at, index


def _last_uses(calls: Sequence[_Call], buffers: _Buffers) -> list[int]:
    last = [-1] * len(buffers.sizes)
    for at, index in _uses(calls, buffers):
        last[index] = at
    return last


def _first_uses(calls: Sequence[_Call], buffers: _Buffers) -> list[int]:
    first = [len(calls)] * len(buffers.sizes)
    for at, index in _uses(calls, buffers):
        first[index] = min(first[index], at)
    return first


def _plan(first: Sequence[int], last: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], int]:
    """Give each buffer the lowest place that is free from its first use to its last one.

    Returns:
        Offsets, and the size of the arena.
    """
    offsets = [0] * len(sizes)
    placed: list[int] = []
    total = 0
    for index in sorted(range(len(sizes)), key=lambda one: (first[one], -sizes[one])):
        size = sizes[index] + -sizes[index] % _ALIGNMENT
        live = sorted(
            (offsets[other], sizes[other])
            for other in placed
            if last[other] >= first[index] and first[other] <= last[index]
        )
        offset = 0
        for start, length in live:
            if start >= offset + size:
                break
            offset = max(offset, start + length + -length % _ALIGNMENT)
        offsets[index] = offset
        placed = [other for other in placed if last[other] >= first[index]]
        placed.append(index)
        total = max(total, offset + size)
    return offsets, total


def _placed(output: Tensor, buffers: _Buffers, offsets: Sequence[int], arena: Tensor) -> Tensor:
    place = buffers.moved(output.data_ptr(), offsets)
    return arena[place : place + output.nbytes].view(output.dtype).view(output.shape)


def _move(
    calls: Sequence[_Call], buffers: _Buffers, offsets: Sequence[int], arena_address: int
) -> None:
    for call in calls:
        for name, address in _pointers(call.args):
            if buffers.find(address) is not None:
                setattr(call.args, name, arena_address + buffers.moved(address, offsets))
