"""KV blocks of requests: prefix hits, allocation, release. Block ids only; the pages themselves
belong to the attention plugin.

Life of a handle: ``new_request`` → ``take_cached`` → ``allocate`` and ``commit`` step by step →
``free``, after which it may start over (preemption).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hotshoe.api.kv_eviction import EvictionPolicy
from hotshoe.api.types import BlockIds
from hotshoe.errors import KVCacheError
from hotshoe.kv_cache.block_pool import BlockPool
from hotshoe.kv_cache.prefix import PrefixHasher, root_hash

_NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Counts since the manager was built, in tokens and blocks; resumed requests count again."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_blocks: int = 0


class RequestBlocks:
    """What one request holds. Read by everybody, changed by ``KVCacheManager`` alone.

    Attributes:
        token_ids: prompt and output; only ever grows.
        block_ids: block table per cache group, all of the same length.
        capacity: tokens that fit into the blocks held.
        num_cached_tokens: tokens that the prefix cache supplied when blocks were last taken.
    """

    __slots__ = (
        "_commit_at",
        "_epoch",
        "_has_started",
        "_hasher",
        "_hit",
        "_hit_key",
        "_num_registered",
        "_reclaimable",
        "_reclaimable_key",
        "adapter",
        "block_ids",
        "capacity",
        "num_cached_tokens",
        "salt",
        "token_ids",
        "use_prefix_cache",
    )

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        num_groups: int,
        salt: str | None,
        adapter: str | None,
        use_prefix_cache: bool,
    ) -> None:
        self.token_ids = token_ids
        self.salt = salt
        self.adapter = adapter
        self.use_prefix_cache = use_prefix_cache
        self.block_ids: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.capacity = 0
        self.num_cached_tokens = 0
        self._hasher: PrefixHasher | None = None
        self._has_started = False
        self._num_registered = 0
        self._commit_at = _NEVER
        self._epoch = 0
        # blocks hit, and the state of the pool and the request for which that is true
        self._hit = 0
        self._hit_key = (-1, 0)
        # unshared blocks among the first n, as (sharing_generation, n)
        self._reclaimable = 0
        self._reclaimable_key = (-1, 0)

    @property
    def num_blocks(self) -> int:
        """Blocks held, over all cache groups."""
        return len(self.block_ids) * len(self.block_ids[0])


class KVCacheManager:
    """Hands out the blocks of one pool, and finds what of a request is computed already.

    A shared block is never written: hits are whole blocks, and at most so many that the last token
    is left to compute, since its logits are needed.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        num_groups: cache groups; each request holds as many blocks in every group.
        eviction: orders the blocks that nobody owns.
        enable_prefix_caching: False = nothing is hashed, registered or hit.
        reads_next_token: the KV of a drafter depends on the following token
            (``Requirements.reads_next_token``). That token then joins the hash of the block before
            it: dropping the last block of a hit would not do, because a middle block can have been
            computed by a request that went on differently.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_groups: int = 1,
        eviction: EvictionPolicy,
        enable_prefix_caching: bool = True,
        reads_next_token: bool = False,
    ) -> None:
        if block_size < 1 or num_groups < 1:
            raise KVCacheError(
                f"block_size and num_groups must be at least 1, got {block_size!r}, {num_groups!r}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_groups = num_groups
        self.enable_prefix_caching = enable_prefix_caching
        self._num_next_tokens = int(reads_next_token)
        self._pool = BlockPool(num_blocks, eviction)
        self._nothing: BlockIds = ((),) * num_groups
        # hashes have a fixed length, so a suffix keeps the groups apart
        self._other_groups = tuple(index.to_bytes(2, "little") for index in range(1, num_groups))
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0
        self._epoch = 0
        # content hashes of blocks that steps in flight compute, with the number of those steps
        self._coming: Counter[bytes] = Counter()

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner, cached or not."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that have an owner, 0 to 1."""
        return 1 - self._pool.num_free / self.num_blocks

    @property
    def stats(self) -> PrefixCacheStats:
        """A snapshot of the cumulative counts."""
        return PrefixCacheStats(
            self._num_queried_tokens, self._num_hit_tokens, self._pool.num_evictions
        )

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens fits into the empty pool."""
        return self._blocks_for(num_tokens) * self.num_groups <= self.num_blocks

    def new_request(
        self,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        adapter: str | None = None,
        use_prefix_cache: bool = True,
    ) -> RequestBlocks:
        """A handle that holds nothing yet. Nothing is hashed before it is needed.

        Args:
            token_ids: prompt and output, kept by reference: the caller appends to it.
            salt: requests share blocks only with those of the same salt.
            adapter: likewise.
            use_prefix_cache: False = compute everything (prompt logprobs need every position).
                What it computes is registered for others all the same.
        """
        return RequestBlocks(
            token_ids,
            num_groups=self.num_groups,
            salt=salt,
            adapter=adapter,
            use_prefix_cache=use_prefix_cache,
        )

    def find_longest_cache_hit(self, blocks: RequestBlocks) -> int:
        """Tokens that a prefix hit would supply if the request took its blocks now.

        A multiple of ``block_size``, less than the number of its tokens. Looked up again only after
        some content came or went.
        """
        if not (self.enable_prefix_caching and blocks.use_prefix_cache):
            return 0
        key = (self._pool.generation, len(blocks.token_ids))
        if blocks._hit_key != key:
            blocks._hit = self._count_hit_blocks(blocks)
            blocks._hit_key = key
        return blocks._hit * self.block_size

    def take_cached(self, blocks: RequestBlocks) -> int:
        """Own the blocks of the longest hit, and return the tokens they supply.

        The first call in a life of the handle; ``allocate`` follows.
        """
        assert not blocks._has_started, "took cached blocks for a request that has started"
        num_tokens = self.find_longest_cache_hit(blocks)
        hit = self._hit_block_ids(blocks, num_tokens // self.block_size)
        self._pool.acquire([block_id for ids in hit for block_id in ids])
        for table, block_ids in zip(blocks.block_ids, hit, strict=True):
            table.extend(block_ids)
        blocks.capacity = blocks.num_cached_tokens = num_tokens
        blocks._num_registered = num_tokens // self.block_size
        self._start(blocks)
        if self.enable_prefix_caching and blocks.use_prefix_cache:
            self._num_queried_tokens += len(blocks.token_ids)
            self._num_hit_tokens += num_tokens
        return num_tokens

    def num_blocks_needed(self, blocks: RequestBlocks, num_tokens: int) -> int:
        """Free blocks that making room for ``num_tokens`` tokens in total would use up.

        For a request that holds nothing yet this includes the blocks of its hit that nobody owns:
        they need no computing, but they stop being free.
        """
        num_held = len(blocks.block_ids[0])
        if blocks._has_started:
            return max(0, self._blocks_for(num_tokens) - num_held) * self.num_groups
        num_hit = self.find_longest_cache_hit(blocks) // self.block_size
        hit = self._hit_block_ids(blocks, num_hit)
        ref_counts = self._pool.ref_counts
        num_free_hits = sum(not ref_counts[block_id] for ids in hit for block_id in ids)
        num_fresh = max(0, self._blocks_for(num_tokens) - num_hit) * self.num_groups
        return num_fresh + num_free_hits

    def allocate(self, blocks: RequestBlocks, num_tokens: int) -> BlockIds | None:
        """Make room for ``num_tokens`` tokens in total, those held already included.

        Returns:
            The appended block ids per cache group; None if too few blocks are free, and then
            nothing changed.
        """
        if num_tokens <= blocks.capacity:
            return self._nothing
        num_new = self._blocks_for(num_tokens) - len(blocks.block_ids[0])
        taken = self._pool.take(num_new * self.num_groups)
        if taken is None:
            return None
        if not blocks._has_started:
            self._start(blocks)
        blocks.capacity += num_new * self.block_size
        if self.num_groups == 1:
            blocks.block_ids[0].extend(taken)
            return (tuple(taken),)
        new_block_ids = tuple(
            tuple(taken[group * num_new : (group + 1) * num_new])
            for group in range(self.num_groups)
        )
        for table, block_ids in zip(blocks.block_ids, new_block_ids, strict=True):
            table.extend(block_ids)
        return new_block_ids

    def commit(self, blocks: RequestBlocks, num_computed_tokens: int) -> None:
        """Let others hit the blocks that are now full.

        Call it when a step has committed: the KV of the first ``num_computed_tokens`` tokens is
        written, in every layer, before anything that is submitted from now on.
        """
        if num_computed_tokens >= blocks._commit_at:
            self._register_full_blocks(blocks, num_computed_tokens)

    def expect(self, blocks: RequestBlocks, start: int, end: int) -> Sequence[bytes]:
        """Announce the blocks that computing tokens ``start`` to ``end`` of a request will fill.

        Returns:
            What ``settle`` is to be called with when the step has committed, or is called off.
        """
        if not self.enable_prefix_caching or blocks._epoch != self._epoch:
            return ()
        num_full = min(end, len(blocks.token_ids) - self._num_next_tokens) // self.block_size
        contents = self._hasher_of(blocks).up_to(num_full)[start // self.block_size : num_full]
        self._coming.update(contents)
        return contents

    def settle(self, contents: Sequence[bytes]) -> None:
        """Take back what ``expect`` announced."""
        coming = self._coming
        for content in contents:
            coming[content] -= 1
            if not coming[content]:
                del coming[content]

    def is_coming(self, blocks: RequestBlocks) -> bool:
        """Whether a step in flight computes the block that a request, which holds nothing yet,
        would have to compute first: it had better wait for it.
        """
        if not self._coming or not (self.enable_prefix_caching and blocks.use_prefix_cache):
            return False
        hit = self.find_longest_cache_hit(blocks) // self.block_size
        if hit >= (len(blocks.token_ids) - 1) // self.block_size:
            return False
        return self._hasher_of(blocks).up_to(hit + 1)[hit] in self._coming

    def free(self, blocks: RequestBlocks) -> None:
        """Give up all blocks and reset the handle, which may then take blocks anew.

        What they hold can still be hit until it's overwritten, last blocks first.
        """
        released = [list(table) for table in blocks.block_ids]
        for table in blocks.block_ids:
            table.clear()
        blocks.capacity = 0
        blocks._num_registered = 0
        blocks._commit_at = _NEVER
        blocks._has_started = False
        blocks._reclaimable_key = (-1, 0)
        if self.num_groups == 1:
            self._pool.release(reversed(released[0]))
        else:
            by_position = zip(*map(reversed, released), strict=True)
            self._pool.release(block_id for ids in by_position for block_id in ids)

    def num_reclaimable_blocks(self, blocks: RequestBlocks) -> int:
        """Blocks that ``free`` would make free: those that no other request shares."""
        generation, num_counted = blocks._reclaimable_key
        num_held = len(blocks.block_ids[0])
        if generation != self._pool.sharing_generation:
            blocks._reclaimable = num_counted = 0
        if num_counted < num_held:
            ref_counts = self._pool.ref_counts
            for table in blocks.block_ids:
                counts = [ref_counts[block_id] for block_id in table[num_counted:]]
                blocks._reclaimable += counts.count(1)
        blocks._reclaimable_key = (self._pool.sharing_generation, num_held)
        return blocks._reclaimable

    def reset_prefix_cache(self) -> bool:
        """Make everything computed so far unreachable, as after a change of weights.

        Requests that hold blocks keep and use them, and nothing they compute is registered until
        they are freed and start over, because it rests on what they hold.

        Returns:
            Whether no request held blocks, so that nothing old is left in use.
        """
        self._epoch += 1
        self._pool.forget_all()
        return self._pool.num_free == self.num_blocks

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _start(self, blocks: RequestBlocks) -> None:
        blocks._has_started = True
        blocks._epoch = self._epoch
        if self.enable_prefix_caching:
            blocks._commit_at = (blocks._num_registered + 1) * self.block_size

    def _hasher_of(self, blocks: RequestBlocks) -> PrefixHasher:
        if blocks._hasher is None:
            blocks._hasher = PrefixHasher(
                blocks.token_ids,
                self.block_size,
                root=root_hash(salt=blocks.salt, adapter=blocks.adapter),
                reads_next_token=bool(self._num_next_tokens),
            )
        return blocks._hasher

    def _count_hit_blocks(self, blocks: RequestBlocks) -> int:
        # the last token is always recomputed: its logits are needed even on a full hit
        limit = (len(blocks.token_ids) - 1) // self.block_size
        if limit <= 0:
            return 0
        hasher = self._hasher_of(blocks)
        for index, content in enumerate(hasher.hashes):
            if index == limit or not self._is_cached(content):
                return index
        for index in range(len(hasher.hashes), limit):
            if not self._is_cached(hasher.append_next()):
                return index
        return limit

    def _is_cached(self, content: bytes) -> bool:
        block_of = self._pool.block_of
        if content not in block_of:
            return False
        return all(content + group in block_of for group in self._other_groups)

    def _hit_block_ids(self, blocks: RequestBlocks, num_blocks: int) -> list[list[int]]:
        if not num_blocks:
            return [[] for _ in range(self.num_groups)]
        block_of = self._pool.block_of
        hashes = self._hasher_of(blocks).hashes[:num_blocks]
        return [
            [block_of[content] for content in hashes],
            *([block_of[content + group] for content in hashes] for group in self._other_groups),
        ]

    def _register_full_blocks(self, blocks: RequestBlocks, num_computed_tokens: int) -> None:
        if blocks._epoch != self._epoch:
            blocks._commit_at = _NEVER
            return
        num_known = len(blocks.token_ids)
        assert num_computed_tokens <= min(num_known, blocks.capacity), "committed unknown tokens"
        num_full = min(num_computed_tokens, num_known - self._num_next_tokens) // self.block_size
        hashes = self._hasher_of(blocks).up_to(num_full)
        for index in range(blocks._num_registered, num_full):
            self._pool.register(blocks.block_ids[0][index], hashes[index])
            for group, suffix in enumerate(self._other_groups, start=1):
                self._pool.register(blocks.block_ids[group][index], hashes[index] + suffix)
        blocks._num_registered = max(blocks._num_registered, num_full)
        blocks._commit_at = (blocks._num_registered + 1) * self.block_size
