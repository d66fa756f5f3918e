"""A backend whose steps all run on one batch of fixed tensors, as recorded steps do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotshoe.api import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayerView,
    AttentionSpec,
    KVCacheSpec,
    KVLayout,
    LayerCache,
)
from hotshoe.testing.attention_reference import PagedRun

Replay = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Makes of a function one that does the same again on what its tensors hold by then."""

NUM_REQS, NUM_TOKENS, MAX_BLOCKS = 6, 40, 8
TOKENS = ("slot_mapping", "positions")


class OneBatch(AttentionBackend):
    """Pads each step to one size, and lets a backend prepare the first of them only."""

    def __init__(self, backend: AttentionBackend, replay: Replay) -> None:
        self.capabilities = backend.capabilities
        self._backend = backend
        self._replay = replay
        self._batch: AttentionBatch | None = None
        self._metadata: Any = None
        self._inputs: tuple[Tensor, ...] = ()
        self._run: Callable[[], Tensor] | None = None

    def supports(self, spec: AttentionSpec) -> list[str]:
        return self._backend.supports(spec)

    def layout(self, spec: AttentionSpec) -> KVLayout:
        return self._backend.layout(spec)

    def copy_slots(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        self._backend.copy_slots(caches, source, target)

    def build_metadata(self, batch: AttentionBatch, group: KVCacheSpec) -> None:
        if self._batch is None:
            self._batch = empty(batch)
            self._metadata = self._backend.build_metadata(self._batch, group)
        held = self._batch
        held.slot_mapping.fill_(-1)
        held.seq_lens.zero_()
        held.query_start_loc.fill_(int(batch.query_start_loc[-1]))
        held.query_start_loc[: batch.query_start_loc.shape[0]] = batch.query_start_loc
        for name in TOKENS:
            getattr(held, name)[: batch.positions.shape[0]] = getattr(batch, name)
        num_reqs, width = batch.block_table.shape
        held.seq_lens[:num_reqs] = batch.seq_lens
        held.block_table[:num_reqs, :width] = batch.block_table

    def forward(
        self,
        layer: AttentionLayerView,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        metadata: None,
    ) -> Tensor:
        if self._run is None:
            self._inputs = tuple(one.new_zeros(NUM_TOKENS, *one.shape[1:]) for one in (q, k, v))
            self._run = self._replay(
                lambda: self._backend.forward(layer, *self._inputs, cache, self._metadata)
            )
        for held, values in zip(self._inputs, (q, k, v), strict=True):
            held[: values.shape[0]] = values
        return self._run()[: q.shape[0]].clone()


def run_on_one_batch(run: PagedRun, replay: Replay) -> None:
    """Steps of unequal kinds, each checked against the reference."""
    run.backend = OneBatch(run.backend, replay)
    run.step({"a": 20, "b": 1, "c": 7})
    run.step({"a": 1, "b": 1, "c": 1})
    run.step({"c": 4, "d": 33})
    run.step({"d": 1})
    run.step({"b": 30, "a": 5, "d": 5})


def empty(batch: AttentionBatch) -> AttentionBatch:
    """A batch of the size that steps have in common, with nothing but padding in it."""
    return replace(
        batch,
        query_start_loc=batch.query_start_loc.new_zeros(NUM_REQS + 1),
        seq_lens=batch.seq_lens.new_zeros(NUM_REQS),
        block_table=batch.block_table.new_zeros(NUM_REQS, MAX_BLOCKS),
        slot_mapping=batch.slot_mapping.new_full((NUM_TOKENS,), -1),
        positions=batch.positions.new_zeros(NUM_TOKENS),
        max_query_len=NUM_TOKENS,
        max_seq_len=MAX_BLOCKS * batch.block_size,
        query_lens_list=(),
        seq_lens_list=(),
    )


def again(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Runs the function itself."""
    return function


def cuda_graph(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Runs the function once, which compiles its kernels, and replays what it launches."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
