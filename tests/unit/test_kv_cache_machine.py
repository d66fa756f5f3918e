"""Any sequence of moves on a KVCacheManager, against a model that keeps the pages' content.

The model writes into every slot what a real engine would: a value that depends on the whole context
of the position. A hit is right if the slots it supplies hold exactly what the request would have
computed itself.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hotshoe.api import EvictionPolicy
from hotshoe.errors import KVCacheError
from hotshoe.kv_cache import KVCacheManager, RequestBlocks
from hotshoe_kv_eviction.lru import LRU

GARBAGE = ("rejected draft",)


class RandomEviction(EvictionPolicy):
    """What a third party might write: any free block, whatever it holds."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._free: set[int] = set()

    def add(self, block_id: int, is_cached: bool) -> None:
        self._free.add(block_id)

    def remove(self, block_id: int) -> None:
        self._free.remove(block_id)

    def pop(self) -> int:
        block_id = self._rng.choice(sorted(self._free))
        self._free.remove(block_id)
        return block_id


class Breakable(EvictionPolicy):
    """A policy that answers ``pop`` with ``fault`` once one is set and ``countdown`` has passed."""

    def __init__(self, inner: EvictionPolicy) -> None:
        self.inner = inner
        self.fault: object = None
        self.countdown = 0

    def add(self, block_id: int, is_cached: bool) -> None:
        self.inner.add(block_id, is_cached)

    def remove(self, block_id: int) -> None:
        self.inner.remove(block_id)

    def pop(self) -> int:
        if self.fault is not None:
            self.countdown -= 1
            if self.countdown < 0:
                if self.fault == "raise":
                    raise LookupError("a bug in the policy")
                return self.fault  # type: ignore[return-value]  # that is the fault
        return self.inner.pop()


@dataclass(eq=False)
class Request:
    """The model of one request."""

    token_ids: list[int]
    salt: str | None
    adapter: str | None
    use_prefix_cache: bool
    blocks: RequestBlocks
    num_computed: int = 0
    is_running: bool = False
    started_at_reset: int = 0


token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=14)
picks = st.integers(0, 2**16)


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.integers(1, 4),
        num_groups=st.integers(1, 2),
        reads_next_token=st.booleans(),
        enable_prefix_caching=st.sampled_from((True, True, True, False)),
        seed=st.none() | st.integers(0, 3),
        prompts=st.lists(token_lists, min_size=1, max_size=4),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        num_groups: int,
        reads_next_token: bool,
        enable_prefix_caching: bool,
        seed: int | None,
        prompts: list[list[int]],
    ) -> None:
        self.policy = Breakable(LRU() if seed is None else RandomEviction(seed))
        self.reads_next_token = reads_next_token
        self.manager = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            num_groups=num_groups,
            eviction=self.policy,
            enable_prefix_caching=enable_prefix_caching,
            reads_next_token=reads_next_token,
        )
        self.pages: list[list[object]] = [[None] * block_size for _ in range(num_blocks)]
        self.requests: list[Request] = []
        self.num_resets = 0
        self.known: list[tuple[list[int], str | None, str | None]] = []
        for token_ids in prompts:
            self.arrive(token_ids, None, None, True)

    # the model

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if request.is_running]

    @property
    def waiting(self) -> list[Request]:
        return [request for request in self.requests if not request.is_running]

    def owners(self) -> Counter[int]:
        return Counter(
            block_id
            for request in self.requests
            for table in request.blocks.block_ids
            for block_id in table
        )

    def expected(self, request: Request, group: int, position: int) -> object:
        """What the KV of a position depends on; weights changed at every reset."""
        context = request.token_ids[: position + 1 + self.reads_next_token]
        return (
            request.started_at_reset,
            group,
            request.salt,
            request.adapter,
            tuple(context),
            position,
        )

    def slots(self, request: Request, start: int, end: int) -> list[tuple[int, int, int, int]]:
        """(group, position, block, offset) of the positions from ``start`` to ``end``."""
        size = self.manager.block_size
        return [
            (group, position, table[position // size], position % size)
            for group, table in enumerate(request.blocks.block_ids)
            for position in range(start, end)
        ]

    def write(self, request: Request, start: int, end: int, *, is_garbage: bool = False) -> None:
        owners = self.owners()
        for group, position, block_id, offset in self.slots(request, start, end):
            assert owners[block_id] == 1, f"wrote into block {block_id}, which is shared"
            value = GARBAGE if is_garbage else self.expected(request, group, position)
            self.pages[block_id][offset] = value

    def snapshot(self) -> object:
        tables = [[list(ids) for ids in one.blocks.block_ids] for one in self.requests]
        capacities = [one.blocks.capacity for one in self.requests]
        return tables, capacities, self.manager.num_free_blocks, self.manager.usage

    # the moves

    @precondition(lambda self: len(self.requests) < 8)
    @rule(
        token_ids=token_lists,
        salt=st.sampled_from((None, None, "", "a")),
        adapter=st.sampled_from((None, None, "a")),
        use_prefix_cache=st.sampled_from((True, True, True, False)),
    )
    def arrive(
        self, token_ids: list[int], salt: str | None, adapter: str | None, use_prefix_cache: bool
    ) -> None:
        blocks = self.manager.new_request(
            token_ids, salt=salt, adapter=adapter, use_prefix_cache=use_prefix_cache
        )
        self.requests.append(Request(token_ids, salt, adapter, use_prefix_cache, blocks))
        self.known.append((token_ids, salt, adapter))

    @precondition(lambda self: len(self.requests) < 8)
    @rule(
        pick=picks,
        use_prefix_cache=st.booleans(),
        cut=st.integers(1, 20),
        tail=st.lists(st.integers(0, 1), max_size=3),
        num_chunk_tokens=st.integers(0, 20),
    )
    def arrive_with_a_known_prefix(
        self,
        pick: int,
        use_prefix_cache: bool,
        cut: int,
        tail: list[int],
        num_chunk_tokens: int,
    ) -> None:
        token_ids, salt, adapter = self.known[pick % len(self.known)]
        self.arrive(token_ids[:cut] + tail, salt, adapter, use_prefix_cache)
        if num_chunk_tokens:
            self.admit_request(self.requests[-1], num_chunk_tokens)

    @precondition(lambda self: self.waiting)
    @rule(pick=picks, num_chunk_tokens=st.integers(1, 20))
    def admit(self, pick: int, num_chunk_tokens: int) -> None:
        waiting = self.waiting
        self.admit_request(waiting[pick % len(waiting)], num_chunk_tokens)

    def admit_request(self, request: Request, num_chunk_tokens: int) -> None:
        manager, blocks = self.manager, request.blocks
        before = self.snapshot()
        num_hit = manager.find_longest_cache_hit(blocks)
        assert num_hit % manager.block_size == 0
        assert num_hit < len(request.token_ids)
        assert num_hit == 0 or (request.use_prefix_cache and manager.enable_prefix_caching)
        num_tokens = min(len(request.token_ids), num_hit + num_chunk_tokens)
        num_needed = manager.num_blocks_needed(blocks, num_tokens)
        num_free = manager.num_free_blocks
        assert manager.take_cached(blocks) == num_hit == blocks.num_cached_tokens
        appended = manager.allocate(blocks, num_tokens)
        assert (appended is not None) == (num_needed <= num_free)
        if appended is None:
            manager.free(blocks)
            assert self.snapshot() == before
            assert manager.find_longest_cache_hit(blocks) == num_hit
            return
        assert num_free - manager.num_free_blocks == num_needed
        request.is_running = True
        request.started_at_reset = self.num_resets
        request.num_computed = num_hit
        self.compute(request, num_tokens)

    @precondition(lambda self: self.running)
    @rule(pick=picks, num_chunk_tokens=st.integers(1, 8), num_lookahead_slots=st.integers(0, 4))
    def step(self, pick: int, num_chunk_tokens: int, num_lookahead_slots: int) -> None:
        running = self.running
        request = running[pick % len(running)]
        manager, blocks = self.manager, request.blocks
        num_tokens = min(len(request.token_ids), request.num_computed + num_chunk_tokens)
        num_slots = num_tokens + num_lookahead_slots
        before = self.snapshot()
        tables = [list(table) for table in blocks.block_ids]
        num_needed = manager.num_blocks_needed(blocks, num_slots)
        num_free = manager.num_free_blocks
        appended = manager.allocate(blocks, num_slots)
        if appended is None:
            assert num_needed > num_free
            assert self.snapshot() == before
            return
        assert num_free - manager.num_free_blocks == num_needed == sum(map(len, appended))
        assert [old + list(new) for old, new in zip(tables, appended, strict=True)] == list(
            blocks.block_ids
        )
        self.write(request, num_tokens, num_slots, is_garbage=True)
        self.compute(request, num_tokens)

    def compute(self, request: Request, num_tokens: int) -> None:
        """Write the KV of the next tokens; the last one known draws a successor."""
        if num_tokens == len(request.token_ids):
            request.token_ids.append(len(request.token_ids) % 2)
        self.write(request, request.num_computed, num_tokens)
        request.num_computed = num_tokens
        self.manager.commit(request.blocks, num_tokens)

    @precondition(lambda self: self.running)
    @rule(pick=picks, is_finished=st.booleans())
    def leave(self, pick: int, is_finished: bool) -> None:
        running = self.running
        self.release(running[pick % len(running)])
        if is_finished:
            self.requests.remove(running[pick % len(running)])

    def release(self, request: Request) -> None:
        num_reclaimable = self.manager.num_reclaimable_blocks(request.blocks)
        num_free = self.manager.num_free_blocks
        self.manager.free(request.blocks)
        assert self.manager.num_free_blocks - num_free == num_reclaimable
        assert (request.blocks.num_blocks, request.blocks.capacity) == (0, 0)
        request.is_running = False
        request.num_computed = 0

    @rule(num_blocks=st.integers(1, 8))
    def churn(self, num_blocks: int) -> None:
        """A request that is aborted before its first commit overwrites what it was given."""
        manager = self.manager
        num_tokens = num_blocks * manager.block_size
        passing = Request([0] * num_tokens, None, None, True, manager.new_request([0] * num_tokens))
        if manager.allocate(passing.blocks, num_tokens) is None:
            assert num_blocks * manager.num_groups > manager.num_free_blocks
            return
        self.requests.append(passing)
        self.write(passing, 0, num_tokens, is_garbage=True)
        self.requests.remove(passing)
        manager.free(passing.blocks)

    @rule(kind=st.sampled_from(("reset", "raise", "beyond", "negative", "owned")), pick=picks)
    def disturb(self, kind: str, pick: int) -> None:
        if kind == "reset":
            self.reset()
        elif self.manager.num_free_blocks >= self.manager.num_groups:
            self.break_policy(kind, pick)

    def reset(self) -> None:
        before = self.snapshot()
        assert self.manager.reset_prefix_cache() == (not self.running)
        assert self.snapshot() == before
        self.num_resets += 1
        assert all(
            self.manager.find_longest_cache_hit(request.blocks) == 0 for request in self.requests
        )

    def break_policy(self, kind: str, pick: int) -> None:
        owned = sorted(self.owners())
        faults: dict[str, object] = {
            "raise": "raise",
            "beyond": self.manager.num_blocks,
            "negative": -1,
            "owned": owned[pick % len(owned)] if owned else "raise",
        }
        num_blocks = self.manager.num_free_blocks // self.manager.num_groups
        num_tokens = num_blocks * self.manager.block_size
        blocks = self.manager.new_request([0] * num_tokens)
        self.policy.fault = faults[kind]
        self.policy.countdown = pick % (num_blocks * self.manager.num_groups)
        before = self.snapshot()
        with pytest.raises(KVCacheError, match="Breakable failed in pop"):
            self.manager.allocate(blocks, num_tokens)
        self.policy.fault = None
        assert (blocks.num_blocks, blocks.capacity) == (0, 0)
        assert self.snapshot() == before

    # what always holds

    @invariant()
    def free_and_owned_make_the_whole_pool(self) -> None:
        owners = self.owners()
        manager = self.manager
        assert manager.num_free_blocks == manager.num_blocks - len(owners)
        assert manager.usage == pytest.approx(len(owners) / manager.num_blocks)
        assert set(owners) <= set(range(manager.num_blocks))

    @invariant()
    def tables_hold_a_block_once_and_share_as_their_counts_say(self) -> None:
        owners = self.owners()
        for request in self.requests:
            blocks = request.blocks
            held = [block_id for table in blocks.block_ids for block_id in table]
            assert len(held) == len(set(held)) == blocks.num_blocks
            assert {len(table) * self.manager.block_size for table in blocks.block_ids} == {
                blocks.capacity
            }
            num_own = sum(owners[block_id] == 1 for block_id in held)
            assert self.manager.num_reclaimable_blocks(blocks) == num_own

    @invariant()
    def every_computed_position_holds_what_the_request_would_have_computed(self) -> None:
        for request in self.running:
            for group, position, block_id, offset in self.slots(request, 0, request.num_computed):
                assert self.pages[block_id][offset] == self.expected(request, group, position)

    @invariant()
    def what_a_running_request_has_computed_can_be_hit(self) -> None:
        if not self.manager.enable_prefix_caching:
            return
        for request in self.running:
            if request.started_at_reset == self.num_resets:
                same = self.manager.new_request(
                    [*request.token_ids[: request.num_computed], request.token_ids[-1]]
                    if not self.reads_next_token
                    else request.token_ids,
                    salt=request.salt,
                    adapter=request.adapter,
                )
                num_full = request.num_computed // self.manager.block_size
                assert self.manager.find_longest_cache_hit(same) >= (
                    num_full * self.manager.block_size
                )

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request in self.running:
            self.release(request)
        manager = self.manager
        assert manager.num_free_blocks == manager.num_blocks
        num_tokens = manager.num_blocks // manager.num_groups * manager.block_size
        blocks = manager.new_request([0] * num_tokens)
        assert manager.can_ever_fit(num_tokens)
        assert manager.allocate(blocks, num_tokens) is not None
        held = [block_id for table in blocks.block_ids for block_id in table]
        assert len(set(held)) == manager.num_blocks // manager.num_groups * manager.num_groups


def test_no_sequence_of_moves_breaks_the_kv_cache() -> None:
    run_state_machine_as_test(
        KVCacheMachine,
        settings=settings(
            max_examples=200, stateful_step_count=30, deadline=None, derandomize=True
        ),
    )


@pytest.mark.full
def test_no_long_sequence_of_moves_breaks_the_kv_cache() -> None:
    run_state_machine_as_test(
        KVCacheMachine,
        settings=settings(max_examples=2000, stateful_step_count=50, deadline=None),
    )
