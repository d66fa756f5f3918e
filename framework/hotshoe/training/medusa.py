"""Medusa heads: a few small blocks for each position ahead, all on the target's last state.

They draft in one pass and know nothing of each other's guesses (Cai et al. 2024, arXiv:2401.10774).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotshoe.training.batches import Batch
from hotshoe.training.heads import DraftHead
from hotshoe.training.target import Target


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(DraftHead):
    """Heads of residual blocks; ``{i}.{b}.linear`` are the parameters of block b of head i.

    Args:
        hidden_size: the target's.
        num_heads: positions ahead.
        num_blocks: of each head.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_blocks: int) -> None:
        super().__init__()
        for index in range(num_heads):
            blocks = [_Block(hidden_size) for _ in range(num_blocks)]
            self.add_module(str(index), nn.Sequential(*blocks))
        self.num_heads = num_heads
        self.num_blocks = num_blocks

    @torch.no_grad()
    def start_from(self, target: Target, seed: int) -> None:
        """Start as heads that repeat the target's own guess."""
        for parameter in self.parameters():
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
            "medusa_num_layers": self.num_blocks,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "dtype": "bfloat16",
        }
