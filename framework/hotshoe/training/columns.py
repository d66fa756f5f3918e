"""``ColumnSampler``: which tokens the loss of one batch looks at.

Most of a vocabulary is rare, and the logits of all of it for every token are most of what training
takes. Some rare tokens that stand for all of them do as well (Jean et al. 2015, arXiv:1412.2007).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FREQUENT_SHARE = 0.75


class ColumnSampler:
    """Draws columns of the draft vocabulary: always the frequent tokens and those of the batch, and
    others at random.

    Args:
        draft_vocab: ``[draft_vocab_size]`` ascending target ids.
        use: ``[vocab_size]``, how often each target id is used.
        num_columns: without those of the batch.
    """

    def __init__(self, draft_vocab: Tensor, use: Tensor, num_columns: int) -> None:
        by_use = use[draft_vocab].argsort(descending=True, stable=True)
        num_frequent = round(_FREQUENT_SHARE * num_columns)
        self._frequent, self._rare = by_use[:num_frequent], by_use[num_frequent:]
        self._num_drawn = min(num_columns - num_frequent, len(self._rare))
        self._draft_vocab = draft_vocab

    def draw(self, token_ids: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Draw.

        Args:
            token_ids: target ids that the batch is about; those that can't be drafted are ignored.
            seed: decides.

        Returns:
            ``[n]`` int64 columns, ascending, and ``[n]`` float32: 0, and of one that was drawn the
            logarithm of how many it stands for.
        """
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(self._rare), generator=generator)[: self._num_drawn]
        offsets = torch.full((len(self._draft_vocab),), -math.inf)
        if self._num_drawn:
            offsets[self._rare[drawn]] = math.log(len(self._rare) / self._num_drawn)
        offsets[self._frequent] = 0.0
        offsets[torch.isin(self._draft_vocab, token_ids)] = 0.0
        columns = offsets.isfinite().nonzero().flatten()
        return columns, offsets[columns]
