"""``StagedBatch``: the batch of a worker whose model runs on a device.

What the host knows of a step is copied to the device at once; what only the device knows is filled
in there: the newest token of a row, and its block table, which has a mirror that is kept up to date
by what changes.
"""

# T=num_tokens R=num_reqs S=requests that sample B=bucket G=cache groups

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotshoe.api import AttentionBatch, BlockIds
from hotshoe.worker.batch import InputBatch, Packed, StepInputs
from hotshoe.worker.staging import Piece, Staging
from hotshoe.worker.streams import Streams

PLACEHOLDER = -1
"""Stands in the host's arrays for a token that only the device knows."""

PADDING_SLOT = -1
"""Slot of a token that is no request's."""


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Where placeholders stand for the tokens of one step.

    Attributes:
        occupants: which request each row had, as ``StagedBatch`` counts them.
    """

    rows: np.ndarray
    positions: np.ndarray
    occupants: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketInputs:
    """What recorded steps of one size read, always in the same memory.

    A step of fewer requests is padded with tokens without a slot, of requests without a length.

    Attributes:
        token_ids: ``[B]`` int64, one of each request.
        rows: ``[B]`` int64.
        positions: ``[B]`` int64.
        slot_mappings: by cache group, ``[B]`` int64.
        seq_lens: ``[B]`` int32.
        query_start_loc: ``[B + 1]`` int32.
        logits_indices: ``[B]`` int64, all of them.
    """

    token_ids: Tensor
    rows: Tensor
    positions: Tensor
    slot_mappings: tuple[Tensor, ...]
    seq_lens: Tensor
    query_start_loc: Tensor
    logits_indices: Tensor


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the parts of attention batches were written."""

    rows: Piece
    positions: Piece
    query_start_loc: Piece
    seq_lens: Piece
    slots: list[Piece]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PaddedPlaces:
    """Where the parts of a padded step were written."""

    token_ids: Piece
    rows: Piece
    positions: Piece
    slots: list[Piece]
    seq_lens: Piece


class StagedBatch(InputBatch):
    """An ``InputBatch`` whose step inputs lie on a device.

    Args:
        device: where the model runs.
        streams: copy to it.
        sizes: arguments of ``InputBatch``.

    Attributes:
        last_token_ids: ``[max_num_seqs]`` int64 on the device, the newest token of each row that
            got one while the host went on.
        tables: by cache group, ``[max_num_seqs, max_blocks]`` int32 on the device.
        buckets: sizes of recorded steps, in ascending order; none = every step is run as it is.
    """

    def __init__(self, *, device: torch.device, streams: Streams, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._device = device
        self._max_model_len: int = sizes["max_model_len"]
        max_num_seqs, max_blocks = self.block_tables[0].shape
        shape = (len(self.block_tables), max_num_seqs, max_blocks)
        tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self.last_token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.tables = tuple(tables)
        self.buckets: Sequence[int] = ()
        self._table_entries = tables.view(-1)
        # by row: index of the first entry, and new entries from there on
        self._changes: dict[int, list[tuple[int, Sequence[int]]]] = {}
        self._occupants = np.zeros(max_num_seqs, np.int64)
        self._staging = Staging(streams, device)
        self._bucket_words = torch.zeros(0, dtype=torch.int64, device=device)
        self._bucket_inputs: dict[int, BucketInputs] = {}
        self._sampled_rows = self._bucket_words

    # -- deltas ---------------------------------------------------------------------------

    def place(
        self, row: int, request_id: str, num_computed_tokens: int, block_ids: BlockIds
    ) -> None:
        self._occupants[row] += 1
        self._changes.pop(row, None)
        super().place(row, request_id, num_computed_tokens, block_ids)

    def append_blocks(self, row: int, block_ids: BlockIds) -> None:
        start = int(self.num_blocks[row])
        super().append_blocks(row, block_ids)
        max_num_seqs, max_blocks = self.block_tables[0].shape
        changes = self._changes.setdefault(row, [])
        for group, ids in enumerate(block_ids):
            changes.append(((group * max_num_seqs + row) * max_blocks + start, ids))

    # -- tokens that the host learns later ------------------------------------------------------

    def expect(self, inputs: StepInputs, token_ids: Tensor | None) -> Placeholders:
        """Go on as if a step's tokens were known.

        Args:
            inputs: of the step that was prepared last; no request has drafts in it.
            token_ids: ``[S]`` int64 on the device, one for each request that samples; None if none
                does.
        """
        rows = inputs.rows[inputs.samples]
        if token_ids is not None:
            self.last_token_ids.index_copy_(0, self._sampled_rows, token_ids)
        positions = self.num_tokens[rows]
        self.num_computed_tokens[inputs.rows] += inputs.num_tokens
        self.token_ids[rows, positions] = PLACEHOLDER
        self.num_tokens[rows] += 1
        return Placeholders(rows, positions, self._occupants[rows])

    def settle(self, placeholders: Placeholders, token_ids: Sequence[Sequence[int]]) -> None:
        """Write the tokens of a step where their placeholders stand.

        Args:
            placeholders: of the step; those of requests that have left their row are gone.
            token_ids: of each request that sampled, one or none.
        """
        rows, positions = placeholders.rows, placeholders.positions
        known = np.array([ids[0] if ids else PLACEHOLDER for ids in token_ids], np.int32)
        is_same = self._occupants[rows] == placeholders.occupants
        self.token_ids[rows[is_same], positions[is_same]] = known[is_same]

    def filled(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """``[T]`` token ids with the newest token of a row for each placeholder."""
        newest = self.last_token_ids.index_select(0, rows)
        return torch.where(token_ids < 0, newest, token_ids)

    # -- a step -----------------------------------------------------------------------------

    def _inputs(
        self, packed: Packed, drafts: list[list[int]], samples: np.ndarray, indices: np.ndarray
    ) -> StepInputs:
        self._update_tables()
        bucket = self._bucket(packed, samples)
        if bucket is not None:
            return self._padded(bucket, packed, drafts, samples)
        staging = self._staging
        staging.begin(self._num_words(packed))
        token_ids = staging.put(self.token_ids[packed.token_rows, packed.positions])
        token_rows = staging.put(packed.token_rows)
        logits_indices = staging.put(indices)
        sampled_rows = staging.put(packed.rows[samples])
        places = self._put_attention(packed)
        words = staging.copy()
        self._sampled_rows = sampled_rows.of(words)
        attention = self._batches(packed, places, words)
        return StepInputs(
            packed=packed,
            drafts=drafts,
            samples=samples,
            token_ids=self.filled(token_ids.of(words), token_rows.of(words)),
            positions=attention[0].positions,
            logits_indices=logits_indices.of(words),
            make_attention=lambda: attention,
        )

    def _attention(self, packed: Packed) -> tuple[AttentionBatch, ...]:
        self._staging.begin(self._num_words(packed))
        places = self._put_attention(packed)
        return self._batches(packed, places, self._staging.copy())

    def _num_words(self, packed: Packed) -> int:
        """Enough for any step."""
        num_tokens, num_reqs = len(packed.positions), len(packed.rows)
        return num_tokens * (4 + len(self.block_tables)) + 4 * num_reqs + 4

    def _put_attention(self, packed: Packed) -> _Places:
        staging = self._staging
        return _Places(
            rows=staging.put(packed.rows),
            positions=staging.put(packed.positions),
            query_start_loc=staging.put_int32(packed.query_start_loc),
            seq_lens=staging.put_int32(packed.seq_lens),
            slots=[staging.put(slots) for slots in self.slots_of(packed)],
        )

    def _batches(
        self, packed: Packed, places: _Places, words: Tensor
    ) -> tuple[AttentionBatch, ...]:
        max_seq_len = int(packed.seq_lens.max(initial=0))
        max_blocks = -(-max_seq_len // self.block_size)
        rows, positions = places.rows.of(words), places.positions.of(words)
        query_start_loc, seq_lens = places.query_start_loc.of(words), places.seq_lens.of(words)
        return tuple(
            AttentionBatch(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=table[:, :max_blocks].index_select(0, rows),
                slot_mapping=slots.of(words),
                positions=positions,
                block_size=self.block_size,
                max_query_len=int(packed.num_tokens.max(initial=0)),
                max_seq_len=max_seq_len,
                query_lens_list=packed.num_tokens.tolist(),
                seq_lens_list=packed.seq_lens.tolist(),
            )
            for table, slots in zip(self.tables, places.slots, strict=True)
        )

    def _update_tables(self) -> None:
        """Let the mirror have the entries that are new."""
        if not self._changes:
            return
        pieces = [one for changes in self._changes.values() for one in changes]
        self._changes.clear()
        count = sum(len(ids) for _, ids in pieces)
        if not count:
            return
        self._staging.begin(2 * count)
        entries = [np.arange(start, start + len(ids)) for start, ids in pieces]
        index = self._staging.put(np.concatenate(entries))
        values = self._staging.put_int32(np.array([id for _, ids in pieces for id in ids]))
        words = self._staging.copy()
        self._table_entries.index_copy_(0, index.of(words), values.of(words))

    # -- recorded steps -------------------------------------------------------------------------

    def open_bucket(self, bucket: int) -> BucketInputs:
        """What recorded steps of a size read, now with nothing but padding in it; the largest size
        comes first.
        """
        num_words = bucket * (5 + len(self.block_tables))
        if len(self._bucket_words) < num_words:
            assert not self._bucket_inputs
            self._bucket_words = torch.zeros(num_words, dtype=torch.int64, device=self._device)
        nothing = np.zeros(0, np.int64)
        packed = Packed(nothing, nothing, nothing, nothing, nothing, nothing)
        places = self._put_padded(bucket, packed)
        words = self._bucket_words
        everyone = torch.arange(bucket + 1, device=self._device)
        self._bucket_inputs[bucket] = BucketInputs(
            token_ids=places.token_ids.of(words),
            rows=places.rows.of(words),
            positions=places.positions.of(words),
            slot_mappings=tuple(slots.of(words) for slots in places.slots),
            seq_lens=places.seq_lens.of(words),
            query_start_loc=everyone.to(torch.int32),
            logits_indices=everyone[:bucket],
        )
        return self._bucket_inputs[bucket]

    def bucket_batch(self, bucket: int, group: int) -> AttentionBatch:
        """A batch over what recorded steps read, its block table gathered by a recorded op."""
        inputs = self._bucket_inputs[bucket]
        max_blocks = -(-self._max_model_len // self.block_size)
        return AttentionBatch(
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_table=self.tables[group][:, :max_blocks].index_select(0, inputs.rows),
            slot_mapping=inputs.slot_mappings[group],
            positions=inputs.positions,
            block_size=self.block_size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
            query_lens_list=(),
            seq_lens_list=(),
        )

    def _bucket(self, packed: Packed, samples: np.ndarray) -> int | None:
        """Of a step in which each request has one token, and wants one."""
        num_reqs = len(packed.rows)
        place = bisect_left(self.buckets, num_reqs)
        if place == len(self.buckets) or len(packed.positions) != num_reqs or not samples.all():
            return None
        return self.buckets[place]

    def _padded(
        self, bucket: int, packed: Packed, drafts: list[list[int]], samples: np.ndarray
    ) -> StepInputs:
        self._put_padded(bucket, packed)
        inputs, num_reqs = self._bucket_inputs[bucket], len(packed.rows)
        self._sampled_rows = inputs.rows[:num_reqs]
        return StepInputs(
            packed=packed,
            drafts=drafts,
            samples=samples,
            token_ids=inputs.token_ids[:num_reqs],
            positions=inputs.positions[:num_reqs],
            logits_indices=inputs.logits_indices[:num_reqs],
            make_attention=tuple,
            bucket=bucket,
        )

    def _put_padded(self, bucket: int, packed: Packed) -> _PaddedPlaces:
        """Write a step where those of its bucket are read."""
        staging = self._staging
        staging.begin(len(self._bucket_words))
        places = _PaddedPlaces(
            token_ids=staging.put(self.token_ids[packed.token_rows, packed.positions], bucket),
            rows=staging.put(packed.rows, bucket),
            positions=staging.put(packed.positions, bucket),
            slots=[staging.put(slots, bucket, PADDING_SLOT) for slots in self.slots_of(packed)],
            seq_lens=staging.put_int32(packed.seq_lens, bucket),
        )
        staging.copy(self._bucket_words)
        return places
