"""An eviction policy may be wrong; the pool's accounting may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hotshoe.api import EvictionPolicy
from hotshoe.errors import KVCacheError
from hotshoe.kv_cache import KVCacheManager, RequestBlocks
from hotshoe_kv_eviction.lru import LRU


class FaultyPolicy(EvictionPolicy):
    """LRU, except where a test plants a fault."""

    def __init__(self) -> None:
        self.inner = LRU()
        self.faults: dict[str, Callable[[], object]] = {}
        self.num_good_calls = 0

    def plant(self, method: str, fault: Callable[[], object], *, after: int = 0) -> None:
        """From the call after the next ``after`` on, the method's answer is that of ``fault``."""
        self.faults[method] = fault
        self.num_good_calls = after

    def _fault(self, method: str) -> Callable[[], object] | None:
        if method not in self.faults:
            return None
        self.num_good_calls -= 1
        return self.faults[method] if self.num_good_calls < 0 else None

    def add(self, block_id: int, is_cached: bool) -> None:
        if fault := self._fault("add"):
            fault()
        self.inner.add(block_id, is_cached)

    def remove(self, block_id: int) -> None:
        if fault := self._fault("remove"):
            fault()
        self.inner.remove(block_id)

    def pop(self) -> int:
        if fault := self._fault("pop"):
            return fault()  # type: ignore[return-value]  # that is the fault
        return self.inner.pop()


def crash() -> object:
    raise ZeroDivisionError("a bug in the policy")


@pytest.fixture
def policy() -> FaultyPolicy:
    return FaultyPolicy()


@pytest.fixture
def manager(policy: FaultyPolicy) -> KVCacheManager:
    return KVCacheManager(num_blocks=8, block_size=2, eviction=policy)


def computed(manager: KVCacheManager, token_ids: list[int]) -> RequestBlocks:
    blocks = manager.new_request(token_ids)
    manager.take_cached(blocks)
    assert manager.allocate(blocks, len(token_ids)) is not None
    manager.commit(blocks, len(token_ids))
    return blocks


def assert_whole_pool_can_be_used(manager: KVCacheManager) -> None:
    assert manager.num_free_blocks == manager.num_blocks
    blocks = manager.new_request([0] * 16)
    assert manager.allocate(blocks, 16) is not None
    assert sorted(blocks.block_ids[0]) == list(range(8))


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (8, "it returned 8, which is no block id; allowed: an int from 0 to 7"),
        (-1, "it returned -1, which is no block id"),
        (None, "it returned None, which is no block id"),
        (True, "it returned True, which is no block id"),
        (1.0, r"it returned 1\.0, which is no block id"),
    ],
)
def test_an_answer_that_is_no_block_is_refused(
    manager: KVCacheManager, policy: FaultyPolicy, answer: object, complaint: str
) -> None:
    policy.plant("pop", lambda: answer, after=2)
    blocks = manager.new_request([0] * 8)
    with pytest.raises(KVCacheError, match=complaint):
        manager.allocate(blocks, 8)
    assert (blocks.num_blocks, blocks.capacity) == (0, 0)
    policy.faults.clear()
    assert_whole_pool_can_be_used(manager)


def test_a_block_that_has_an_owner_is_refused_and_the_policy_named(
    manager: KVCacheManager, policy: FaultyPolicy
) -> None:
    owner = computed(manager, [1, 2])
    owned = owner.block_ids[0][0]
    policy.plant("pop", lambda: owned)
    with pytest.raises(KVCacheError, match=f"returned block {owned}, which is not free") as caught:
        manager.allocate(manager.new_request([0] * 8), 8)
    assert "FaultyPolicy failed in pop" in str(caught.value)
    assert "cache.eviction.name" in str(caught.value)
    policy.faults.clear()
    assert (owner.block_ids, manager.num_free_blocks) == (([owned],), 7)
    manager.free(owner)
    assert_whole_pool_can_be_used(manager)


def test_the_same_block_twice_is_refused(manager: KVCacheManager, policy: FaultyPolicy) -> None:
    policy.plant("pop", lambda: 0, after=1)
    with pytest.raises(KVCacheError, match="returned block 0, which is not free"):
        manager.allocate(manager.new_request([0] * 8), 8)
    policy.faults.clear()
    assert_whole_pool_can_be_used(manager)


def test_blocks_popped_before_a_crash_keep_their_content(
    manager: KVCacheManager, policy: FaultyPolicy
) -> None:
    token_ids = list(range(16))
    manager.free(computed(manager, token_ids))
    policy.plant("pop", crash, after=3)
    with pytest.raises(KVCacheError, match="it raised ZeroDivisionError") as caught:
        manager.allocate(manager.new_request([99] * 16), 16)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    policy.faults.clear()
    reader = manager.new_request([*token_ids, 0])
    assert manager.find_longest_cache_hit(reader) == 16
    assert manager.stats.num_evicted_blocks == 0
    assert_whole_pool_can_be_used(manager)


def test_a_policy_that_takes_nothing_back_either_is_still_named_for_its_first_fault(
    manager: KVCacheManager, policy: FaultyPolicy
) -> None:
    policy.plant("pop", crash, after=3)
    policy.faults["add"] = crash
    with pytest.raises(KVCacheError, match="failed in pop"):
        manager.allocate(manager.new_request([99] * 16), 16)
    assert manager.num_free_blocks == 8


def test_a_policy_that_refuses_the_pool_stops_the_start() -> None:
    policy = FaultyPolicy()
    policy.plant("add", crash)
    with pytest.raises(KVCacheError, match="failed in add: it raised ZeroDivisionError"):
        KVCacheManager(num_blocks=8, block_size=2, eviction=policy)


def test_a_crash_while_a_hit_is_taken_takes_nothing(
    manager: KVCacheManager, policy: FaultyPolicy
) -> None:
    manager.free(computed(manager, [1, 2, 3, 4, 5, 6]))
    waiting = manager.new_request([1, 2, 3, 4, 5, 6, 7])
    policy.plant("remove", crash, after=2)
    with pytest.raises(KVCacheError, match="failed in remove"):
        manager.take_cached(waiting)
    assert (waiting.num_blocks, manager.num_free_blocks) == (0, 8)
    policy.faults.clear()
    assert manager.take_cached(waiting) == 6
    manager.free(waiting)
    assert_whole_pool_can_be_used(manager)


def test_a_crash_while_blocks_are_released_releases_them_all(
    manager: KVCacheManager, policy: FaultyPolicy
) -> None:
    blocks = computed(manager, [1, 2, 3, 4, 5, 6])

    def crash_once() -> object:
        policy.faults.clear()
        return crash()

    policy.plant("add", crash_once, after=1)
    with pytest.raises(KVCacheError, match="failed in add"):
        manager.free(blocks)
    assert (blocks.num_blocks, manager.num_free_blocks) == (0, 8)
    # the policy never heard of one block, so the pool can't be used up, and says so
    with pytest.raises(KVCacheError, match="failed in pop"):
        manager.allocate(manager.new_request([0] * 16), 16)
    assert manager.allocate(manager.new_request([0] * 14), 14) is not None
    assert manager.num_free_blocks == 1


def test_a_crash_during_a_reset_still_forgets_everything(
    manager: KVCacheManager, policy: FaultyPolicy
) -> None:
    manager.free(computed(manager, [1, 2, 3, 4, 5, 6]))
    policy.plant("remove", crash)
    with pytest.raises(KVCacheError, match="failed in remove"):
        manager.reset_prefix_cache()
    policy.faults.clear()
    assert manager.find_longest_cache_hit(manager.new_request([1, 2, 3, 4, 5, 6, 7])) == 0
    assert_whole_pool_can_be_used(manager)
