"""The backend: the pages' layout, and calls of the native ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
    LayerCache,
)
from hotshoe_attention.cpu.pages import Pages
from hotshoe_attention.cpu.step import Division, Scratch, Step
from hotshoe_native.attention import (
    DTYPES,
    MAX_HEAD_DIM,
    PAGE_DTYPES,
    AttentionArgs,
)
from hotshoe_native.ops import NativeLibrary


class CpuAttentionBackend(AttentionBackend):
    """One native call a layer: it rotates, writes the pages and attends, on ``num_threads`` threads
    of torch's.

    A result depends on the request's own tokens alone, bit for bit, whatever the batch, the cut of
    the prompt into steps and the number of threads. Products of bfloat16 pages are summed in
    float32, and weights are rounded to bfloat16 before they meet the values. Pages of int8 have a
    float32 scale for each token and KV head, one for its key and one for its value; queries and
    weights meet them as integers of 14 bits.
    """

    def __init__(
        self,
        capabilities: AttentionCapabilities,
        library: NativeLibrary,
        context: AttentionContext,
        *,
        num_threads: int,
    ) -> None:
        self.capabilities = capabilities
        self.num_threads = num_threads
        self._device = context.device
        self._block_size = context.block_size
        self._library = library
        self._scratch = Scratch()
        self._plan = library.op("attention_plan")
        self._attention = library.op("attention")
        # by identity, which is quicker than a record's hash; a spec in here can't lose its own
        self._layers: dict[int, _Layer] = {}

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
        elif self._block_size % (together := Pages.of(spec.kv, self._block_size).per_word):
            reasons.append(
                f"block size {self._block_size} is not a multiple of {together}, the number of "
                f"tokens that lie together with KV dtype {spec.kv.dtype!r}: raise cache.block_size"
            )
        if spec.num_heads % spec.kv.num_kv_heads:
            reasons.append(
                f"{spec.num_heads} heads are not a multiple of {spec.kv.num_kv_heads} KV heads"
            )
        if spec.kv.head_dim > MAX_HEAD_DIM:
            reasons.append(f"head_dim {spec.kv.head_dim} is more than {MAX_HEAD_DIM}")
        if spec.scale <= 0:
            reasons.append(f"scale {spec.scale!r} is not positive")
        return reasons

    def layout(self, spec: AttentionSpec) -> KVLayout:
        return Pages.of(spec.kv, self._block_size).layout(spec.kv.num_kv_heads)

    def build_metadata(self, batch: AttentionBatch, group: KVCacheSpec) -> Step:
        batch = replace(
            batch,
            query_start_loc=batch.query_start_loc.contiguous(),
            seq_lens=batch.seq_lens.contiguous(),
            slot_mapping=batch.slot_mapping.contiguous(),
            positions=batch.positions.contiguous(),
            block_table=_rows(batch.block_table),
        )
        return Step(batch, partial(self._divide, group))

    def resize(self, metadata: Any, num_reqs: int, num_tokens: int) -> None:
        step: Step = metadata
        step.resize(num_reqs, num_tokens)

    def _divide(self, group: KVCacheSpec, batch: AttentionBatch, group_size: int) -> Division:
        division = Division(
            batch,
            group,
            group_size,
            library=self._library,
            scratch=self._scratch,
            num_threads=self.num_threads,
        )
        self._plan(division.args, self.num_threads)
        return division

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
        known = self._layers.get(id(spec))
        if known is None:
            known = self._layers[id(spec)] = _Layer(spec, self._block_size)
        args = known.args
        q, k, v = _rows(q), _rows(k), _rows(v)
        step: Step = metadata
        division = step.division(args.group_size)
        out = torch.empty((q.shape[0], spec.num_heads, spec.kv.head_dim_v), dtype=q.dtype)
        args.batch = division.batch_address
        args.max_partials = division.max_partials
        args.q = q.data_ptr()
        args.q_token_stride, args.q_head_stride, _ = q.stride()
        args.k = k.data_ptr()
        args.k_token_stride, args.k_head_stride, _ = k.stride()
        args.v = v.data_ptr()
        args.v_token_stride, args.v_head_stride, _ = v.stride()
        args.out = out.data_ptr()
        args.pages = cache[known.name].data_ptr()
        tables = layer.cos_sin
        if tables is None:
            args.rotary_half = 0
        else:
            cos, sin = tables
            args.cos, args.sin = cos.data_ptr(), sin.data_ptr()
            args.rotary_half = cos.shape[1]
        if spec.has_sinks:
            sinks = layer.sinks
            assert sinks is not None
            args.sinks = sinks.data_ptr()
        self._attention(args, self.num_threads)
        return out

    def copy_slots(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        for cache in caches:
            for name, tensor in cache.items():
                Pages.named(name, tensor, self._block_size).copy_slots(tensor, source, target)


class _Layer:
    """What calls for layers of one spec have in common."""

    __slots__ = ("args", "name", "spec")

    def __init__(self, spec: AttentionSpec, block_size: int) -> None:
        kv = spec.kv
        self.spec = spec
        self.name = Pages.of(kv, block_size).name
        self.args = AttentionArgs(
            group_size=spec.num_heads // kv.num_kv_heads,
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            head_dim_v=kv.head_dim_v,
            window=kv.sliding_window or 0,
            dtype=DTYPES[spec.dtype],
            kv_dtype=PAGE_DTYPES[kv.dtype],
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
        )


def _rows(x: Tensor) -> Tensor:
    """``x`` itself where the values of a row lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
