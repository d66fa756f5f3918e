"""How sampling moves numbers between the host and the device that holds the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from hotshoe.worker.streams import Streams


class Transfers:
    """Copies in both directions, done by the device in the order of its other work.

    Attributes:
        is_immediate: whether the device is the host. Then nothing is copied, and to read a tensor
            is to wait for nothing.
    """

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._streams = streams
        self._device = device
        self.is_immediate = streams.is_immediate

    def stage(self, values: NDArray[Any]) -> Tensor:
        """An array on the device; it isn't to be changed afterwards."""
        host = torch.from_numpy(values)
        if self.is_immediate:
            return host
        source = self._streams.host_tensor(host.numel(), host.dtype).view(host.shape)
        source.copy_(host)
        target = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self._streams.copy_in(source, target)
        return target

    def copy_out(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Start to copy tensors to the host; what is returned waits for them."""
        if self.is_immediate:
            return lambda: tensors
        return self._streams.copy_out(*tensors).wait
