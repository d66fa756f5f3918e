"""``Staging``: arrays of the host, side by side in one piece of memory that is copied at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotshoe.worker.streams import Copy, Streams

_NUM_BUFFERS = 2  # the host writes one while the other is read


@dataclass(frozen=True, slots=True)
class Piece:
    """Where an array lies among the words of a ``Staging``, counted in words of 64 bits."""

    start: int
    size: int
    dtype: torch.dtype

    def of(self, words: Tensor) -> Tensor:
        """``[size]``, a view of the copied words."""
        if self.dtype is torch.int64:
            return words[self.start : self.start + self.size]
        return words[self.start : self.start + _num_words(self.size)].view(torch.int32)[: self.size]


class Staging:
    """Writes arrays for a device, and starts to copy them.

    Args:
        streams: copy them.
        device: where to.
    """

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._streams = streams
        self._device = device
        nothing = streams.host_tensor(0, torch.int64)
        self._buffers: list[tuple[Tensor, Copy | None]] = [(nothing, None)] * _NUM_BUFFERS
        self._turn = 0
        self._words = np.zeros(0, np.int64)
        self._num_words = 0

    def begin(self, num_words: int) -> None:
        """Make room for so many words; what was copied from there before has arrived.

        Args:
            num_words: one for each int64, and one for two int32, rounded up by array.
        """
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        buffer, copy = self._buffers[self._turn]
        if copy is not None:
            copy.wait()
        if len(buffer) < num_words:
            buffer = self._streams.host_tensor(2 * num_words, torch.int64)
        self._buffers[self._turn] = buffer, None
        self._words = buffer.numpy()
        self._num_words = 0

    def put(self, values: np.ndarray, size: int | None = None, padding: int = 0) -> Piece:
        """Write an array, as int64.

        Args:
            values: whole numbers.
            size: of what is written, if it is longer than the values.
            padding: what the rest is filled with.
        """
        start, count = self._num_words, len(values)
        size = count if size is None else size
        self._words[start : start + count] = values
        if size > count:
            self._words[start + count : start + size] = padding
        self._num_words += size
        return Piece(start, size, torch.int64)

    def put_int32(self, values: np.ndarray, size: int | None = None) -> Piece:
        """Write an array, as int32; the rest of a longer size is filled with 0."""
        start, count = self._num_words, len(values)
        size = count if size is None else size
        num_words = _num_words(size)
        halves = self._words[start : start + num_words].view(np.int32)
        halves[:count] = values
        halves[count:] = 0
        self._num_words += num_words
        return Piece(start, size, torch.int32)

    def copy(self, target: Tensor | None = None) -> Tensor:
        """Start to copy what was written.

        Args:
            target: ``[at least as many words]`` int64 on the device; None = new memory.

        Returns:
            The words on the device.
        """
        num_words = self._num_words
        if target is None:
            target = torch.empty(num_words, dtype=torch.int64, device=self._device)
        buffer, _ = self._buffers[self._turn]
        copy = self._streams.copy_in(buffer[:num_words], target[:num_words])
        self._buffers[self._turn] = buffer, copy
        return target


def _num_words(num_int32: int) -> int:
    return (num_int32 + 1) // 2
