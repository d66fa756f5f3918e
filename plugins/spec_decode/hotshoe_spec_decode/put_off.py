"""``PutOffBlocks``: blocks of the KV cache that a drafter's layers have yet to write."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Value = TypeVar("Value")


class PutOffBlocks(Generic[Value]):
    """What it takes to write blocks later, by the tokens that lead to their end: so a request finds
    what one before it, whose blocks it shares, has put off.

    Args:
        block_size: of the KV cache.
        num_following: tokens behind a block that it depends on.
        max_blocks: the ones that nobody asked for longest are forgotten; what is in them stays
            unwritten, and those who share them draft badly.
    """

    def __init__(self, *, block_size: int, num_following: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._num_following = num_following
        self._max_blocks = max_blocks
        self._values: OrderedDict[int, Value] = OrderedDict()
        self._keys: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def put(self, request_id: str, token_ids: NDArray[np.int32], block: int, value: Value) -> None:
        """Put off a block.

        Args:
            token_ids: of the request, all that the block depends on among them.
            block: its number in the request.
            value: what it takes to write it.
        """
        key = self._keys_of(request_id, token_ids, block + 1)[block]
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._max_blocks:
            self._values.popitem(last=False)

    def take(
        self, request_id: str, token_ids: NDArray[np.int32], num_blocks: int
    ) -> list[tuple[int, Value]]:
        """Those of a request's first blocks that were put off, by number; they are written now."""
        if not self._values:
            return []
        keys = self._keys_of(request_id, token_ids, num_blocks)[:num_blocks]
        return [
            (block, self._values.pop(key)) for block, key in enumerate(keys) if key in self._values
        ]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Requests have ended; what they put off is kept for those that share it."""
        for request_id in request_ids:
            self._keys.pop(request_id, None)

    def _keys_of(self, request_id: str, token_ids: NDArray[np.int32], num_blocks: int) -> list[int]:
        keys = self._keys.setdefault(request_id, [])
        size = self._block_size
        for block in range(len(keys), num_blocks):
            last = (block + 1) * size + self._num_following
            tokens = token_ids[block * size : last].tobytes()
            keys.append(hash((keys[-1] if keys else 0, tokens)))
        return keys
