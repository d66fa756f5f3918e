"""Log probabilities of chosen and most likely tokens, from the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hotshoe.api.types import PositionLogprobs, TokenLogprob
from hotshoe.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 64  # tokens of which the search for the most likely ones looks at the best first
_MAX_CHUNK_ELEMENTS = 1 << 25  # a long prompt's float32 copies are made piece by piece


def prompt_logprobs(
    logits: Tensor, target_ids: Sequence[int], num_top: int
) -> list[PositionLogprobs]:
    """Score given tokens under the model.

    Args:
        logits: ``[n, V]``, any float type; not modified.
        target_ids: ``[n]``, the token that follows each position.
        num_top: most likely tokens to report besides it; -1 = all.

    Returns:
        One entry per position.

    Raises:
        ShapeError: if there aren't as many targets as rows.
    """
    if logits.shape[0] != len(target_ids):
        raise ShapeError(f"{logits.shape[0]} rows of logits but {len(target_ids)} target tokens")
    size = max(_MAX_CHUNK_ELEMENTS // logits.shape[1], 1)
    found = []
    for start in range(0, len(target_ids), size):
        logprobs = logits[start : start + size].float().log_softmax(-1)
        chunk = target_ids[start : start + size]
        found.extend(describe(logprobs, chunk, [num_top] * len(chunk)))
    return found


def describe(
    logprobs: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[PositionLogprobs]:
    """Report the tokens at some positions and the most likely ones beside them.

    Args:
        logprobs: ``[n, V]`` float32.
        token_ids: ``[n]``, the token that stands at each position.
        num_top: ``[n]``, how many of the most likely to report; -1 = all.

    Returns:
        One entry per position; the most likely tokens come first, equal ones by id.
    """
    vocab_size = logprobs.shape[1]
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logprobs.device)[:, None]
    values = logprobs.gather(1, chosen)
    ranks = ((logprobs > values).sum(-1) + 1).tolist()
    widths = [vocab_size if num < 0 else min(num, vocab_size) for num in num_top]
    top_values, top_ids = _most_likely(logprobs, max(widths, default=0))
    return [
        PositionLogprobs(
            TokenLogprob(token_id, value, rank), _ranked(row_ids[:width], row_values[:width])
        )
        for token_id, value, rank, row_ids, row_values, width in zip(
            token_ids, values[:, 0].tolist(), ranks, top_ids, top_values, widths, strict=True
        )
    ]


def _most_likely(logprobs: Tensor, width: int) -> tuple[list[list[float]], list[list[int]]]:
    if width == 0:
        return [[]] * len(logprobs), [[]] * len(logprobs)
    ids = _largest(logprobs, width).sort(-1).values
    values, order = logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values.tolist(), ids.gather(1, order).tolist()


def _largest(values: Tensor, width: int) -> Tensor:
    """``[n, width]`` ids of the largest values, in any order.

    They lie in as many blocks, those with the largest maxima; a maximum is much cheaper than a
    place among all.
    """
    num_rows, vocab_size = values.shape
    if vocab_size % _BLOCK or width * _BLOCK > vocab_size // 4:
        return values.topk(width, sorted=False).indices
    maxima = values.view(num_rows, -1, _BLOCK).amax(-1)
    starts = maxima.topk(width, sorted=False).indices * _BLOCK
    places = starts[:, :, None] + torch.arange(_BLOCK, device=values.device)
    places = places.view(num_rows, -1)
    return places.gather(1, values.gather(1, places).topk(width, sorted=False).indices)


def _ranked(token_ids: Sequence[int], values: Sequence[float]) -> list[TokenLogprob]:
    ranked = []
    rank, last = 0, None
    for place, (token_id, value) in enumerate(zip(token_ids, values, strict=True), start=1):
        if value != last:
            rank, last = place, value
        ranked.append(TokenLogprob(token_id, value, rank))
    return ranked
