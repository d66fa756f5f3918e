"""What the layers of a step share: the batch as the ops read it, and how its work is divided."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof

from hotshoe.api import AttentionBatch, KVCacheSpec
from hotshoe_native.attention import (
    AttentionBatchArgs,
    AttentionPlanArgs,
    Memory,
    plan_bytes,
    scratch_bytes,
)
from hotshoe_native.ops import NativeLibrary

_SEGMENT_KEYS = 512  # as in attention.h
_MAX_PARTIALS = 16384  # more would take memory of no further use
_ITEMS_PER_THREAD = 4  # enough to even out what threads get


class Scratch:
    """Memory of calls, which run one after another and so can share it; it only grows."""

    def __init__(self) -> None:
        self._memory = Memory(0)

    def of(self, num_bytes: int) -> Memory:
        """At least so many bytes; what was handed out before stays alive with its users."""
        if self._memory.num_bytes < num_bytes:
            self._memory = Memory(num_bytes)
        return self._memory


class Division:
    """A step's work, divided for layers with one number of heads.

    Attributes:
        batch_address: of the batch, for the ops' arguments.
        max_partials: for the ops' arguments.
    """

    __slots__ = ("_batch", "_plan", "_scratch", "args", "batch_address", "max_partials")

    def __init__(
        self,
        batch: AttentionBatch,
        kv: KVCacheSpec,
        group_size: int,
        *,
        library: NativeLibrary,
        scratch: Scratch,
        num_threads: int,
    ) -> None:
        num_tokens = batch.slot_mapping.shape[0]
        max_segments = -(-batch.max_seq_len // _SEGMENT_KEYS)
        self.max_partials = 0
        if num_threads > 1 and max_segments > 1:
            self.max_partials = min(num_tokens * max_segments, _MAX_PARTIALS)
        # a tile has at least one token; its parts are as many as make up for it, and a merge
        max_items = 3 * num_tokens + 2 * _ITEMS_PER_THREAD * num_threads
        self._plan = Memory(plan_bytes(max_items))
        self._scratch = scratch.of(
            scratch_bytes(
                library,
                group_size=group_size,
                num_kv_heads=kv.num_kv_heads,
                head_dim=kv.head_dim,
                head_dim_v=kv.head_dim_v,
                kv_dtype=kv.dtype,
                max_partials=self.max_partials,
                num_threads=num_threads,
            )
        )
        self._batch = AttentionBatchArgs(
            query_start_loc=batch.query_start_loc.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            block_table=batch.block_table.data_ptr(),
            slot_mapping=batch.slot_mapping.data_ptr(),
            positions=batch.positions.data_ptr(),
            plan=self._plan.address,
            scratch=self._scratch.address,
            block_table_stride=batch.block_table.stride(0),
            num_reqs=batch.seq_lens.shape[0],
            num_tokens=num_tokens,
            block_size=batch.block_size,
        )
        self.batch_address = addressof(self._batch)
        self.args = AttentionPlanArgs(
            batch=self.batch_address,
            group_size=group_size,
            num_kv_heads=kv.num_kv_heads,
            window=kv.sliding_window or 0,
            max_items=max_items,
            max_partials=self.max_partials,
            items_per_thread=_ITEMS_PER_THREAD,
        )

    def resize(self, num_reqs: int, num_tokens: int) -> None:
        """Let the ops see so many requests and tokens of the batch."""
        self._batch.num_reqs, self._batch.num_tokens = num_reqs, num_tokens


class Step:
    """A step's batch for one cache group."""

    __slots__ = ("_batch", "_divide", "_divisions")

    def __init__(
        self, batch: AttentionBatch, divide: Callable[[AttentionBatch, int], Division]
    ) -> None:
        self._batch = batch
        self._divide = divide
        self._divisions: dict[int, Division] = {}

    def division(self, group_size: int) -> Division:
        """For layers with so many query heads per KV head; made when the first of them asks."""
        found = self._divisions.get(group_size)
        if found is None:
            found = self._divisions[group_size] = self._divide(self._batch, group_size)
        return found

    def resize(self, num_reqs: int, num_tokens: int) -> None:
        """Let all layers see so many requests and tokens of the batch."""
        for division in self._divisions.values():
            division.resize(num_reqs, num_tokens)
