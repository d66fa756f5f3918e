"""``lru``: the block whose content was released longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict

from hotshoe.api import Component, EvictionContext, EvictionPolicy, PluginOptions, hookimpl


class LRU(EvictionPolicy):
    """Least recently used, with blocks that hold nothing worth keeping before all others.

    Of those the one freed last is reused first, because its memory is the likeliest to still be in
    a processor cache. Blocks of a request are released from its last to its first, so a chain loses
    its tail before the head without which the tail can't be hit.
    """

    def __init__(self) -> None:
        # both O(1) in every operation; a plain dict would rescan the holes that its front leaves
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._uncached: OrderedDict[int, None] = OrderedDict()

    def add(self, block_id: int, is_cached: bool) -> None:
        (self._cached if is_cached else self._uncached)[block_id] = None

    def remove(self, block_id: int) -> None:
        del (self._cached if block_id in self._cached else self._uncached)[block_id]

    def pop(self) -> int:
        if self._uncached:
            return self._uncached.popitem()[0]
        return self._cached.popitem(last=False)[0]


def build(options: PluginOptions, context: EvictionContext) -> LRU:
    """Factory of the component; needs nothing of what it is given."""
    return LRU()


@hookimpl
def hotshoe_component() -> Component:
    return Component(contract="kv_eviction/0", factory=build)
