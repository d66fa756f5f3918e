"""The backend: the pages' layout, and launches of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

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
from hotshoe_attention.triton.attend import attend_parts, attend_tiles
from hotshoe_attention.triton.options import TritonAttentionOptions
from hotshoe_attention.triton.shapes import MAX_HEAD_DIM, LayerShape
from hotshoe_attention.triton.tiles import Gpu
from hotshoe_attention.triton.tuning import KeptSizes, tuned
from hotshoe_attention.triton.workspace import Workspace
from hotshoe_attention.triton.write import write_and_plan


class TritonAttentionBackend(AttentionBackend):
    """Two launches a layer for steps without prompts, three with: the first rotates, writes the
    pages and plans, the others attend.

    Nothing is read back from the device, and grids depend only on the numbers of requests and
    tokens, and on the ``max_`` fields as bounds. Products are summed in float32, and those of
    float32 aren't rounded to TF32. Pages of int8 have a float32 scale for each token and KV head.
    """

    def __init__(
        self,
        options: TritonAttentionOptions,
        capabilities: AttentionCapabilities,
        context: AttentionContext,
        gpu: Gpu | None,
    ) -> None:
        self.capabilities = capabilities
        self._options = options
        self._context = context
        self._gpu = gpu
        self._workspace = Workspace()
        # by identity, which is quicker than a record's hash; a spec in here can't lose its own
        self._shapes: dict[int, tuple[AttentionSpec, LayerShape]] = {}

    def supports(self, spec: AttentionSpec) -> list[str]:
        kv, offered = spec.kv, self.capabilities
        reasons = []
        if self._context.device.type not in offered.devices:
            reasons.append(f"device {self._context.device.type!r} is not one of {offered.devices}")
        if spec.dtype not in offered.dtypes:
            reasons.append(f"dtype {spec.dtype!r} is not one of {offered.dtypes}")
        if kv.dtype not in offered.kv_dtypes:
            reasons.append(
                f"KV dtype {kv.dtype!r} is not one of {offered.kv_dtypes}: change cache.dtype"
            )
        if spec.num_heads % kv.num_kv_heads:
            reasons.append(
                f"{spec.num_heads} heads are not a multiple of {kv.num_kv_heads} KV heads"
            )
        if max(kv.head_dim, kv.head_dim_v) > MAX_HEAD_DIM:
            reasons.append(
                f"head_dim {max(kv.head_dim, kv.head_dim_v)} is more than {MAX_HEAD_DIM}"
            )
        if spec.scale <= 0:
            reasons.append(f"scale {spec.scale!r} is not positive")
        return reasons

    def layout(self, spec: AttentionSpec) -> KVLayout:
        kv = spec.kv
        rows = (kv.num_kv_heads, self._context.block_size)
        tensors = [
            KVTensor(name="k", block_shape=(*rows, kv.head_dim), dtype=kv.dtype),
            KVTensor(name="v", block_shape=(*rows, kv.head_dim_v), dtype=kv.dtype),
        ]
        row_bytes = (kv.head_dim + kv.head_dim_v) * getattr(torch, kv.dtype).itemsize
        if kv.dtype == "int8":
            tensors += [
                KVTensor(name=name, block_shape=rows, dtype="float32")
                for name in ("k_scale", "v_scale")
            ]
            row_bytes += 2 * torch.float32.itemsize
        return KVLayout(tensors=tuple(tensors), bytes_per_block=rows[0] * rows[1] * row_bytes)

    def build_metadata(self, batch: AttentionBatch, group: KVCacheSpec) -> AttentionBatch:
        return batch

    def forward(
        self,
        layer: AttentionLayerView,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        metadata: Any,
    ) -> Tensor:
        batch: AttentionBatch = metadata
        spec = layer.spec
        out = q.new_empty(q.shape[0], spec.num_heads, spec.kv.head_dim_v)
        if not q.shape[0]:
            return out
        known = self._shapes.get(id(spec))
        if known is None:
            known = self._shapes[id(spec)] = spec, self._shape(spec)
        _, shape = known
        q, k, v = _rows(q), _rows(k), _rows(v)
        num_tokens, num_reqs = q.shape[0], batch.seq_lens.shape[0]
        assert num_reqs <= self._context.max_num_seqs
        part_tokens = shape.max_part_tokens(max(batch.max_query_len, 1))
        num_tiles = 0
        if batch.max_query_len > part_tokens:
            num_tiles = shape.num_tiles(num_reqs, num_tokens, part_tokens)
        plan, partials = self._workspace.of(shape, num_tiles, q.device)
        cos, sin = layer.cos_sin or (None, None)
        half = 0 if cos is None else cos.shape[1]
        block_t = shape.block_t(num_tokens)
        num_writers = -(-num_tokens // block_t) * shape.num_kv_heads
        pages = cache["k"], cache["v"], cache.get("k_scale"), cache.get("v_scale")
        lengths = batch.query_start_loc, batch.seq_lens
        write_and_plan[(num_writers + num_reqs,)](
            q,
            k,
            v,
            out,
            *pages,
            cos,
            sin,
            batch.positions,
            batch.slot_mapping,
            *lengths,
            plan,
            num_tokens,
            num_reqs,
            num_writers,
            part_tokens,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            **shape.write_arguments(half, block_t),
        )
        table = _rows(batch.block_table)
        read = q, *pages, out, layer.sinks if spec.has_sinks else None, table, *lengths, plan
        numbers = spec.scale, spec.softcap, *q.stride()[:2], table.stride(0)
        num_parts = shape.num_parts(num_reqs, batch.max_seq_len)
        attend_parts[(shape.num_kv_heads * num_parts,)](
            *read, partials, *numbers, **shape.parts_arguments(part_tokens)
        )
        if num_tiles:
            attend_tiles[(shape.num_kv_heads * num_tiles,)](
                *read, *numbers, **shape.tiles_arguments()
            )
        return out

    def _shape(self, spec: AttentionSpec) -> LayerShape:
        for known, shape in self._shapes.values():
            if known == spec:
                return shape
        options = self._options
        if options.autotune and self._gpu:
            options = self._tuned(spec, self._gpu)
        return LayerShape(spec, self._context, self._gpu, options)

    def _tuned(self, spec: AttentionSpec, gpu: Gpu) -> TritonAttentionOptions:
        """Measures, unless that was done before; the worker's first step, which finds out how much
        memory there is for pages, is never recorded.
        """
        assert not torch.cuda.is_current_stream_capturing()
        from hotshoe_attention.triton.measuring import LayerTimer

        options = self._options.model_copy(update={"autotune": False})
        context, device = self._context, self._context.device
        kept = KeptSizes.on_this_machine(
            Path(knobs.cache.dir), torch.cuda.get_device_name(device), triton.__version__
        )
        timer = LayerTimer(
            spec,
            device,
            context.block_size,
            lambda other: TritonAttentionBackend(other, self.capabilities, context, gpu),
        )
        return tuned(spec, gpu, options, kept, timer)

    def copy_slots(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        size = self._context.block_size
        source_block, source_place = source // size, source % size
        target_block, target_place = target // size, target % size
        for cache in caches:
            for pages in cache.values():
                # indexing by tensors makes a copy, so a slot may be both source and target
                pages[target_block, :, target_place] = pages[source_block, :, source_place]


def _rows(x: Tensor) -> Tensor:
    """``x`` itself where the values of a row lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
