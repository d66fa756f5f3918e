"""Measures a layer on made-up steps; only on a GPU, and never while a step is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench_cudagraph

from hotshoe.api import AttentionBackend, AttentionBatch, AttentionSpec
from hotshoe_attention.triton.options import TritonAttentionOptions
from hotshoe_attention.triton.tuning import Phase

_MEASURED_MS = 30
_PROMPT_LEN = 4096
_NUM_DECODED, _CONTEXT_LEN = 16, 4096  # more than the second-level cache holds


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer without rotation, which takes the same time with all sizes."""

    spec: AttentionSpec
    sinks: Tensor | None
    cos_sin: tuple[Tensor, Tensor] | None = None
    layer_index: int = 0


class LayerTimer:
    """Seconds of a layer by phase and options.

    Args:
        spec: of the layer.
        device: where it runs.
        block_size: tokens of a block.
        build: makes a backend with other options.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        block_size: int,
        build: Callable[[TritonAttentionOptions], AttentionBackend],
    ) -> None:
        self._layer = _Layer(
            spec, torch.zeros(spec.num_heads, device=device) if spec.has_sinks else None
        )
        self._device = device
        self._block_size = block_size
        self._build = build

    def __call__(self, phase: Phase, options: TritonAttentionOptions) -> float:
        query_len, num_reqs, seq_len = 1, _NUM_DECODED, _CONTEXT_LEN
        if phase == "prefill":
            query_len, num_reqs, seq_len = _PROMPT_LEN, 1, _PROMPT_LEN
        backend = self._build(options)
        spec = self._layer.spec
        batch = self._batch(num_reqs, query_len, seq_len)
        num_blocks = batch.block_table.numel()
        cache = {
            one.name: torch.zeros(
                (num_blocks, *one.block_shape),
                dtype=getattr(torch, one.dtype),
                device=self._device,
            )
            for one in backend.layout(spec).tensors
        }
        num_tokens, kv = num_reqs * query_len, spec.kv
        q = self._random(num_tokens, spec.num_heads, kv.head_dim)
        k = self._random(num_tokens, kv.num_kv_heads, kv.head_dim)
        v = self._random(num_tokens, kv.num_kv_heads, kv.head_dim_v)
        metadata = backend.build_metadata(batch, kv)

        def run() -> None:
            backend.forward(self._layer, q, k, v, cache, metadata)

        try:
            run()
            return float(do_bench_cudagraph(run, rep=_MEASURED_MS)) / 1e3
        except OutOfResources:
            return float("inf")

    def _batch(self, num_reqs: int, query_len: int, seq_len: int) -> AttentionBatch:
        device, size = self._device, self._block_size
        num_blocks = -(-seq_len // size)
        table = torch.randperm(num_reqs * num_blocks, device=device).view(num_reqs, num_blocks)
        positions = torch.arange(seq_len - query_len, seq_len, device=device)
        slots = table[:, positions // size] * size + positions % size
        return AttentionBatch(
            query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
            * query_len,
            seq_lens=torch.full((num_reqs,), seq_len, dtype=torch.int32, device=device),
            block_table=table.to(torch.int32),
            slot_mapping=slots.flatten(),
            positions=positions.repeat(num_reqs),
            block_size=size,
            max_query_len=query_len,
            max_seq_len=seq_len,
            query_lens_list=(),
            seq_lens_list=(),
        )

    def _random(self, *shape: int) -> Tensor:
        dtype = getattr(torch, self._layer.spec.dtype)
        return torch.randn(shape, dtype=dtype, device=self._device)
