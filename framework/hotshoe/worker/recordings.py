"""Forward passes recorded by shape, so that a small step runs without the model's Python."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hotshoe.api import (
    AttentionBackend,
    AttentionBatch,
    Kernels,
    KVCacheSpec,
    LayerCache,
    Model,
    NotRecordableError,
    Recording,
)
from hotshoe.api.layers import ForwardStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotshoe.worker.batch import InputBatch, Packed, StepInputs

logger = logging.getLogger(__name__)

_MAX_TOKENS = 128  # with more, Python's share of a step is too small to matter
_MAX_RECORDINGS = 128
_NUM_STEPS_BEFORE = 2  # a shape is recorded when it comes back: most shapes with drafts don't
_NUM_STEPS_BEFORE_REPLACING = 16  # or steps of ever other shapes would record more than they replay


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedParts:
    """What a forward pass consists of."""

    model: Model
    kernels: Kernels
    attention: AttentionBackend
    groups: Sequence[KVCacheSpec]
    hidden_state_layers: frozenset[int] = frozenset()


@dataclass(slots=True, kw_only=True)
class _Group:
    """One cache group's part of the inputs, where the recordings look for them."""

    block_table: np.ndarray
    slot_mapping: np.ndarray


class ForwardRecordings:
    """Recordings of embedding to logits for steps in which every token's logits are wanted.

    Args:
        parts: of the model.
        caches: by layer; they must stay the same tensors.
        batch: that steps are prepared by.
        max_num_seqs: most requests of a step.
        max_model_len: longest sequence.
    """

    def __init__(
        self,
        parts: RecordedParts,
        caches: Sequence[LayerCache],
        batch: InputBatch,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._parts = parts
        self._caches = caches
        self._batch = batch
        self._layers = sorted(parts.hidden_state_layers)
        self._max_model_len = max_model_len
        # with what a recording reads besides caches and weights, which must live as long
        self._recordings: OrderedDict[tuple[int, int], tuple[Recording, ForwardStep]] = (
            OrderedDict()
        )
        self._num_seen: dict[tuple[int, int], int] = {}
        self._is_off = False
        num_reqs = min(max_num_seqs, _MAX_TOKENS)
        max_blocks = -(-max_model_len // batch.block_size)
        self._token_ids = np.zeros(_MAX_TOKENS, np.int64)
        self._positions = np.zeros(_MAX_TOKENS, np.int64)
        self._query_start_loc = np.zeros(num_reqs + 1, np.int32)
        self._seq_lens = np.zeros(num_reqs, np.int32)
        self._groups = [
            _Group(
                block_table=np.zeros((num_reqs, max_blocks), np.int32),
                slot_mapping=np.zeros(_MAX_TOKENS, np.int64),
            )
            for _ in parts.groups
        ]

    def run(self, inputs: StepInputs) -> tuple[Tensor, dict[int, Tensor]] | None:
        """Logits of a step, ``[num_tokens, vocab_size]``, and the hidden states that are wanted;
        None if it has to be run op by op.

        The logits are overwritten by the next replay; the hidden states are not.
        """
        num_tokens = len(inputs.packed.positions)
        if self._is_off or num_tokens > _MAX_TOKENS or inputs.logits_indices.shape[0] != num_tokens:
            return None
        shape = (len(inputs.rows), num_tokens)
        known = self._recordings.get(shape)
        recording = known[0] if known else None
        if recording is None:
            seen = self._num_seen[shape] = self._num_seen.get(shape, 0) + 1
            is_full = len(self._recordings) >= _MAX_RECORDINGS
            if seen < (_NUM_STEPS_BEFORE_REPLACING if is_full else _NUM_STEPS_BEFORE):
                return None
            recording = self._record(shape, inputs)
            if recording is None:
                return None
        self._recordings.move_to_end(shape)
        self._write(inputs.packed, inputs.token_ids)
        recording.replay()
        logits, *states = recording.outputs
        return logits, {
            layer: state.clone() for layer, state in zip(self._layers, states, strict=True)
        }

    def _write(self, packed: Packed, token_ids: Tensor) -> None:
        num_reqs, num_tokens = len(packed.rows), len(packed.positions)
        self._token_ids[:num_tokens] = token_ids.numpy()
        self._positions[:num_tokens] = packed.positions
        self._query_start_loc[: num_reqs + 1] = packed.query_start_loc
        self._seq_lens[:num_reqs] = packed.seq_lens
        tables, slots = self._batch.tables_of(packed), self._batch.slots_of(packed)
        # a model without attention has no groups, but one table of blocks all the same
        for group, table, mapping in zip(self._groups, tables, slots, strict=False):
            group.block_table[:num_reqs, : table.shape[1]] = table
            group.slot_mapping[:num_tokens] = mapping

    def _record(self, shape: tuple[int, int], inputs: StepInputs) -> Recording | None:
        num_tokens = shape[1]
        parts = self._parts
        token_ids = torch.from_numpy(self._token_ids[:num_tokens])
        positions = torch.from_numpy(self._positions[:num_tokens])
        metadata = [
            parts.attention.build_metadata(self._attention(shape, group, batch), spec)
            for group, batch, spec in zip(
                self._groups, inputs.attention, parts.groups, strict=False
            )
        ]
        step = ForwardStep(metadata, self._caches, parts.hidden_state_layers)

        def forward() -> tuple[Tensor, ...]:
            hidden = parts.model.forward(token_ids, positions, step)
            states = [step.hidden_states[layer] for layer in self._layers]
            return parts.model.compute_logits(hidden), *states

        try:
            recording = parts.kernels.record(forward)
        except NotRecordableError as error:
            logger.info("forward passes are run op by op, not recorded: %s", error)
            self._is_off = True
            return None
        if len(self._recordings) >= _MAX_RECORDINGS:
            replaced, _ = self._recordings.popitem(last=False)
            self._num_seen[replaced] = 0
        self._recordings[shape] = recording, step
        return recording

    def _attention(
        self, shape: tuple[int, int], group: _Group, batch: AttentionBatch
    ) -> AttentionBatch:
        """A batch over the tensors that ``_write`` fills, for any lengths."""
        num_reqs, num_tokens = shape
        return AttentionBatch(
            query_start_loc=torch.from_numpy(self._query_start_loc[: num_reqs + 1]),
            seq_lens=torch.from_numpy(self._seq_lens[:num_reqs]),
            block_table=torch.from_numpy(group.block_table[:num_reqs]),
            slot_mapping=torch.from_numpy(group.slot_mapping[:num_tokens]),
            positions=torch.from_numpy(self._positions[:num_tokens]),
            block_size=self._batch.block_size,
            max_query_len=num_tokens,
            max_seq_len=self._max_model_len,
            query_lens_list=batch.query_lens_list,
            seq_lens_list=batch.seq_lens_list,
        )
