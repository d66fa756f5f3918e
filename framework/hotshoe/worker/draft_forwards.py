"""A drafter's own layers, run on the blocks of the batch, and recorded where the kernels can."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotshoe.api import (
    AttentionBackend,
    AttentionBatch,
    DraftForwards,
    DraftFunction,
    DraftPass,
    DraftSpans,
    Kernels,
    KVCacheSpec,
    LayerCache,
    NotRecordableError,
    Recording,
)
from hotshoe.api.layers import ForwardStep
from hotshoe.worker.batch import InputBatch, last_rows, with_queries

logger = logging.getLogger(__name__)

_MAX_TOKENS = 256  # of all passes; with more, Python's share is too small to matter
_MAX_RECORDINGS = 128
_NUM_CALLS_BEFORE = 2  # a shape is recorded when it comes back
_MAX_USUAL = 8  # tokens of a request and pass; longer runs are what has waited
_NUM_CALLS_BEFORE_UNUSUAL = 16  # these come in any length, so they would be recorded in vain
_MAX_FEW = 8  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayerParts:
    """What a drafter's layers run on.

    Attributes:
        groups: what they keep, each kind once, in the order of their ``Attention.group``.
    """

    kernels: Kernels
    attention: AttentionBackend
    groups: Sequence[KVCacheSpec]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recording, with the tensors that it reads its inputs from."""

    recording: Recording
    passes: list[DraftPass]
    spans: list[_RecordedSpan]
    tensors: tuple[Tensor, ...]


class WorkerDraftForwards(DraftForwards):
    """Runs a drafter's functions for the requests of the step that was just run.

    Args:
        max_model_len: longest sequence.
        block_size: of the block tables.
    """

    def __init__(self, *, max_model_len: int, block_size: int) -> None:
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._parts: DraftLayerParts | None = None
        self._caches: Sequence[LayerCache] = []
        self._batch: InputBatch | None = None
        self._rows = np.zeros(0, np.int64)
        self._device = torch.device("cpu")
        self._is_off = True
        self._recorded: OrderedDict[object, _Recorded] = OrderedDict()
        self._num_seen: dict[object, int] = {}

    def bind(
        self,
        parts: DraftLayerParts,
        caches: Sequence[LayerCache],
        batch: InputBatch,
        *,
        device: torch.device | None = None,
        record: bool = True,
    ) -> None:
        """Attach what is known once the caches are allocated; recordings of before are gone.

        Args:
            parts: of the drafter.
            caches: by its layers.
            batch: whose first block table the drafter's layers share.
            device: where they run; None = the CPU.
            record: whether passes may be recorded.
        """
        self._parts, self._caches, self._batch = parts, caches, batch
        self._device = device or torch.device("cpu")
        self._recorded.clear()
        self._num_seen.clear()
        # passes come in too many shapes for recordings that cost much
        can_record = parts.kernels.capabilities.recording == "any_size"
        is_recordable = parts.attention.capabilities.is_recordable
        self._is_off = not (record and can_record and is_recordable)

    def close(self) -> None:
        """Let go of caches and recordings, and of the functions they are known by."""
        self._recorded.clear()
        self._num_seen.clear()
        self._caches, self._batch, self._parts = [], None, None

    def begin(self, rows: Sequence[int]) -> None:
        """Name the batch rows of the requests that ``DraftSpans.requests`` counts."""
        self._rows = np.array(rows, np.int64)

    def run(
        self, function: DraftFunction, spans: Sequence[DraftSpans], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        sizes = tuple((len(span.requests), sum(span.num_tokens)) for span in spans)
        if self._is_off or sum(num_tokens for _, num_tokens in sizes) > _MAX_TOKENS:
            return self._run_now(function, spans, tensors)
        key = (function, sizes, tuple((one.shape, one.dtype) for one in tensors))
        recorded = self._recorded.get(key)
        if recorded is None:
            seen = self._num_seen[key] = self._num_seen.get(key, 0) + 1
            is_usual = all(tokens <= _MAX_USUAL * num_reqs for num_reqs, tokens in sizes)
            if seen >= (_NUM_CALLS_BEFORE if is_usual else _NUM_CALLS_BEFORE_UNUSUAL):
                recorded = self._record(key, function, spans, tensors)
            if recorded is None:
                return self._run_now(function, spans, tensors)
        self._recorded.move_to_end(key)
        assert self._batch is not None
        table = self._batch.block_tables[0]
        for held, values in zip(recorded.tensors, tensors, strict=True):
            held.copy_(values)
        for kept, span in zip(recorded.spans, spans, strict=True):
            kept.write(table, self._rows[np.array(span.requests, np.int64)], span)
        recorded.recording.replay()
        return recorded.recording.outputs

    def _run_now(
        self, function: DraftFunction, spans: Sequence[DraftSpans], tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        passes = [self._pass(self._attention_batch(span), span.num_wanted) for span in spans]
        return function(passes, *(tensor.to(self._device) for tensor in tensors))

    def _attention_batch(self, span: DraftSpans) -> AttentionBatch:
        assert self._batch is not None
        return self._batch.spans(
            self._rows[np.array(span.requests, np.int64)],
            np.array(span.first_positions, np.int64),
            np.array(span.num_tokens, np.int64),
        )

    def _pass(self, batch: AttentionBatch, num_wanted: Sequence[int] | None = None) -> DraftPass:
        parts = self._parts
        assert parts is not None
        metadata = [parts.attention.build_metadata(batch, group) for group in parts.groups]
        wanted_rows = wanted_metadata = None
        if num_wanted is not None:
            wanted_rows = self._put(last_rows(batch.query_lens_list, num_wanted))
            if parts.attention.capabilities.takes_fewer_queries:
                wanted_metadata = partial(self._wanted_metadata, parts, batch, num_wanted)
        step = ForwardStep(
            metadata, self._caches, wanted_rows=wanted_rows, wanted_metadata=wanted_metadata
        )
        return DraftPass(batch.positions, step)

    def _wanted_metadata(
        self, parts: DraftLayerParts, batch: AttentionBatch, num_wanted: Sequence[int], group: int
    ) -> Any:
        some = with_queries(batch, num_wanted, self._put)
        return parts.attention.build_metadata(some, parts.groups[group])

    def _put(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _record(
        self,
        key: object,
        function: DraftFunction,
        spans: Sequence[DraftSpans],
        tensors: Sequence[Tensor],
    ) -> _Recorded | None:
        parts = self._parts
        assert parts is not None
        held = tuple(tensor.clone() for tensor in tensors)
        kept = [_RecordedSpan(span, self._max_model_len, self._block_size) for span in spans]
        passes = [self._pass(one.batch) for one in kept]
        try:
            recording = parts.kernels.record(lambda: function(passes, *held))
        except NotRecordableError as error:
            logger.info("drafts are computed op by op, not recorded: %s", error)
            self._is_off = True
            return None
        if len(self._recorded) >= _MAX_RECORDINGS:
            self._recorded.popitem(last=False)
        recorded = self._recorded[key] = _Recorded(recording, passes, kept, held)
        return recorded


class _RecordedSpan:
    """Arrays that a recorded pass reads its positions and blocks from.

    Attributes:
        batch: tensors over them, for any positions.

    Args:
        span: any of the sizes that are recorded.
        max_model_len: longest sequence.
        block_size: of the block table.
    """

    def __init__(self, span: DraftSpans, max_model_len: int, block_size: int) -> None:
        num_reqs, num_tokens = len(span.requests), sum(span.num_tokens)
        self._block_size = block_size
        self._places = np.arange(num_tokens)
        self._is_single = num_reqs == num_tokens
        self._query_start_loc = np.arange(num_reqs + 1, dtype=np.int32)
        self._seq_lens = np.zeros(num_reqs, np.int32)
        self._block_table = np.zeros((num_reqs, -(-max_model_len // block_size) + 1), np.int32)
        self._slot_mapping = np.zeros(num_tokens, np.int64)
        self._positions = np.zeros(num_tokens, np.int64)
        self.batch = AttentionBatch(
            query_start_loc=torch.from_numpy(self._query_start_loc),
            seq_lens=torch.from_numpy(self._seq_lens),
            block_table=torch.from_numpy(self._block_table),
            slot_mapping=torch.from_numpy(self._slot_mapping),
            positions=torch.from_numpy(self._positions),
            block_size=block_size,
            max_query_len=num_tokens,
            max_seq_len=max_model_len,
            query_lens_list=tuple(span.num_tokens),
            seq_lens_list=(max_model_len,) * num_reqs,
        )

    def write(self, table: np.ndarray, rows: np.ndarray, span: DraftSpans) -> None:
        """Let the next replay compute a span.

        Args:
            table: block ids by batch row.
            rows: of the span's requests.
            span: of the size that was recorded.
        """
        positions = self._positions
        # by far the most frequent, and arrays are slow for it
        if len(rows) == 1 and len(positions) <= _MAX_FEW:
            self._write_few(table[int(rows[0])], span.first_positions[0])
            return
        first = np.array(span.first_positions, np.int64)
        if self._is_single:
            positions[:] = first
            self._seq_lens[:] = first + 1
            token_rows = rows
        else:
            counts = np.array(span.num_tokens, np.int64)
            starts = self._query_start_loc
            np.cumsum(counts, out=starts[1:])
            np.add(self._places, np.repeat(first - starts[:-1], counts), out=positions)
            np.add(first, counts, out=self._seq_lens, casting="same_kind")
            token_rows = np.repeat(rows, counts)
        blocks, offsets = np.divmod(positions, self._block_size)
        np.multiply(table[token_rows, blocks], self._block_size, out=self._slot_mapping)
        self._slot_mapping += offsets
        width = int(self._seq_lens.max()) // self._block_size + 1
        self._block_table[:, :width] = table[rows, :width]

    def _write_few(self, blocks: np.ndarray, first: int) -> None:
        """Of a single request."""
        size, num_tokens = self._block_size, len(self._positions)
        self._query_start_loc[1] = num_tokens
        self._seq_lens[0] = first + num_tokens
        for at, position in enumerate(range(first, first + num_tokens)):
            self._positions[at] = position
            self._slot_mapping[at] = int(blocks[position // size]) * size + position % size
        width = (first + num_tokens - 1) // size + 1
        self._block_table[0, :width] = blocks[:width]
