"""Cross entropy of a head's guesses against the target's distribution over the draft vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 256
"""Rows whose logits exist at a time: they stay in the cache of the CPU."""


class _SoftTargetLoss(torch.autograd.Function):
    """Loss and gradient in one pass: the logits of all rows never exist at once. The head is
    frozen, so the gradient with respect to its input is all that is needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,
        offsets: Tensor | None,
        targets: Tensor,
        sharpness: float,
        weights: Sequence[float],
        *outputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        losses = torch.zeros(len(outputs))
        gradients = [torch.empty_like(output) for output in outputs]
        for start in range(0, len(targets), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            wanted = _logits(targets[chunk], head, offsets).mul_(sharpness).softmax(-1)
            for step, output in enumerate(outputs):
                guessed = _logits(output[chunk], head, offsets).log_softmax(-1)
                losses[step] -= torch.dot(wanted.view(-1), guessed.view(-1))
                slope = guessed.exp_().sub_(wanted).mul_(weights[step])
                gradients[step][chunk] = slope.to(head.dtype) @ head
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(losses)
        return torch.dot(losses, torch.tensor(weights)), losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
        return None, None, None, None, None, *(upstream.to(g.dtype) * g for g in ctx.saved_tensors)


def _logits(states: Tensor, head: Tensor, offsets: Tensor | None) -> Tensor:
    logits = F.linear(states, head).float()
    return logits if offsets is None else logits.add_(offsets)


def soft_target_loss(
    outputs: Sequence[Tensor],
    targets: Tensor,
    head: Tensor,
    *,
    weights: Sequence[float],
    sharpness: float = 1.0,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy, summed over rows, weighted over draft steps.

    Args:
        outputs: per draft step ``[N, H]``, what the head's logits are computed from.
        targets: ``[N, H]``, what the target's logits are computed from.
        head: ``[num_columns, H]``, frozen.
        weights: per draft step.
        sharpness: factor of the target's logits; above 1 its first choice counts for more.
        offsets: ``[num_columns]`` float32 for all logits: of a column that stands for several, the
            logarithm of how many.

    Returns:
        The weighted sum, and ``[num_steps]`` the sums of each step, without gradient.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _SoftTargetLoss.apply
    return apply(head, offsets, targets, sharpness, tuple(weights), *outputs)
