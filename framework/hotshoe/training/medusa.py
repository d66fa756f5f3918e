"""Medusa heads: a small block for each position ahead, all on the target's last state.

They draft in one pass and know nothing of each other's guesses (Cai et al. 2024, arXiv:2401.10774).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotshoe.training.batches import Batch
from hotshoe.training.heads import DraftHead
from hotshoe.training.target import Target

_MULTIPLE = 32
"""Of widths: what kernels and quantizations like."""


class _Block(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, width)
        self.proj = nn.Linear(width, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.proj(F.silu(self.linear(x)))
        return x + found


def head_widths(hidden_size: int, num_heads: int) -> tuple[int, ...]:
    """How wide each head is: a guess is of use only if those before it were right, so the first
    head gets most.
    """
    shares = (2, 1, 2 / 3, *[1 / 3] * num_heads)[:num_heads]
    return tuple(_MULTIPLE * math.ceil(share * hidden_size / _MULTIPLE) for share in shares)


class MedusaHeads(DraftHead):
    """Heads of one residual block each; of head i it is ``i.0.linear`` and ``i.0.proj``.

    Medusa's own blocks are as wide as the model and have no ``proj``. They leave the mixing of what
    they found to an output head of their own, which is the largest part of them; these share the
    target's.

    Args:
        hidden_size: the target's.
        widths: of the blocks, that of the head for the next position first.
    """

    def __init__(self, hidden_size: int, widths: Sequence[int]) -> None:
        super().__init__()
        for index, width in enumerate(widths):
            self.add_module(str(index), nn.Sequential(_Block(hidden_size, width)))
        self.num_heads = len(widths)

    @torch.no_grad()
    def start_from(self, target: Target, seed: int) -> None:
        """Start as heads that repeat the target's own guess."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("linear.weight"):
                nn.init.orthogonal_(parameter, generator=generator)
            else:
                parameter.zero_()

    def unroll(self, batch: Batch, embedding: Tensor, num_steps: int) -> list[Tensor]:
        example, position = batch.rows
        outputs = []
        for step in range(num_steps):
            head = self.get_submodule(str(step))
            states = batch.states[example, position - 2 - step]
            outputs.append(head(states.to(next(head.parameters()).dtype)))
        return outputs

    def checkpoint_config(self, target: Target, draft_vocab_size: int) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": 1,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "dtype": "bfloat16",
        }
