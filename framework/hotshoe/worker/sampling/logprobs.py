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
    """Score given tokens under the model, and wait for the outcome.

    Args:
        logits: ``[n, V]``, any float type; not modified.
        target_ids: ``[n]``, the token that follows each position.
        num_top: most likely tokens to report besides it; -1 = all.

    Returns:
        One entry per position.

    Raises:
        ShapeError: if there aren't as many targets as rows.
    """
    targets = torch.tensor(target_ids, dtype=torch.int64, device=logits.device)
    scores = score_prompt(logits, targets, num_top)
    return scores.entries(scores.tensors)


def score_prompt(logits: Tensor, target_ids: Tensor, num_top: int) -> Scores:
    """Score given tokens under the model.

    Args:
        logits: ``[n, V]``, any float type; not modified.
        target_ids: ``[n]`` int64 on the device, the token that follows each position.
        num_top: most likely tokens to report besides it; -1 = all.

    Raises:
        ShapeError: if there aren't as many targets as rows.
    """
    if logits.shape[0] != len(target_ids):
        raise ShapeError(f"{logits.shape[0]} rows of logits but {len(target_ids)} target tokens")
    size = max(_MAX_CHUNK_ELEMENTS // logits.shape[1], 1)
    pieces = []
    for start in range(0, max(len(target_ids), 1), size):
        logprobs = logits[start : start + size].float().log_softmax(-1)
        chunk = target_ids[start : start + size]
        pieces.append(score(logprobs, chunk, [num_top] * len(chunk)).tensors)
    tensors = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    return Scores(tensors, [num_top] * len(target_ids))


def score(logprobs: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> Scores:
    """Score the tokens at some positions and find the most likely ones beside them.

    Args:
        logprobs: ``[n, V]`` float32.
        token_ids: ``[n]`` int64, the token that stands at each position.
        num_top: ``[n]``, how many of the most likely to report; -1 = all.
    """
    vocab_size = logprobs.shape[1]
    width = max((vocab_size if num < 0 else min(num, vocab_size) for num in num_top), default=0)
    values = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > values).sum(-1) + 1
    return Scores([token_ids, values[:, 0], ranks, *_most_likely(logprobs, width)], num_top)


class Scores:
    """Log probabilities of tokens that may still be on their way from the device.

    Attributes:
        tensors: what has to be copied to the host.
    """

    def __init__(self, tensors: Sequence[Tensor], num_top: Sequence[int]) -> None:
        self.tensors = tensors
        self._num_top = num_top

    def entries(
        self, tensors: Sequence[Tensor], kept: Sequence[int] | None = None
    ) -> list[PositionLogprobs]:
        """What is reported of each position; the most likely tokens come first, equal ones by id.

        Args:
            tensors: those of this object, on the host.
            kept: positions to report, if not all.
        """
        if kept is None:
            kept = range(len(self._num_top))
        else:
            where = torch.tensor(kept, dtype=torch.int64)
            tensors = [tensor[where] for tensor in tensors]
        lists = [tensor.tolist() for tensor in tensors]
        return [
            PositionLogprobs(
                TokenLogprob(token_id, value, rank), _ranked(row_ids, row_values, self._num_top[at])
            )
            for at, token_id, value, rank, row_values, row_ids in zip(kept, *lists, strict=True)
        ]


def _most_likely(logprobs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """``[n, width]`` largest values, in descending order, and their ids."""
    if width == 0:
        return logprobs[:, :0], torch.empty_like(logprobs[:, :0], dtype=torch.int64)
    ids = _largest(logprobs, width).sort(-1).values
    values, order = logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


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


def _ranked(token_ids: Sequence[int], values: Sequence[float], num_top: int) -> list[TokenLogprob]:
    """The first so many, with their ranks; -1 = all."""
    ranked: list[TokenLogprob] = []
    rank, last = 0, None
    num_ranked = len(token_ids) if num_top < 0 else num_top
    for place, (token_id, value) in enumerate(zip(token_ids, values, strict=True), start=1):
        if place > num_ranked:
            break
        if value != last:
            rank, last = place, value
        ranked.append(TokenLogprob(token_id, value, rank))
    return ranked
