"""Runs a model plugin step by step without the engine: hand-made batches in, logits out."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from hotshoe.api import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionSpec,
    CheckpointTensor,
    Component,
    KernelsContext,
    KVCacheSpec,
    LayerCache,
    Model,
    ModelContext,
    QuantizationContext,
)
from hotshoe.api.layers import ForwardStep, LayerFactory
from hotshoe.worker.batch import with_queries


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A checkpoint tensor that is already in memory."""

    name: str
    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def format(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)

    def raw(self) -> Tensor:
        return self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The plugins that a model runs on, built with default options.

    Attributes:
        quantization_options: other ones for the quantization.
    """

    model: Component
    attention: Component
    kernels: Component
    quantization: Component
    quantization_options: Mapping[str, Any] = field(default_factory=dict)


class DirectRunner:
    """A loaded model, its KV cache and the requests it has seen.

    Blocks are handed out in shuffled order. Cache groups share block tables.

    Attributes:
        model: the model, loaded.
        layers: the factory that made its layers.
        hidden_states: of the last step, ``[num_tokens, hidden_size]`` by captured layer.
        unused: names of the checkpoint tensors that the model refused.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Iterable[CheckpointTensor],
        parts: Parts,
        *,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: str = "cpu",
        block_size: int = 16,
        num_blocks: int = 128,
        max_model_len: int = 1024,
        seed: int = 0,
        checkpoint_format: str = "safetensors",
    ) -> None:
        self._device = torch.device(device)
        self._block_size = block_size
        self.layers = self._make_factory(parts, dtype, kv_dtype or dtype, checkpoint_format)
        context = ModelContext(
            config=config,
            layers=self.layers,
            dtype=dtype,
            device=self._device,
            max_model_len=max_model_len,
        )
        self.model = cast(Model, parts.model.factory(parts.model.options(), context))
        self.unused = [tensor.name for tensor in tensors if not self.model.load_tensor(tensor)]
        self.layers.finalize()
        self._backend = self._make_backend(parts.attention, max_model_len)
        self._groups = self._bind()
        self._caches = [self._allocate(layer.spec, num_blocks) for layer in self._attention_layers]
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._blocks: dict[str, list[int]] = {}
        self._num_computed: dict[str, int] = {}
        self.hidden_states: dict[int, Tensor] = {}

    def step(
        self,
        new_tokens: Mapping[str, Sequence[int]],
        *,
        captured_layers: frozenset[int] = frozenset(),
    ) -> dict[str, Tensor]:
        """Run one step.

        Args:
            new_tokens: by request id, the tokens that follow those it has had so far; the order is
                the batch's.
            captured_layers: whose output ``hidden_states`` is to hold afterwards.

        Returns:
            ``[number of its new tokens, vocab_size]`` logits by request id.
        """
        with torch.inference_mode():
            hidden_states = self.forward(new_tokens, captured_layers=captured_layers)
            logits = self.model.compute_logits(hidden_states)
        sizes = [len(tokens) for tokens in new_tokens.values()]
        return dict(zip(new_tokens, torch.split(logits, sizes), strict=True))

    @torch.inference_mode()
    def forward(
        self,
        new_tokens: Mapping[str, Sequence[int]],
        *,
        captured_layers: frozenset[int] = frozenset(),
        wanted_rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Run one step up to the final hidden states, as the model returns them.

        Args:
            new_tokens: as for ``step``.
            captured_layers: likewise.
            wanted_rows: as ``ForwardStep.wanted_rows``.
        """
        batch = self._extend(new_tokens)
        metadata = [self._backend.build_metadata(batch, group) for group in self._groups]
        rows = wanted_metadata = None
        if wanted_rows is not None:
            rows = torch.tensor(wanted_rows, dtype=torch.int64, device=self._device)
            if self._backend.capabilities.takes_fewer_queries:
                wanted_metadata = partial(self._wanted_metadata, batch, wanted_rows)
        step = ForwardStep(metadata, self._caches, captured_layers, rows, wanted_metadata)
        token_ids = [token for tokens in new_tokens.values() for token in tokens]
        hidden_states = self.model.forward(
            torch.tensor(token_ids, device=self._device), batch.positions, step
        )
        self.hidden_states = step.hidden_states
        return hidden_states

    def _wanted_metadata(self, batch: AttentionBatch, rows: Sequence[int], group: int) -> Any:
        num_queries, end = [], 0
        for query_len in batch.query_lens_list:
            start, end = end, end + query_len
            wanted = [row for row in rows if start <= row < end]
            assert wanted == list(range(end - len(wanted), end)), "no last tokens of a request"
            num_queries.append(len(wanted))
        some = with_queries(batch, num_queries, lambda one: torch.from_numpy(one).to(self._device))
        return self._backend.build_metadata(some, self._groups[group])

    def greedy(self, prompt: Sequence[int], num_tokens: int, *, request_id: str) -> list[int]:
        """Run a new request alone, and return the tokens it generates."""
        output: list[int] = []
        new_tokens = list(prompt)
        for _ in range(num_tokens):
            logits = self.step({request_id: new_tokens})[request_id]
            new_tokens = [int(logits[-1].argmax())]
            output += new_tokens
        return output

    def forget(self, request_id: str) -> None:
        """Let a request go; its blocks serve others."""
        self._free += self._blocks.pop(request_id)
        del self._num_computed[request_id]

    @property
    def _attention_layers(self) -> list[Any]:
        return self.layers.attention_layers

    def _make_factory(
        self, parts: Parts, dtype: torch.dtype, kv_dtype: torch.dtype, checkpoint_format: str
    ) -> LayerFactory:
        kernels: Any = parts.kernels.factory(
            parts.kernels.options(), KernelsContext(device=self._device, dtype=dtype)
        )
        quantization: Any = parts.quantization.factory(
            parts.quantization.options(**parts.quantization_options),
            QuantizationContext(
                device=self._device, dtype=dtype, checkpoint_format=checkpoint_format
            ),
        )
        return LayerFactory(
            kernels=kernels,
            quantization=quantization,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=self._device,
        )

    def _make_backend(self, attention: Component, max_model_len: int) -> AttentionBackend:
        context = AttentionContext(
            device=self._device,
            block_size=self._block_size,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            max_model_len=max_model_len,
        )
        return cast(AttentionBackend, attention.factory(attention.options(), context))

    def _bind(self) -> tuple[KVCacheSpec, ...]:
        groups: dict[KVCacheSpec, int] = {}
        for layer in self._attention_layers:
            reasons = self._backend.supports(layer.spec)
            if reasons:
                raise ValueError(f"the attention backend can't run {layer.spec}: {reasons}")
            layer.bind(self._backend, groups.setdefault(layer.spec.kv, len(groups)))
        return tuple(groups)

    def _allocate(self, spec: AttentionSpec, num_blocks: int) -> LayerCache:
        return allocate_cache(self._backend, spec, num_blocks, self._device)

    def _extend(self, new_tokens: Mapping[str, Sequence[int]]) -> AttentionBatch:
        query_lens = [len(tokens) for tokens in new_tokens.values()]
        seq_lens = []
        for request_id, query_len in zip(new_tokens, query_lens, strict=True):
            seq_len = self._num_computed.get(request_id, 0) + query_len
            blocks = self._blocks.setdefault(request_id, [])
            while len(blocks) * self._block_size < seq_len:
                blocks.append(self._free.pop())
            self._num_computed[request_id] = seq_len
            seq_lens.append(seq_len)
        tables = [self._blocks[request_id] for request_id in new_tokens]
        return make_batch(query_lens, seq_lens, tables, self._block_size, device=self._device)


def allocate_cache(
    backend: AttentionBackend, spec: AttentionSpec, num_blocks: int, device: torch.device
) -> dict[str, Tensor]:
    """One layer's zeroed pages, by the names of the backend's layout."""
    return {
        tensor.name: torch.zeros(
            (num_blocks, *tensor.block_shape), dtype=getattr(torch, tensor.dtype), device=device
        )
        for tensor in backend.layout(spec).tensors
    }


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    device: torch.device | None = None,
    padding_block: int = 0,
) -> AttentionBatch:
    """The ragged batch of requests whose last ``query_lens`` positions are this step's.

    Args:
        query_lens: by request.
        seq_lens: by request, with this step's tokens.
        tables: by request, block ids; rows are padded with ``padding_block``.
        block_size: tokens per block.
        device: where the tensors live.
        padding_block: what the undefined entries of the table hold.
    """
    width = max(len(table) for table in tables)
    rows = [[*table, *[padding_block] * (width - len(table))] for table in tables]
    starts = [0]
    positions: list[int] = []
    slots: list[int] = []
    for query_len, seq_len, table in zip(query_lens, seq_lens, tables, strict=True):
        starts.append(starts[-1] + query_len)
        for position in range(seq_len - query_len, seq_len):
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
    return AttentionBatch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=torch.tensor(rows, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        block_size=block_size,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens_list=tuple(query_lens),
        seq_lens_list=tuple(seq_lens),
    )
