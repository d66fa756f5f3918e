"""Requests that grow in the pages of native attention, step by step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotshoe.api import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionSpec,
    KVCacheSpec,
)
from hotshoe.testing.attention_reference import LayerFacts, poison
from hotshoe.testing.forward import allocate_cache, make_batch
from hotshoe.worker.batch import with_queries
from hotshoe_attention import cpu

BLOCK_SIZE = 16


def build(
    isa: str, *, num_threads: int | None = 1, block_size: int = BLOCK_SIZE
) -> AttentionBackend:
    component = cpu.hotshoe_component()
    context = AttentionContext(
        device=torch.device("cpu"),
        block_size=block_size,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        max_model_len=4096,
    )
    backend = component.factory(component.options(isa=isa, num_threads=num_threads), context)
    assert isinstance(backend, AttentionBackend)
    return backend


def make_spec(
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> AttentionSpec:
    kv = KVCacheSpec(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        dtype=kv_dtype or dtype,
        sliding_window=window,
    )
    return AttentionSpec(
        num_heads=num_heads,
        kv=kv,
        scale=head_dim**-0.5,
        dtype=dtype,
        softcap=softcap,
        has_sinks=has_sinks,
    )


def make_layer(spec: AttentionSpec) -> LayerFacts:
    return LayerFacts(spec, torch.linspace(-1, 2, spec.num_heads) if spec.has_sinks else None)


@dataclass
class Request:
    """A request's whole future: what its tokens bring along, and its blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: list[int]
    num_computed: int = 0
    outputs: list[Tensor] = field(default_factory=list)

    @staticmethod
    def random(length: int, spec: AttentionSpec, blocks: list[int], seed: int) -> Request:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, spec.dtype)
        kv = spec.kv

        def values(heads: int, size: int) -> Tensor:
            return torch.randn(length, heads, size, generator=generator).to(dtype)

        return Request(
            values(spec.num_heads, kv.head_dim),
            values(kv.num_kv_heads, kv.head_dim),
            values(kv.num_kv_heads, kv.head_dim_v),
            blocks,
        )

    @property
    def output(self) -> Tensor:
        return torch.cat(self.outputs)


class Pool:
    """A layer's pages, poisoned with NaN, and requests that grow in them."""

    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        *,
        num_blocks: int = 256,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.backend = backend
        self.layer = make_layer(spec)
        self._block_size = block_size
        self.cache = allocate_cache(backend, spec, num_blocks, torch.device("cpu"))
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)
        poison(self.cache, self._free)

    def add(self, length: int, seed: int) -> Request:
        num_blocks = -(-length // self._block_size)
        blocks = [self._free.pop() for _ in range(num_blocks)]
        return Request.random(length, self.layer.spec, blocks, seed)

    def batch(self, members: Sequence[tuple[Request, int]]) -> AttentionBatch:
        """The step that gives each of them so many tokens."""
        return make_batch(
            [count for _, count in members],
            [one.num_computed + count for one, count in members],
            [one.blocks for one, _ in members],
            self._block_size,
            padding_block=self._free[0],
        )

    def inputs(self, members: Sequence[tuple[Request, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of that step."""
        rows = [(one, slice(one.num_computed, one.num_computed + count)) for one, count in members]
        return (
            torch.cat([one.q[part] for one, part in rows]),
            torch.cat([one.k[part] for one, part in rows]),
            torch.cat([one.v[part] for one, part in rows]),
        )

    def step(
        self, members: Sequence[tuple[Request, int]], num_queries: Sequence[int] | None = None
    ) -> None:
        """Run it; of each member only the last ``num_queries`` tokens are queries, if given."""
        counts = [count for _, count in members]
        batch = self.batch(members)
        q, k, v = self.inputs(members)
        if num_queries is not None:
            batch = with_queries(batch, num_queries, torch.from_numpy)
            tokens = zip(torch.split(q, counts), counts, num_queries, strict=True)
            q = torch.cat([rows[count - wanted :] for rows, count, wanted in tokens])
        metadata = self.backend.build_metadata(batch, self.layer.spec.kv)
        output = self.backend.forward(self.layer, q, k, v, self.cache, metadata)
        lengths = list(batch.query_lens_list)
        for (one, count), rows in zip(members, torch.split(output, lengths), strict=True):
            one.outputs.append(rows)
            one.num_computed += count
