"""``random``: any block, by a seeded generator."""

from __future__ import annotations

import random

from hotshoe.api import Component, EvictionPolicy, PluginOptions, hookimpl


class RandomOptions(PluginOptions):
    seed: int = 0


class AnyBlock(EvictionPolicy):
    def __init__(self, options: RandomOptions) -> None:
        self._numbers = random.Random(options.seed)
        self._blocks: set[int] = set()

    def add(self, block_id: int, is_cached: bool) -> None:
        self._blocks.add(block_id)

    def remove(self, block_id: int) -> None:
        self._blocks.remove(block_id)

    def pop(self) -> int:
        chosen = self._numbers.choice(sorted(self._blocks))
        self._blocks.remove(chosen)
        return chosen


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="kv_eviction/0",
        factory=lambda options, context: AnyBlock(options),
        options=RandomOptions,
    )
