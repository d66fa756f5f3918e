"""The backend: pages as plain tensors, written and gathered by slot, attended in torch."""

# T=num_tokens N=num_heads K=num_kv_heads G=N/K H=head_dim V=head_dim_v

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotshoe.api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayerView,
    AttentionSpec,
    KVCacheSpec,
    KVLayout,
    KVTensor,
    LayerCache,
)
from hotshoe_attention.torch_sdpa.maths import attend_chunk, attend_single
from hotshoe_attention.torch_sdpa.metadata import Metadata, prepare


class TorchSdpaBackend(AttentionBackend):
    """Requests with one query token are attended together, padded to similar lengths; those with
    more, one by one. A request's result depends on the others only by rounding.
    """

    def __init__(self, capabilities: AttentionCapabilities, context: AttentionContext) -> None:
        self.capabilities = capabilities
        self._device = context.device
        self._block_size = context.block_size

    def supports(self, spec: AttentionSpec) -> list[str]:
        reasons = []
        if self._device.type not in self.capabilities.devices:
            reasons.append(
                f"device {self._device.type!r} is not one of {self.capabilities.devices}"
            )
        if spec.dtype not in self.capabilities.dtypes:
            reasons.append(f"dtype {spec.dtype!r} is not one of {self.capabilities.dtypes}")
        if spec.kv.dtype not in self.capabilities.kv_dtypes:
            reasons.append(
                f"KV dtype {spec.kv.dtype!r} is not one of {self.capabilities.kv_dtypes}: change "
                "cache.dtype"
            )
        if spec.num_heads % spec.kv.num_kv_heads:
            reasons.append(
                f"{spec.num_heads} heads are not a multiple of {spec.kv.num_kv_heads} KV heads"
            )
        return reasons

    def layout(self, spec: AttentionSpec) -> KVLayout:
        kv = spec.kv
        shape_k = (self._block_size, kv.num_kv_heads, kv.head_dim)
        shape_v = (self._block_size, kv.num_kv_heads, kv.head_dim_v)
        num_values = self._block_size * kv.num_kv_heads * (kv.head_dim + kv.head_dim_v)
        return KVLayout(
            tensors=(
                KVTensor(name="k", block_shape=shape_k, dtype=kv.dtype),
                KVTensor(name="v", block_shape=shape_v, dtype=kv.dtype),
            ),
            bytes_per_block=num_values * getattr(torch, kv.dtype).itemsize,
        )

    def build_metadata(self, batch: AttentionBatch, group: KVCacheSpec) -> Metadata:
        return prepare(batch, group)

    def forward(
        self,
        layer: AttentionLayerView,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        metadata: Any,
    ) -> Tensor:
        spec = layer.spec
        step: Metadata = metadata
        k_cache, v_cache = cache["k"].flatten(0, 1), cache["v"].flatten(0, 1)
        k_cache.index_copy_(0, step.slot_mapping, k.to(k_cache.dtype))
        v_cache.index_copy_(0, step.slot_mapping, v.to(v_cache.dtype))
        if step.is_one_single_group:
            (single,) = step.singles
            return attend_single(q, single, k_cache, v_cache, spec, layer.sinks)
        out = q.new_empty(q.shape[0], spec.num_heads, spec.kv.head_dim_v)
        for single in step.singles:
            rows = q.index_select(0, single.rows)
            out.index_copy_(
                0, single.rows, attend_single(rows, single, k_cache, v_cache, spec, layer.sinks)
            )
        for chunk in step.chunks:
            rows = q[chunk.start : chunk.stop]
            # later steps see what the cache holds, so a narrower one is read back here too
            if chunk.is_whole and k_cache.dtype == q.dtype:
                keys, values = k[chunk.start : chunk.stop], v[chunk.start : chunk.stop]
            else:
                keys = k_cache.index_select(0, chunk.slots).to(q.dtype)
                values = v_cache.index_select(0, chunk.slots).to(q.dtype)
            out[chunk.start : chunk.stop] = attend_chunk(
                rows, keys, values, chunk, spec, layer.sinks
            )
        return out

    def copy_slots(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        for cache in caches:
            for pages in cache.values():
                slots = pages.flatten(0, 1)
                # index_select makes a copy, so a slot may be both source and target
                slots.index_copy_(0, target, slots.index_select(0, source))
