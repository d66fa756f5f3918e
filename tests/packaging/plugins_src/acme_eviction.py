"""``mru``: the block that was released last goes first."""

from __future__ import annotations

from hotshoe.api import Component, EvictionPolicy, hookimpl


class MostRecent(EvictionPolicy):
    def __init__(self) -> None:
        self._blocks: dict[int, bool] = {}

    def add(self, block_id: int, is_cached: bool) -> None:
        self._blocks[block_id] = is_cached

    def remove(self, block_id: int) -> None:
        del self._blocks[block_id]

    def pop(self) -> int:
        uncached = (block_id for block_id, is_cached in self._blocks.items() if not is_cached)
        chosen = next(uncached, None)
        if chosen is None:
            chosen = next(reversed(self._blocks))
        del self._blocks[chosen]
        return chosen


@hookimpl
def hotshoe_component() -> Component:
    return Component(contract="kv_eviction/0", factory=lambda options, context: MostRecent())
