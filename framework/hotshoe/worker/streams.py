"""``Streams``: how inputs reach the device, and results come back, while Python goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy that was started."""

    def wait(self) -> None:
        """Return when it is done."""


class HostCopy:
    """Tensors on their way from the device.

    Args:
        tensors: where they arrive.
        copy: what brings them.
    """

    __slots__ = ("_copy", "_tensors")

    def __init__(self, tensors: tuple[Tensor, ...], copy: Copy) -> None:
        self._tensors = tensors
        self._copy = copy

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the CPU, once they are there."""
        self._copy.wait()
        return self._tensors


class Streams(ABC):
    """Copies between CPU and device, each in the order of the device's other work.

    Work on the device is started in the order in which Python asks for it, and done in that order
    later. So nothing here is needed between what runs there; only where memory of the CPU is read
    or written, somebody has to wait for a copy.

    Attributes:
        is_immediate: whether the device is the CPU, where its tensors can be read at any time.
    """

    is_immediate = False

    @abstractmethod
    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        """``[size]`` zeros on the CPU, in memory that ``copy_in`` can read while Python goes on."""

    @abstractmethod
    def copy_in(self, source: Tensor, target: Tensor) -> Copy:
        """Start to copy memory of ``host_tensor`` into a tensor on the device.

        Args:
            source: not to be written to before the copy is done.
            target: of the same shape and dtype.
        """

    @abstractmethod
    def copy_out(self, *sources: Tensor) -> HostCopy:
        """Start to copy tensors of the device, as they are when what was asked of it so far is
        done; they may be overwritten by what is asked of it afterwards.
        """


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


_DONE = _Done()


class CpuStreams(Streams):
    """For a device that is the CPU: every copy is done at once."""

    is_immediate = True

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def copy_in(self, source: Tensor, target: Tensor) -> Copy:
        target.copy_(source)
        return _DONE

    def copy_out(self, *sources: Tensor) -> HostCopy:
        return HostCopy(tuple(source.clone() for source in sources), _DONE)


class CudaStreams(Streams):
    """On the current stream of a GPU, from and to page-locked memory.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def copy_in(self, source: Tensor, target: Tensor) -> Copy:
        target.copy_(source, non_blocking=True)
        return self._mark()

    def copy_out(self, *sources: Tensor) -> HostCopy:
        targets = tuple(
            torch.empty(source.shape, dtype=source.dtype, pin_memory=True) for source in sources
        )
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        return HostCopy(targets, self._mark())

    def _mark(self) -> Copy:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(self._device))
        return _Reached(event)


class _Reached:
    """A place in the order of a GPU's work."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Return when the GPU has come to it."""
        self._event.synchronize()


def streams_for(device: torch.device) -> Streams:
    """Those of a device."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
