"""``DraftHead``: what the training loop, the measurement and the checkpoint know about a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotshoe.training.batches import Batch
from hotshoe.training.features import Example
from hotshoe.training.target import Target


class DraftHead(nn.Module, ABC):
    """A small network that guesses the tokens after the next one from the target's hidden states.

    Its parameters have the names of its checkpoint layout.
    """

    @abstractmethod
    def start_from(self, target: Target, seed: int) -> None:
        """Set the weights that training starts from."""

    @abstractmethod
    def unroll(self, batch: Batch, embedding: Tensor, num_steps: int) -> list[Tensor]:
        """Draft from every position at once, as greedy decoding would whose drafts are all kept.

        Args:
            embedding: ``[vocab_size, H]``, the target's.
            num_steps: tokens to draft.

        Returns:
            Per step ``[N, H]``: what the logits of the tokens at ``batch.rows`` follow from. Step j
            has guessed them from the states up to j + 2 positions before.
        """

    @abstractmethod
    def checkpoint_config(self, target: Target, draft_vocab_size: int) -> dict[str, Any]:
        """The ``config.json`` of its checkpoint."""

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def count_use(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """How often answers use each token, ``[vocab_size]`` int64."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for one in examples:
        counts += torch.bincount(one.token_ids[one.is_answer], minlength=vocab_size)
    return counts


def choose_draft_vocab(use: Tensor, draft_vocab_size: int) -> Tensor:
    """The tokens that are used most, as ascending ids, ``[draft_vocab_size]`` int64."""
    by_use = use.argsort(descending=True, stable=True)
    return by_use[:draft_vocab_size].sort().values


def vocab_tensors(draft_vocab: Tensor, vocab_size: int) -> Mapping[str, Tensor]:
    """``d2t`` and ``t2d`` of a checkpoint: the way from draft ids to target ids, and which target
    ids a draft can be.
    """
    can_be_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    can_be_drafted[draft_vocab] = True
    return {"d2t": draft_vocab - torch.arange(len(draft_vocab)), "t2d": can_be_drafted}
