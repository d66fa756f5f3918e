"""Forward passes that are recorded once, so that steps run without the model's Python."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

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
    from hotshoe.worker.batch import InputBatch, Packed, StepInputs

logger = logging.getLogger(__name__)

_MAX_TOKENS = 2048  # with more, Python's share of a step is below 1%
_MAX_LOGITS = 256  # rows, or as many as requests; memory that no step has needed is never touched


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


@dataclass(slots=True, kw_only=True)
class _Recorded:
    """A recording, and everything besides caches and weights that must live as long.

    Attributes:
        metadata: of all groups, to be resized.
    """

    recording: Recording
    step: ForwardStep
    metadata: list[Any]


class ForwardRecordings:
    """Two recordings of embedding to logits, each made when a step first needs it: one for steps in
    which every token's logits are wanted, such as those that only decode, and one for the others,
    which have prompts. Either is made with as many tokens as such a step may have, up to
    2,048, and computes as many as a step has.

    Args:
        parts: of the model.
        caches: by layer; they must stay the same tensors.
        batch: that steps are prepared by.
        max_num_seqs: most requests of a step.
        max_num_batched_tokens: most tokens of a step.
        max_model_len: longest sequence.
    """

    def __init__(
        self,
        parts: RecordedParts,
        caches: Sequence[LayerCache],
        batch: InputBatch,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self._parts = parts
        self._caches = caches
        self._batch = batch
        self._layers = sorted(parts.hidden_state_layers)
        self._max_model_len = max_model_len
        self._max_tokens = min(max_num_batched_tokens, _MAX_TOKENS)
        max_logits = max(_MAX_LOGITS, max_num_seqs)
        self._max_decoded = min(self._max_tokens, max_logits)
        self._max_wanted = _coprime(self._max_tokens, max_logits)
        # by whether the logits of all tokens are wanted; None: it can't be recorded
        self._recorded: dict[bool, _Recorded | None] = {}
        self._said = ""
        max_blocks = -(-max_model_len // batch.block_size)
        self._token_ids = np.zeros(self._max_tokens, np.int64)
        self._positions = np.zeros(self._max_tokens, np.int64)
        self._query_start_loc = np.zeros(max_num_seqs + 1, np.int32)
        self._seq_lens = np.zeros(max_num_seqs, np.int32)
        self._wanted_rows = np.zeros(self._max_wanted, np.int64)
        self._wanted_start_loc = np.zeros(max_num_seqs + 1, np.int32)
        self._groups = [
            _Group(
                block_table=np.zeros((max_num_seqs, max_blocks), np.int32),
                slot_mapping=np.zeros(self._max_tokens, np.int64),
            )
            for _ in parts.groups
        ]

    def run(self, inputs: StepInputs) -> tuple[Tensor, dict[int, Tensor]] | None:
        """Logits of a step, ``[num_logits, vocab_size]``, and the hidden states that are wanted;
        None if it has to be run op by op.

        The logits are overwritten by the next replay; the hidden states are not.
        """
        num_tokens, num_logits = len(inputs.packed.positions), len(inputs.logits_indices)
        is_all = num_tokens == num_logits
        if num_tokens > self._max_tokens or num_logits > (
            self._max_decoded if is_all else self._max_wanted
        ):
            return None
        if is_all not in self._recorded:
            self._recorded[is_all] = self._record(is_all)
        recorded = self._recorded[is_all]
        if recorded is None:
            return None
        self._write(inputs)
        recorded.recording.resize((num_tokens,) if is_all else (num_tokens, num_logits))
        for metadata in recorded.metadata:
            self._parts.attention.resize(metadata, len(inputs.rows), num_tokens)
        recorded.recording.replay()
        logits, *states = recorded.recording.outputs
        return logits[:num_logits], {
            layer: state[:num_tokens].clone()
            for layer, state in zip(self._layers, states, strict=True)
        }

    def _write(self, inputs: StepInputs) -> None:
        packed = inputs.packed
        num_reqs, num_tokens = len(packed.rows), len(packed.positions)
        self._token_ids[:num_tokens] = inputs.token_ids.numpy()
        self._positions[:num_tokens] = packed.positions
        self._query_start_loc[: num_reqs + 1] = packed.query_start_loc
        self._seq_lens[:num_reqs] = packed.seq_lens
        num_logits = len(inputs.logits_indices)
        if num_logits < num_tokens:
            self._wanted_rows[:num_logits] = inputs.logits_indices.numpy()
            np.cumsum(inputs.num_wanted, out=self._wanted_start_loc[1 : num_reqs + 1])
        self._write_blocks(packed)

    def _write_blocks(self, packed: Packed) -> None:
        num_reqs, num_tokens = len(packed.rows), len(packed.positions)
        tables, slots = self._batch.tables_of(packed), self._batch.slots_of(packed)
        # a model without attention has no groups, but one table of blocks all the same
        for group, table, mapping in zip(self._groups, tables, slots, strict=False):
            group.block_table[:num_reqs, : table.shape[1]] = table
            group.slot_mapping[:num_tokens] = mapping

    def _record(self, is_all: bool) -> _Recorded | None:
        parts = self._parts
        num_tokens = self._max_decoded if is_all else self._max_tokens
        sizes = (num_tokens,) if is_all else (num_tokens, self._max_wanted)
        if 0 in sizes:
            return None
        token_ids = torch.from_numpy(self._token_ids[:num_tokens])
        positions = torch.from_numpy(self._positions[:num_tokens])
        batches = [self._attention(group, num_tokens) for group in self._groups]
        metadata = self._metadata(batches)
        step = ForwardStep(metadata, self._caches, parts.hidden_state_layers)
        if not is_all:
            step.wanted_rows = torch.from_numpy(self._wanted_rows)
            if parts.attention.capabilities.takes_fewer_queries:
                wanted = self._metadata([self._fewer_queries(batch) for batch in batches])
                step.wanted_metadata = wanted.__getitem__
                metadata = metadata + wanted

        def forward() -> tuple[Tensor, ...]:
            hidden = parts.model.forward(token_ids, positions, step)
            states = [step.hidden_states[layer] for layer in self._layers]
            rows = step.wanted_rows
            if rows is not None and len(rows) != len(hidden):
                hidden = parts.kernels.take_rows(hidden, rows)
            return parts.model.compute_logits(hidden), *states

        try:
            recording = parts.kernels.record(forward, sizes)
            for one in metadata:
                parts.attention.resize(one, 0, 0)
        except NotRecordableError as error:
            self._say(f"forward passes are run op by op, not recorded: {error}")
            return None
        return _Recorded(recording=recording, step=step, metadata=metadata)

    def _say(self, line: str) -> None:
        if line != self._said:  # the same reason holds for both, mostly
            logger.info(line)
            self._said = line

    def _metadata(self, batches: Sequence[AttentionBatch]) -> list[Any]:
        build = self._parts.attention.build_metadata
        groups = self._parts.groups
        return [build(batch, group) for batch, group in zip(batches, groups, strict=True)]

    def _attention(self, group: _Group, num_tokens: int) -> AttentionBatch:
        """A batch over the tensors that ``_write`` fills, for any lengths."""
        return AttentionBatch(
            query_start_loc=torch.from_numpy(self._query_start_loc),
            seq_lens=torch.from_numpy(self._seq_lens),
            block_table=torch.from_numpy(group.block_table),
            slot_mapping=torch.from_numpy(group.slot_mapping[:num_tokens]),
            positions=torch.from_numpy(self._positions[:num_tokens]),
            block_size=self._batch.block_size,
            max_query_len=num_tokens,
            max_seq_len=self._max_model_len,
            query_lens_list=(),
            seq_lens_list=(),
        )

    def _fewer_queries(self, batch: AttentionBatch) -> AttentionBatch:
        return replace(batch, query_start_loc=torch.from_numpy(self._wanted_start_loc))


def _coprime(number: int, most: int) -> int:
    """The largest number up to ``most`` that has no divisor in common with a larger one; 0 = none
    but 1. So multiples of either, such as heads of tokens, can be told apart.
    """
    return next((one for one in range(min(most, number - 1), 1, -1) if gcd(one, number) == 1), 0)
