"""The backend: pages as the library reads them, and one call of it per layer and step."""

# T=num_tokens N=num_heads K=num_kv_heads H=head_dim

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
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

_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of a group needs in a step.

    Attributes:
        kv_start_loc: ``[num_reqs + 1]`` int32, where each request's positions would begin if they
            lay side by side.
        is_decode: whether every request has one token.
    """

    batch: AttentionBatch
    kv_start_loc: Tensor
    is_decode: bool


class FlashAttnBackend(AttentionBackend):
    """Steps in which every request has one token take the kernel that splits contexts over the
    GPU; all others the one for ragged batches. Both read the pages by block table.
    """

    def __init__(
        self, capabilities: AttentionCapabilities, context: AttentionContext, *, page_multiple: int
    ) -> None:
        self.capabilities = capabilities
        self._block_size = context.block_size
        self._page_multiple = page_multiple

    def supports(self, spec: AttentionSpec) -> list[str]:
        kv, reasons = spec.kv, []
        if self._block_size % self._page_multiple:
            reasons.append(
                f"cache.block_size {self._block_size} is no multiple of {self._page_multiple}"
            )
        if spec.dtype not in self.capabilities.dtypes or kv.dtype != spec.dtype:
            reasons.append(
                f"{spec.dtype} on {kv.dtype} pages; it has one dtype for both, of "
                f"{', '.join(self.capabilities.dtypes)}"
            )
        if kv.head_dim != kv.head_dim_v or kv.head_dim > _MAX_HEAD_DIM or kv.head_dim % 8:
            reasons.append(
                f"head_dim {kv.head_dim} and {kv.head_dim_v} for values; they must be equal, a "
                f"multiple of 8 and at most {_MAX_HEAD_DIM}"
            )
        if spec.has_sinks:
            reasons.append("sinks")
        return reasons

    def layout(self, spec: AttentionSpec) -> KVLayout:
        kv = spec.kv
        shape = (self._block_size, kv.num_kv_heads, kv.head_dim)
        num_values = 2 * self._block_size * kv.num_kv_heads * kv.head_dim
        return KVLayout(
            tensors=tuple(KVTensor(name=one, block_shape=shape, dtype=kv.dtype) for one in "kv"),
            bytes_per_block=num_values * getattr(torch, kv.dtype).itemsize,
        )

    def build_metadata(self, batch: AttentionBatch, group: KVCacheSpec) -> Step:
        ends = batch.seq_lens.cumsum(0, dtype=torch.int32)
        return Step(
            batch=batch,
            kv_start_loc=torch.nn.functional.pad(ends, (1, 0)),
            is_decode=len(batch.slot_mapping) == len(batch.seq_lens) and batch.max_query_len == 1,
        )

    def forward(
        self,
        layer: AttentionLayerView,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        metadata: Any,
    ) -> Tensor:
        spec, step = layer.spec, metadata
        batch: AttentionBatch = step.batch
        pages = cache["k"], cache["v"]
        for target, values in zip(pages, (k, v), strict=True):
            target.flatten(0, 1).index_copy_(0, batch.slot_mapping, values)
        window = spec.kv.sliding_window
        settings: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": True,
            # the library counts the positions before a query's own
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": spec.softcap or 0.0,
            "block_table": batch.block_table,
        }
        if step.is_decode:
            out = flash_attn_with_kvcache(
                q.unsqueeze(1), *pages, cache_seqlens=batch.seq_lens, **settings
            )
            return out.squeeze(1).contiguous()
        return flash_attn_varlen_func(
            q,
            *pages,
            cu_seqlens_q=batch.query_start_loc,
            cu_seqlens_k=step.kv_start_loc,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            **settings,
        ).contiguous()

    def copy_slots(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        for cache in caches:
            for pages in cache.values():
                slots = pages.flatten(0, 1)
                # index_select makes a copy, so a slot may be both source and target
                slots.index_copy_(0, target, slots.index_select(0, source))
