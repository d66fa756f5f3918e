"""The ``lru`` eviction policy."""

from __future__ import annotations

from hotshoe.api import Component, EvictionContext, EvictionPolicy, PluginOptions
from hotshoe.testing.eviction import EvictionConformance
from hotshoe_kv_eviction.lru import hotshoe_component


def create(context: EvictionContext) -> EvictionPolicy:
    policy = hotshoe_component().factory(PluginOptions(), context)
    assert isinstance(policy, EvictionPolicy)
    return policy


def lru() -> EvictionPolicy:
    return create(EvictionContext(num_blocks=8, block_size=16))


class TestLRU(EvictionConformance):
    def component(self) -> Component:
        return hotshoe_component()


def test_cached_blocks_are_given_up_in_the_order_in_which_they_were_released() -> None:
    policy = lru()
    for block_id in (3, 1, 2):
        policy.add(block_id, True)
    assert [policy.pop() for _ in range(3)] == [3, 1, 2]


def test_a_block_that_was_hit_and_released_again_is_the_latest() -> None:
    policy = lru()
    for block_id in (3, 1, 2):
        policy.add(block_id, True)
    policy.remove(3)
    policy.add(3, True)
    assert [policy.pop() for _ in range(3)] == [1, 2, 3]


def test_blocks_without_content_are_reused_before_older_cached_ones() -> None:
    policy = lru()
    policy.add(0, True)
    policy.add(5, False)
    policy.add(6, False)
    assert [policy.pop() for _ in range(3)] == [6, 5, 0]
