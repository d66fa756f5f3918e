"""The pool of KV blocks: reference counts, and which block holds which content.

A block is owned while its reference count is above 0, otherwise free. Free blocks are in the hands
of the eviction policy, which picks the next one to overwrite; a free block keeps its content, and
can be hit, until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hotshoe.api.kv_eviction import EvictionPolicy
from hotshoe.errors import KVCacheError


class BlockPool:
    """Blocks ``0 <= id < num_blocks``, all free at first. Every operation is O(1) per block.

    The pool's own counts decide what is free; the policy only orders. Whatever the policy raises or
    answers, these counts stay right, and the caller gets a ``KVCacheError`` that names it.

    Attributes:
        num_free: blocks without an owner.
        generation: changes whenever a look-up in ``block_of`` may answer differently.
        sharing_generation: changes whenever a block starts or ends being shared.
        num_evictions: contents lost so far because their block was needed.
    """

    def __init__(self, num_blocks: int, eviction: EvictionPolicy) -> None:
        if num_blocks < 1:
            raise KVCacheError(f"a KV cache needs at least 1 block, got {num_blocks!r}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.generation = 0
        self.sharing_generation = 0
        self.num_evictions = 0
        self._eviction = eviction
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # further owned blocks with the content of a block in _block_of, in order of registration
        self._duplicates: dict[bytes, dict[int, None]] = {}
        # a policy that reuses the latest block then starts with block 0
        self._tell_free(reversed(range(num_blocks)))

    @property
    def ref_counts(self) -> Sequence[int]:
        """Owners by block id. Read-only."""
        return self._ref_counts

    @property
    def block_of(self) -> Mapping[bytes, int]:
        """The block that holds a content, owned or free. Read-only."""
        return self._block_of

    def take(self, count: int) -> list[int] | None:
        """Own ``count`` blocks, whose content is lost; None if fewer are free, which changes
        nothing.

        Raises:
            KVCacheError: if the policy breaks its contract; then nothing was taken.
        """
        if count > self.num_free:
            return None
        taken: list[int] = []
        try:
            for _ in range(count):
                block_id = self._eviction.pop()
                self._check_is_free(block_id)
                self._ref_counts[block_id] = 1
                taken.append(block_id)
        except Exception as error:
            self._untake(taken)
            raise self._broken("pop", error) from error
        for block_id in taken:
            if self._keys[block_id] is not None:
                self._evict(block_id)
        self.num_free -= count
        return taken

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add an owner to blocks found in ``block_of``.

        Raises:
            KVCacheError: if the policy breaks its contract; then no owner was added.
        """
        ref_counts = self._ref_counts
        for index, block_id in enumerate(block_ids):
            count = ref_counts[block_id]
            if count == 0:
                try:
                    self._eviction.remove(block_id)
                except Exception as error:
                    self._release(reversed(block_ids[:index]))
                    raise self._broken("remove", error) from error
                self.num_free -= 1
            elif count == 1:
                self.sharing_generation += 1
            ref_counts[block_id] = count + 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one owner off each block; those without one become free, in the given order.

        Raises:
            KVCacheError: if the policy breaks its contract; all blocks were released all the same.
        """
        failure = self._release(block_ids)
        if failure is not None:
            raise self._broken("add", failure) from failure

    def register(self, block_id: int, key: bytes) -> None:
        """Say what an owned block holds, so that it can be hit.

        The first block registered with a content answers for it. A second one steps in if that is
        evicted while the second is still owned.
        """
        assert self._ref_counts[block_id] > 0, "registered a block without an owner"
        assert self._keys[block_id] is None, "registered a block twice"
        self._keys[block_id] = key
        if self._block_of.setdefault(key, block_id) == block_id:
            self.generation += 1
        else:
            self._duplicates.setdefault(key, {})[block_id] = None

    def forget_all(self) -> None:
        """Drop every content: nothing registered so far is ever hit again. Owners keep their
        blocks.

        Raises:
            KVCacheError: if the policy breaks its contract; every content was dropped all the same.
        """
        free = [block_id for block_id in self._block_of.values() if not self._ref_counts[block_id]]
        self._keys = [None] * self.num_blocks
        self._block_of.clear()
        self._duplicates.clear()
        self.generation += 1
        try:
            for block_id in free:
                self._eviction.remove(block_id)
        except Exception as error:
            raise self._broken("remove", error) from error
        self._tell_free(free)

    def _check_is_free(self, block_id: int) -> None:
        if type(block_id) is not int or not 0 <= block_id < self.num_blocks:
            raise KVCacheError(
                f"it returned {block_id!r}, which is no block id; "
                f"allowed: an int from 0 to {self.num_blocks - 1}"
            )
        if self._ref_counts[block_id]:
            raise KVCacheError(f"it returned block {block_id!r}, which is not free")

    def _untake(self, taken: Sequence[int]) -> None:
        for block_id in taken:
            self._ref_counts[block_id] = 0
        for block_id in reversed(taken):
            try:
                self._eviction.add(block_id, self._keys[block_id] is not None)
            except Exception:  # the failure that led here is reported, and names the policy
                continue

    def _evict(self, block_id: int) -> None:
        key = self._keys[block_id]
        assert key is not None
        self._keys[block_id] = None
        duplicates = self._duplicates.get(key)
        if duplicates is None:
            del self._block_of[key]
            self.generation += 1
            self.num_evictions += 1
            return
        heir = next(iter(duplicates))
        self._block_of[key] = heir
        self._discard_duplicate(key, heir)

    def _discard_duplicate(self, key: bytes, block_id: int) -> None:
        duplicates = self._duplicates[key]
        del duplicates[block_id]
        if not duplicates:
            del self._duplicates[key]

    def _release(self, block_ids: Iterable[int]) -> Exception | None:
        failure: Exception | None = None
        for block_id in block_ids:
            count = self._ref_counts[block_id] - 1
            assert count >= 0, "released a block without an owner"
            self._ref_counts[block_id] = count
            if count == 1:
                self.sharing_generation += 1
            if count:
                continue
            self.num_free += 1
            try:
                self._eviction.add(block_id, self._is_worth_keeping(block_id))
            except Exception as error:
                failure = failure or error
        return failure

    def _is_worth_keeping(self, block_id: int) -> bool:
        key = self._keys[block_id]
        if key is None:
            return False
        if self._block_of[key] == block_id:
            return True
        # another block answers for this content, so nothing is lost with the copy
        self._keys[block_id] = None
        self._discard_duplicate(key, block_id)
        return False

    def _tell_free(self, block_ids: Iterable[int]) -> None:
        try:
            for block_id in block_ids:
                self._eviction.add(block_id, False)
        except Exception as error:
            raise self._broken("add", error) from error

    def _broken(self, method: str, error: Exception) -> KVCacheError:
        policy = f"{type(self._eviction).__module__}.{type(self._eviction).__qualname__}"
        detail = str(error) if isinstance(error, KVCacheError) else f"it raised {error!r}"
        return KVCacheError(
            f"the KV eviction policy {policy} failed in {method}: {detail}; "
            "fix the plugin or set cache.eviction.name to another one"
        )
