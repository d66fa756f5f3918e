"""top_p and min_p on wide distributions, without sorting them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hotshoe_samplers.standard.filters import Filters, weights_of

# R=rows, V=vocab_size

_NUM_BUCKETS = 4096
_BUCKETS_PER_NAT = 128
_MAX_CHUNK_ELEMENTS = 1 << 19  # stays in cache


def chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows, each small enough for its temporaries to stay in cache."""
    size = max(_MAX_CHUNK_ELEMENTS // max(logits.shape[1], _NUM_BUCKETS), 1)
    for start in range(0, len(logits), size):
        yield slice(start, start + size)


def filtered_by_histogram(logits: Tensor, filters: Filters) -> Tensor:
    """Weights with 0 for every token that top_p or min_p drops; top_k must be off.

    Tokens are counted into buckets by their log probability. All buckets above the one in which
    the cumulated probability reaches top_p are kept; only that one is sorted.

    Args:
        logits: ``[R, V]`` float32; not modified.
        filters: of these rows.

    Returns:
        ``[R, V]`` float32.
    """
    best = logits.amax(-1, keepdim=True)
    weights = weights_of(logits, filters.temperature, best)
    depth = logits.sub(best).div_(filters.temperature[:, None]).mul_(-_BUCKETS_PER_NAT)
    bucket = depth.clamp_(max=_NUM_BUCKETS - 1).to(torch.int64)
    sums = weights.new_zeros((len(logits), _NUM_BUCKETS), dtype=torch.float64)
    cumulated = sums.scatter_add_(1, bucket, weights.to(torch.float64)).cumsum_(-1)
    limit = torch.where(filters.top_p < 1, filters.top_p * cumulated[:, -1], torch.inf)
    last = torch.searchsorted(cumulated, limit[:, None]).clamp_(max=_NUM_BUCKETS)
    before = cumulated.gather(1, (last - 1).clamp(min=0))[:, 0].where(last[:, 0] > 0, 0.0)
    is_dropped = (bucket > last) | (weights < filters.min_p[:, None])
    rows, ids = (bucket == last).nonzero(as_tuple=True)
    is_beyond = ~_is_within(logits[rows, ids], weights[rows, ids], rows, limit - before)
    is_dropped[rows[is_beyond], ids[is_beyond]] = True
    return weights.masked_fill_(is_dropped, 0.0)


def _is_within(logits: Tensor, weights: Tensor, rows: Tensor, limit: Tensor) -> Tensor:
    """Which members of the rows' last buckets come before the limit.

    Args:
        logits: ``[M]`` float32, row by row, ids ascending within a row.
        weights: ``[M]`` float32.
        rows: ``[M]`` int64, ascending.
        limit: ``[R]`` float64, probability that is left for the bucket.

    Returns:
        ``[M]`` bool.
    """
    order = logits.sort(dim=0, descending=True, stable=True).indices
    order = order[rows[order].sort(dim=0, stable=True).indices]
    ordered = weights[order].to(torch.float64)
    before = ordered.cumsum(0) - ordered
    num_members = torch.bincount(rows, minlength=len(limit))
    firsts = (num_members.cumsum(0) - num_members).clamp_(max=max(len(rows) - 1, 0))
    is_within = torch.empty_like(rows, dtype=torch.bool)
    is_within[order] = before - before[firsts[rows]] < limit[rows]
    return is_within
