"""A step's batch, sorted into groups of single-token queries and multi-token chunks."""

# B=requests in a group L=positions attended to K=num_kv_heads H=head_dim

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotshoe.api import AttentionBatch, KVCacheSpec

# lengths below this count as equal: padding is cheaper than more calls
MIN_PADDED_LEN = 512


@dataclass(frozen=True, slots=True)
class SingleTokenGroup:
    """Requests with one query token and similar lengths.

    Attributes:
        rows: ``[B]`` int64, their tokens in the packed batch.
        heads: ``[B * K * L]`` int64 rows of ``[num_slots * K, H]``: gathered so, a head's keys lie
            together, as the matrix products want them. What a short request lacks repeats its last
            position, so that nothing outside its own pages is read.
        bias: ``[B, 1, 1, L]`` float32, ``-inf`` where a position is a repeat.
    """

    rows: Tensor
    heads: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's several query tokens, ``start:stop`` in the packed batch.

    Attributes:
        slots: ``[L]`` int64, of the positions that any of its queries attends to.
        mask: ``[num_queries, L]`` bool, True = attend; None = causal over equal lengths.
        is_whole: whether its queries attend to no other positions than their own, whose keys and
            values are the same rows of k and v.
    """

    start: int
    stop: int
    slots: Tensor
    mask: Tensor | None
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Metadata:
    """What ``forward`` needs for layers of one cache group.

    Attributes:
        is_one_single_group: whether the whole batch is one group of single-token queries, in order.
    """

    slot_mapping: Tensor
    singles: tuple[SingleTokenGroup, ...]
    chunks: tuple[Chunk, ...]
    is_one_single_group: bool


def prepare(batch: AttentionBatch, kv: KVCacheSpec) -> Metadata:
    """Sort a batch for the layers of one cache group."""
    window = kv.sliding_window
    by_size: dict[int, list[int]] = {}
    chunks = []
    starts = []
    start = 0
    all_are_queries = sum(batch.query_lens_list) == len(batch.slot_mapping)
    for i, query_len in enumerate(batch.query_lens_list):
        starts.append(start)
        if query_len == 1:
            seq_len = min(batch.seq_lens_list[i], window or batch.seq_lens_list[i])
            size = max(seq_len, MIN_PADDED_LEN - 1).bit_length()
            by_size.setdefault(size, []).append(i)
        elif query_len > 1:
            chunks.append(_chunk(batch, i, start, window, all_are_queries=all_are_queries))
        start += query_len
    singles = tuple(_single_group(batch, members, starts, kv) for members in by_size.values())
    return Metadata(
        slot_mapping=batch.slot_mapping,
        singles=singles,
        chunks=tuple(chunks),
        is_one_single_group=len(singles) == 1 and singles[0].rows.shape[0] == start,
    )


def _single_group(
    batch: AttentionBatch, members: list[int], starts: list[int], kv: KVCacheSpec
) -> SingleTokenGroup:
    device, window = batch.block_table.device, kv.sliding_window
    ends = [batch.seq_lens_list[i] for i in members]
    begins = [max(0, end - window) if window else 0 for end in ends]
    num_positions = max(end - begin for begin, end in zip(begins, ends, strict=True))
    begins_B1 = torch.tensor(begins, device=device).unsqueeze(1)
    last_B1 = torch.tensor(ends, device=device).unsqueeze(1) - 1
    positions_BL = begins_B1 + torch.arange(num_positions, device=device)
    is_repeat_BL = positions_BL > last_B1
    positions_BL = torch.minimum(positions_BL, last_B1)
    requests = torch.tensor(members, device=device)
    table = batch.block_table.index_select(0, requests)
    blocks_BL = table.gather(1, positions_BL // batch.block_size).to(torch.int64)
    slots_BL = blocks_BL * batch.block_size + positions_BL % batch.block_size
    kv_heads_K1 = torch.arange(kv.num_kv_heads, device=device).unsqueeze(1)
    heads_BKL = slots_BL.unsqueeze(1) * kv.num_kv_heads + kv_heads_K1
    bias_BL = torch.zeros(is_repeat_BL.shape, device=device)
    bias_BL.masked_fill_(is_repeat_BL, float("-inf"))
    rows = torch.tensor([starts[i] for i in members], device=device)
    return SingleTokenGroup(rows, heads_BKL.flatten(), bias_BL[:, None, None, :])


def _chunk(
    batch: AttentionBatch,
    request: int,
    start: int,
    window: int | None,
    *,
    all_are_queries: bool,
) -> Chunk:
    device = batch.block_table.device
    query_len, end = batch.query_lens_list[request], batch.seq_lens_list[request]
    first_query = end - query_len
    begin = max(0, first_query - window + 1) if window else 0
    positions = torch.arange(begin, end, device=device)
    blocks = batch.block_table[request, positions // batch.block_size].to(torch.int64)
    slots = blocks * batch.block_size + positions % batch.block_size
    is_whole = begin == first_query
    mask = None
    if not is_whole or (window is not None and query_len > window):
        queries = torch.arange(first_query, end, device=device).unsqueeze(1)
        mask = positions <= queries
        if window is not None:
            mask &= positions > queries - window
    return Chunk(start, start + query_len, slots, mask, is_whole and all_are_queries)
