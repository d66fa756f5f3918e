"""A drafter's own layers, run on the blocks of the batch, and recorded where the kernels can."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

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
from hotshoe.worker.batch import InputBatch

logger = logging.getLogger(__name__)

_MAX_TOKENS = 256  # of all passes; with more, Python's share is too small to matter
_MAX_RECORDINGS = 128
_NUM_CALLS_BEFORE = 2  # a shape is recorded when it comes back


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
    batches: list[AttentionBatch]
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
        self._is_off = True
        self._recorded: OrderedDict[object, _Recorded] = OrderedDict()
        self._num_seen: dict[object, int] = {}

    def bind(self, parts: DraftLayerParts, caches: Sequence[LayerCache], batch: InputBatch) -> None:
        """Attach what is known once the caches are allocated; recordings of before are gone.

        Args:
            parts: of the drafter.
            caches: by its layers.
            batch: whose first block table the drafter's layers share.
        """
        self._parts, self._caches, self._batch = parts, caches, batch
        self._recorded.clear()
        self._num_seen.clear()
        self._is_off = not parts.attention.capabilities.is_recordable

    def close(self) -> None:
        """Let go of caches and recordings."""
        self._recorded.clear()
        self._caches, self._batch, self._parts = [], None, None

    def begin(self, rows: Sequence[int]) -> None:
        """Name the batch rows of the requests that ``DraftSpans.requests`` counts."""
        self._rows = np.array(rows, np.int64)

    def run(
        self, function: DraftFunction, spans: Sequence[DraftSpans], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        batches = [self._attention_batch(span) for span in spans]
        num_tokens = sum(batch.positions.shape[0] for batch in batches)
        if self._is_off or num_tokens > _MAX_TOKENS:
            return function(self._passes(batches), *tensors)
        key = (
            function,
            tuple((len(one.seq_lens_list), one.positions.shape[0]) for one in batches),
            tuple((one.shape, one.dtype) for one in tensors),
        )
        recorded = self._recorded.get(key)
        if recorded is None:
            seen = self._num_seen[key] = self._num_seen.get(key, 0) + 1
            if seen >= _NUM_CALLS_BEFORE:
                recorded = self._record(key, function, batches, tensors)
            if recorded is None:
                return function(self._passes(batches), *tensors)
        self._recorded.move_to_end(key)
        for held, values in zip(recorded.tensors, tensors, strict=True):
            held.copy_(values)
        for kept, batch in zip(recorded.batches, batches, strict=True):
            _fill(kept, batch)
        recorded.recording.replay()
        return recorded.recording.outputs

    def _attention_batch(self, span: DraftSpans) -> AttentionBatch:
        assert self._batch is not None
        return self._batch.spans(
            self._rows[np.array(span.requests, np.int64)],
            np.array(span.first_positions, np.int64),
            np.array(span.num_tokens, np.int64),
        )

    def _passes(self, batches: Sequence[AttentionBatch]) -> list[DraftPass]:
        parts = self._parts
        assert parts is not None
        return [
            DraftPass(
                batch.positions,
                ForwardStep(
                    [parts.attention.build_metadata(batch, group) for group in parts.groups],
                    self._caches,
                ),
            )
            for batch in batches
        ]

    def _record(
        self,
        key: object,
        function: DraftFunction,
        batches: Sequence[AttentionBatch],
        tensors: Sequence[Tensor],
    ) -> _Recorded | None:
        parts = self._parts
        assert parts is not None
        held = tuple(tensor.clone() for tensor in tensors)
        kept = [self._kept(batch) for batch in batches]
        passes = self._passes(kept)
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

    def _kept(self, batch: AttentionBatch) -> AttentionBatch:
        """A batch over tensors of its own, for any positions."""
        num_reqs, num_tokens = len(batch.seq_lens_list), batch.positions.shape[0]
        max_blocks = -(-self._max_model_len // self._block_size) + 1
        return AttentionBatch(
            query_start_loc=torch.zeros(num_reqs + 1, dtype=torch.int32),
            seq_lens=torch.zeros(num_reqs, dtype=torch.int32),
            block_table=torch.zeros((num_reqs, max_blocks), dtype=torch.int32),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            positions=torch.zeros(num_tokens, dtype=torch.int64),
            block_size=batch.block_size,
            max_query_len=num_tokens,
            max_seq_len=self._max_model_len,
            query_lens_list=batch.query_lens_list,
            seq_lens_list=batch.seq_lens_list,
        )


def _fill(kept: AttentionBatch, batch: AttentionBatch) -> None:
    kept.query_start_loc.copy_(batch.query_start_loc)
    kept.seq_lens.copy_(batch.seq_lens)
    kept.block_table[:, : batch.block_table.shape[1]] = batch.block_table
    kept.slot_mapping.copy_(batch.slot_mapping)
    kept.positions.copy_(batch.positions)
