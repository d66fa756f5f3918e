"""The conformance suite of the KV-eviction contract. Subclass it, name your component, and run it
with pytest.

    class TestMyPolicy(EvictionConformance):
        def component(self) -> Component:
            return my_package.hotshoe_component()
"""

from __future__ import annotations

import random
from typing import Any, ClassVar, cast

from hotshoe.api import Component, EvictionContext, EvictionPolicy
from hotshoe.kv_cache import KVCacheManager


class EvictionConformance:
    """What every policy must get right, whatever its order. About a tenth of a second.

    Attributes:
        options: under ``cache.eviction.options``.
    """

    options: ClassVar[dict[str, Any]] = {}
    num_blocks = 32
    block_size = 4

    def component(self) -> Component:
        """The component under test."""
        raise NotImplementedError("a conformance suite has to name its component")

    def policy(self) -> EvictionPolicy:
        """A fresh policy for the suite's pool."""
        context = EvictionContext(num_blocks=self.num_blocks, block_size=self.block_size)
        component = self.component()
        return cast(EvictionPolicy, component.factory(component.options(**self.options), context))

    def test_component_states_the_contract_it_was_written_for(self) -> None:
        assert self.component().contract == "kv_eviction/0"

    def test_every_added_block_is_given_up_exactly_once(self) -> None:
        policy = self.policy()
        for block_id in range(self.num_blocks):
            policy.add(block_id, block_id % 3 == 0)
        popped = [policy.pop() for _ in range(self.num_blocks)]
        assert sorted(popped) == list(range(self.num_blocks)), popped

    def test_a_removed_block_is_not_given_up(self) -> None:
        policy = self.policy()
        for block_id in range(self.num_blocks):
            policy.add(block_id, True)
        removed = set(range(0, self.num_blocks, 5))
        for block_id in removed:
            policy.remove(block_id)
        popped = {policy.pop() for _ in range(self.num_blocks - len(removed))}
        assert popped == set(range(self.num_blocks)) - removed, popped

    def test_any_order_of_calls_keeps_the_added_blocks_exact(self) -> None:
        for seed in range(20):
            rng = random.Random(seed)
            policy = self.policy()
            free: dict[int, bool] = {}
            for _ in range(300):
                owned = [block_id for block_id in range(self.num_blocks) if block_id not in free]
                cached = [block_id for block_id, is_cached in free.items() if is_cached]
                move = rng.choice(["add"] * bool(owned) + ["remove"] * bool(cached) + ["pop"])
                if move == "add":
                    block_id = rng.choice(owned)
                    free[block_id] = rng.random() < 0.7
                    policy.add(block_id, free[block_id])
                elif move == "remove":
                    block_id = rng.choice(cached)
                    policy.remove(block_id)
                    del free[block_id]
                elif free:
                    block_id = policy.pop()
                    assert block_id in free, f"seed {seed}: gave up {block_id!r}, not added"
                    del free[block_id]
            assert {policy.pop() for _ in range(len(free))} == set(free), f"seed {seed}"

    def test_two_policies_share_nothing(self) -> None:
        first, second = self.policy(), self.policy()
        first.add(1, True)
        second.add(2, True)
        assert (second.pop(), first.pop()) == (2, 1)

    def test_it_serves_a_kv_cache_under_pressure(self) -> None:
        rng = random.Random(0)
        manager = KVCacheManager(
            num_blocks=self.num_blocks, block_size=self.block_size, eviction=self.policy()
        )
        for _ in range(300):
            held = []
            for _ in range(4):
                tenant = rng.randrange(6)
                num_tokens = rng.randrange(1, self.num_blocks * self.block_size // 4)
                blocks = manager.new_request([tenant] * num_tokens)
                manager.take_cached(blocks)
                assert manager.allocate(blocks, num_tokens) is not None, "free blocks were refused"
                manager.commit(blocks, num_tokens)
                held.append(blocks)
            for blocks in held:
                manager.free(blocks)
            assert manager.num_free_blocks == self.num_blocks, "blocks were lost"

    def test_blocks_without_content_can_be_taken_back_by_a_reset(self) -> None:
        policy = self.policy()
        manager = KVCacheManager(
            num_blocks=self.num_blocks, block_size=self.block_size, eviction=policy
        )
        num_tokens = self.num_blocks * self.block_size
        blocks = manager.new_request([0] * num_tokens)
        assert manager.allocate(blocks, num_tokens) is not None
        manager.commit(blocks, num_tokens)
        manager.free(blocks)
        assert manager.reset_prefix_cache(), "nothing was owned"
        assert manager.find_longest_cache_hit(blocks) == 0
        assert manager.allocate(blocks, num_tokens) is not None, "free blocks were refused"
