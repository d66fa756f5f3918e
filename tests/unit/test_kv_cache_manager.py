"""KVCacheManager: hits, allocation, release, and what a request may count on."""

from __future__ import annotations

import pytest

from hotshoe.api import EvictionPolicy
from hotshoe.errors import KVCacheError
from hotshoe.kv_cache import KVCacheManager, PrefixCacheStats, RequestBlocks
from hotshoe_kv_eviction.lru import LRU


def make(num_blocks: int = 16, block_size: int = 4, **options: object) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        eviction=LRU(),
        **options,  # type: ignore[arg-type]
    )


def computed(manager: KVCacheManager, token_ids: list[int], **options: object) -> RequestBlocks:
    """A request whose tokens are all computed."""
    blocks = manager.new_request(token_ids, **options)  # type: ignore[arg-type]
    manager.take_cached(blocks)
    assert manager.allocate(blocks, len(token_ids)) is not None
    manager.commit(blocks, len(token_ids))
    return blocks


def hit(manager: KVCacheManager, token_ids: list[int], **options: object) -> int:
    return manager.find_longest_cache_hit(
        manager.new_request(token_ids, **options)  # type: ignore[arg-type]
    )


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


# allocation


def test_allocate_returns_only_the_appended_blocks() -> None:
    manager = make()
    blocks = manager.new_request(tokens(9))
    first = manager.allocate(blocks, 5)
    second = manager.allocate(blocks, 9)
    assert first is not None
    assert second is not None
    assert (len(first[0]), len(second[0])) == (2, 1)
    assert blocks.block_ids == ([*first[0], *second[0]],)
    assert (blocks.capacity, blocks.num_blocks, manager.num_free_blocks) == (12, 3, 13)


def test_allocate_within_capacity_appends_nothing() -> None:
    manager = make()
    blocks = manager.new_request(tokens(5))
    manager.allocate(blocks, 5)
    assert manager.allocate(blocks, 8) == ((),)
    assert manager.num_free_blocks == 14


def test_allocate_without_enough_free_blocks_changes_nothing() -> None:
    manager = make(num_blocks=4)
    blocks = manager.new_request(tokens(8))
    manager.allocate(blocks, 8)
    before = (list(blocks.block_ids[0]), blocks.capacity, manager.num_free_blocks)
    assert manager.allocate(blocks, 17) is None
    assert (list(blocks.block_ids[0]), blocks.capacity, manager.num_free_blocks) == before
    assert manager.allocate(blocks, 16) is not None


def test_every_cache_group_gets_blocks_of_its_own() -> None:
    manager = make(num_groups=3)
    blocks = manager.new_request(tokens(8))
    appended = manager.allocate(blocks, 8)
    assert appended is not None
    assert [len(ids) for ids in appended] == [2, 2, 2]
    assert len({block_id for ids in appended for block_id in ids}) == blocks.num_blocks == 6
    assert (manager.num_free_blocks, manager.can_ever_fit(20), manager.can_ever_fit(21)) == (
        10,
        True,
        False,
    )


def test_usage_and_can_ever_fit_follow_the_pool() -> None:
    manager = make()
    manager.allocate(manager.new_request(tokens(16)), 16)
    assert manager.usage == 0.25
    assert (manager.can_ever_fit(64), manager.can_ever_fit(65)) == (True, False)


@pytest.mark.parametrize("options", [{"num_blocks": 0}, {"block_size": 0}, {"num_groups": 0}])
def test_a_pool_without_room_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(KVCacheError, match="at least 1"):
        make(**options)


# prefix hits


def test_a_second_request_shares_the_full_blocks_of_the_first() -> None:
    manager = make()
    first = computed(manager, tokens(10))
    second = manager.new_request([*tokens(10), 99])
    assert manager.take_cached(second) == second.num_cached_tokens == 8
    assert second.block_ids[0] == first.block_ids[0][:2]
    assert second.capacity == 8
    assert manager.num_free_blocks == 13


def test_the_last_token_of_a_fully_cached_prompt_is_left_to_compute() -> None:
    manager = make()
    computed(manager, tokens(12))
    assert hit(manager, tokens(12)) == 8
    assert hit(manager, tokens(13)) == 12
    assert hit(manager, tokens(1)) == 0


def test_nothing_is_hit_before_it_is_committed() -> None:
    manager = make()
    blocks = manager.new_request(tokens(12))
    manager.take_cached(blocks)
    manager.allocate(blocks, 12)
    assert hit(manager, tokens(12)) == 0
    manager.commit(blocks, 7)
    assert hit(manager, tokens(12)) == 4
    manager.commit(blocks, 8)
    assert hit(manager, tokens(12)) == 8


def test_output_tokens_can_be_hit_too() -> None:
    manager = make()
    token_ids = tokens(3)
    blocks = computed(manager, token_ids)
    token_ids.extend([50, 51])
    manager.allocate(blocks, 5)
    manager.commit(blocks, 4)
    assert hit(manager, [0, 1, 2, 50, 7]) == 4


def test_a_hit_ends_at_the_first_difference() -> None:
    manager = make()
    computed(manager, tokens(16))
    assert hit(manager, [*tokens(6), 77, *tokens(9, 7)]) == 4


@pytest.mark.parametrize("option", ["salt", "adapter"])
def test_requests_of_different_domains_share_nothing(option: str) -> None:
    manager = make()
    computed(manager, tokens(12), **{option: "a"})
    assert hit(manager, tokens(12), **{option: "a"}) == 8
    assert hit(manager, tokens(12), **{option: "b"}) == 0
    assert hit(manager, tokens(12)) == 0


def test_a_request_that_needs_every_position_hits_nothing_but_fills_the_cache() -> None:
    manager = make()
    computed(manager, tokens(12))
    second = manager.new_request(tokens(12), use_prefix_cache=False)
    assert manager.take_cached(second) == 0
    manager.allocate(second, 12)
    computed(manager, tokens(8, 40), use_prefix_cache=False)
    assert hit(manager, tokens(9, 40)) == 8


def test_without_prefix_caching_nothing_is_hit_or_counted() -> None:
    manager = make(enable_prefix_caching=False)
    computed(manager, tokens(12))
    computed(manager, tokens(12))
    assert manager.stats == PrefixCacheStats()
    assert hit(manager, tokens(12)) == 0


def test_a_hit_is_found_as_soon_as_another_request_commits() -> None:
    manager = make()
    waiting = manager.new_request(tokens(12))
    assert manager.find_longest_cache_hit(waiting) == 0
    first = computed(manager, tokens(12))
    assert manager.find_longest_cache_hit(waiting) == 8
    manager.free(first)
    assert manager.allocate(manager.new_request(tokens(64, 100)), 64) is not None
    assert manager.find_longest_cache_hit(waiting) == 0


def test_released_blocks_stay_hittable_until_they_are_needed() -> None:
    manager = make(num_blocks=4)
    manager.free(computed(manager, tokens(16)))
    assert (manager.num_free_blocks, hit(manager, tokens(16))) == (4, 12)
    manager.allocate(manager.new_request(tokens(4, 90)), 4)
    # the chain lost its tail, not its head
    assert hit(manager, tokens(16)) == 12
    manager.allocate(manager.new_request(tokens(4, 90)), 4)
    assert hit(manager, tokens(16)) == 8
    assert manager.stats.num_evicted_blocks == 2


class Scripted(EvictionPolicy):
    """Gives up blocks in the order that it was told."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def add(self, block_id: int, is_cached: bool) -> None: ...

    def remove(self, block_id: int) -> None: ...

    def pop(self) -> int:
        return self.order.pop(0)


@pytest.mark.parametrize(("evicted", "num_hit"), [([5, 7], 4), ([1, 3], 4), ([3, 6], 8)])
def test_a_hit_needs_its_block_in_every_group(evicted: list[int], num_hit: int) -> None:
    manager = KVCacheManager(
        num_blocks=8, block_size=4, num_groups=2, eviction=Scripted([*range(8), *evicted])
    )
    blocks = computed(manager, tokens(16))
    assert blocks.block_ids == ([0, 1, 2, 3], [4, 5, 6, 7])
    manager.free(blocks)
    manager.allocate(manager.new_request(tokens(4, 90)), 4)
    assert hit(manager, [*tokens(16), 1]) == num_hit


def test_groups_lose_the_tail_of_a_chain_together() -> None:
    manager = make(num_blocks=8, num_groups=2)
    manager.free(computed(manager, tokens(16)))
    manager.allocate(manager.new_request(tokens(4, 90)), 4)
    manager.allocate(manager.new_request(tokens(4, 90)), 4)
    assert hit(manager, tokens(16)) == 8


def test_a_copy_takes_over_when_the_block_hit_first_is_overwritten() -> None:
    manager = make(num_blocks=4)
    first, second = manager.new_request(tokens(4)), manager.new_request(tokens(4))
    for blocks in (first, second):
        manager.take_cached(blocks)
        manager.allocate(blocks, 4)
    manager.commit(first, 4)
    manager.commit(second, 4)
    manager.free(first)
    third = manager.new_request(tokens(12, 50))
    manager.allocate(third, 12)
    reader = manager.new_request(tokens(5))
    assert manager.take_cached(reader) == 4
    assert reader.block_ids == second.block_ids
    assert manager.stats.num_evicted_blocks == 0


def test_a_copy_that_was_released_never_takes_over() -> None:
    manager = make(num_blocks=4)
    first, second = manager.new_request(tokens(4)), manager.new_request(tokens(4))
    for blocks in (first, second):
        manager.take_cached(blocks)
        manager.allocate(blocks, 4)
    manager.commit(first, 4)
    manager.commit(second, 4)
    manager.free(second)
    # the copy goes first, then the two blocks that never held anything
    other = manager.new_request(tokens(12, 50))
    manager.allocate(other, 12)
    assert hit(manager, tokens(5)) == 4
    manager.free(first)
    manager.allocate(other, 16)
    assert hit(manager, tokens(5)) == 0


def test_hits_are_counted_in_tokens() -> None:
    manager = make()
    computed(manager, tokens(12))
    computed(manager, tokens(12))
    assert manager.stats == PrefixCacheStats(num_queried_tokens=24, num_hit_tokens=8)


def test_a_drafter_that_reads_the_next_token_never_shares_across_a_fork() -> None:
    manager = make(reads_next_token=True)
    first = computed(manager, [*tokens(8), 1])
    fork = computed(manager, [*tokens(8), 2, 2, 2, 2, 2])
    # block 1 was computed before a 1 and before a 2: block 0 alone is common
    assert fork.num_cached_tokens == 4
    reader = manager.new_request([*tokens(8), 2, 2])
    assert manager.take_cached(reader) == 8
    assert reader.block_ids[0][1] == fork.block_ids[0][1] != first.block_ids[0][1]


def test_a_block_whose_next_token_is_unknown_is_registered_later() -> None:
    manager = make(reads_next_token=True)
    token_ids = tokens(4)
    blocks = computed(manager, token_ids)
    assert hit(manager, [*tokens(4), 9]) == 0
    token_ids.append(9)
    manager.allocate(blocks, 5)
    manager.commit(blocks, 4)
    assert hit(manager, [*tokens(4), 9]) == 4


# what admission costs


def test_blocks_needed_counts_hits_only_when_nobody_owns_them() -> None:
    manager = make()
    owner = computed(manager, tokens(12))
    waiting = manager.new_request(tokens(13))
    assert manager.num_blocks_needed(waiting, 13) == 1
    manager.free(owner)
    assert manager.num_blocks_needed(waiting, 13) == 4
    free = manager.num_free_blocks
    manager.take_cached(waiting)
    assert manager.num_blocks_needed(waiting, 13) == 1
    manager.allocate(waiting, 13)
    assert free - manager.num_free_blocks == 4


def test_blocks_needed_of_a_running_request_are_those_it_lacks() -> None:
    manager = make(num_groups=2)
    blocks = computed(manager, tokens(5))
    assert [manager.num_blocks_needed(blocks, count) for count in (5, 8, 9, 16)] == [0, 0, 2, 4]


def test_a_failed_admission_can_be_undone() -> None:
    manager = make(num_blocks=4)
    owner = computed(manager, tokens(8))
    manager.free(owner)
    other = manager.new_request(tokens(8, 50))
    manager.allocate(other, 8)
    waiting = manager.new_request(tokens(16))
    assert manager.num_blocks_needed(waiting, 16) == 4 > manager.num_free_blocks
    manager.take_cached(waiting)
    assert manager.allocate(waiting, 16) is None
    manager.free(waiting)
    assert (manager.num_free_blocks, manager.find_longest_cache_hit(waiting)) == (2, 8)


# release and preemption


def test_a_preempted_request_resumes_on_its_own_blocks() -> None:
    manager = make()
    token_ids = tokens(10)
    blocks = computed(manager, token_ids)
    held = list(blocks.block_ids[0])
    token_ids.append(77)
    manager.free(blocks)
    assert (blocks.num_blocks, blocks.capacity, manager.num_free_blocks) == (0, 0, 16)
    assert manager.take_cached(blocks) == 8
    assert blocks.block_ids[0] == held[:2]
    manager.allocate(blocks, 12)
    token_ids.extend([78, 79])
    manager.commit(blocks, 12)
    assert hit(manager, [*tokens(10), 77, 78, 0]) == 12


def test_reclaimable_blocks_are_those_that_nobody_shares() -> None:
    manager = make()
    first = computed(manager, tokens(12))
    assert manager.num_reclaimable_blocks(first) == 3
    second = computed(manager, tokens(14))
    assert (manager.num_reclaimable_blocks(first), manager.num_reclaimable_blocks(second)) == (0, 1)
    manager.allocate(first, 16)
    assert manager.num_reclaimable_blocks(first) == 1
    manager.free(second)
    assert manager.num_reclaimable_blocks(first) == 4
    manager.free(first)
    assert manager.num_reclaimable_blocks(first) == 0


def test_freeing_twice_is_harmless() -> None:
    manager = make()
    blocks = computed(manager, tokens(12))
    manager.free(blocks)
    manager.free(blocks)
    assert manager.num_free_blocks == 16


# reset


def test_a_reset_forgets_everything_when_nothing_is_in_use() -> None:
    manager = make()
    manager.free(computed(manager, tokens(12)))
    assert manager.reset_prefix_cache() is True
    assert hit(manager, tokens(12)) == 0
    assert manager.num_free_blocks == 16


def test_a_request_that_waits_sees_a_reset() -> None:
    manager = make()
    manager.free(computed(manager, tokens(12)))
    waiting = manager.new_request(tokens(12))
    assert manager.find_longest_cache_hit(waiting) == 8
    manager.reset_prefix_cache()
    assert manager.find_longest_cache_hit(waiting) == 0


def test_what_rests_on_blocks_from_before_a_reset_is_never_hit() -> None:
    manager = make()
    token_ids = tokens(8)
    blocks = computed(manager, token_ids)
    assert manager.reset_prefix_cache() is False
    assert hit(manager, tokens(9)) == 0
    token_ids.extend(tokens(5, 8))
    manager.allocate(blocks, 13)
    manager.commit(blocks, 12)
    fresh = computed(manager, tokens(9))
    assert fresh.num_cached_tokens == 0
    assert hit(manager, tokens(13)) == 8


def test_a_request_fills_the_cache_again_when_it_starts_over_after_a_reset() -> None:
    manager = make()
    blocks = computed(manager, tokens(8))
    manager.reset_prefix_cache()
    manager.free(blocks)
    assert manager.take_cached(blocks) == 0
    manager.allocate(blocks, 8)
    manager.commit(blocks, 8)
    assert hit(manager, tokens(9)) == 8
