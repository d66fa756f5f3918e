"""What top_k, top_p and min_p keep of a row, given in descending order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotshoe.api import SampleInput

# R=rows, V=vocab_size, C=candidates per row


@dataclass(frozen=True, slots=True)
class Filters:
    """Parameters of some rows.

    Attributes:
        temperature: ``[R]`` float32, 1 where a row is greedy.
        top_k: ``[R]`` int64, V where it is off.
        top_p: ``[R]`` float64.
        min_p: ``[R]`` float32.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, inputs: SampleInput) -> Filters:
        """Parameters of all rows of a step."""
        vocab_size = inputs.logits.shape[1]
        is_off = (inputs.top_k <= 0) | (inputs.top_k > vocab_size)
        return cls(
            temperature=torch.where(inputs.temperature == 0, 1.0, inputs.temperature),
            top_k=torch.where(is_off, vocab_size, inputs.top_k),
            top_p=inputs.top_p.to(torch.float64),
            min_p=inputs.min_p,
        )

    def rows(self, where: Tensor | slice) -> Filters:
        """Parameters of some of the rows."""
        return Filters(
            self.temperature[where], self.top_k[where], self.top_p[where], self.min_p[where]
        )

    def are_set(self, vocab_size: int) -> Tensor:
        """``[R]`` bool: whether a row drops any token."""
        return (self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0)


def weights_of(logits: Tensor, temperature: Tensor, best: Tensor) -> Tensor:
    """Probabilities relative to the most probable token's, ``[R, C]`` float32.

    The best logit is taken off before the division: no temperature is too small.

    Args:
        logits: ``[R, C]`` float32; not modified.
        temperature: ``[R]`` float32, above 0.
        best: ``[R, 1]`` largest logit of each row.
    """
    return logits.sub(best).div_(temperature[:, None]).exp_()


def is_kept(weights: Tensor, filters: Filters, totals: Tensor) -> Tensor:
    """Which of the most probable tokens survive; the first one always does.

    Args:
        weights: ``[R, C]`` float32, descending.
        filters: of these rows.
        totals: ``[R]`` float64, sum of the weights of the whole row; only read where top_p is set
            and top_k is not reached within C.

    Returns:
        ``[R, C]`` bool, True up to some place in each row.
    """
    width = weights.shape[1]
    places = torch.arange(width, device=weights.device)
    cumulated = weights.to(torch.float64).cumsum(-1)
    last = (filters.top_k - 1).clamp(max=width - 1)
    of_top_k = cumulated.gather(1, last[:, None])[:, 0]
    total = torch.where(filters.top_k <= width, of_top_k, totals)
    limit = torch.where(filters.top_p < 1, filters.top_p * total, torch.inf)
    kept = (places < filters.top_k[:, None]) & (weights >= filters.min_p[:, None])
    return kept & (cumulated - weights < limit[:, None])
