"""Muon: momentum whose direction is made orthogonal, for the matrices of a small network.

A head learns more from each token with it than with Adam, which matters where the tokens are made
by a CPU (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial that drives singular values towards 1: the authors'."""
_NUM_ITERATIONS = 5
_RMS_OF_ADAM = 0.2
"""Size of an update of Adam's, so that learning rates mean the same (Liu et al. 2025,
arXiv:2502.16982)."""

Map = Callable[..., Iterator[None]]


class Muon(torch.optim.Optimizer):
    """Every parameter is a matrix.

    Args:
        parameters: the matrices.
        learning_rate: about what Adam would take.
        momentum: Nesterov's.
        weight_decay: decoupled.

    Attributes:
        run_all: runs the updates, which are independent: ``map``, or that of a pool of threads.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        learning_rate: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)
        self.run_all: Map = map

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        """Update every matrix that has a gradient."""
        updates = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        # the largest first, so that no thread is left with one at the end
        updates.sort(key=lambda update: -update[0].numel())
        for _ in self.run_all(self._update, *zip(*updates, strict=True)):
            pass

    @torch.no_grad()
    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(gradient, 1 - group["momentum"])
        direction = orthogonal(gradient.lerp(momentum, group["momentum"]))
        scale = _RMS_OF_ADAM * max(parameter.shape) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(direction.to(parameter.dtype), alpha=group["lr"] * scale)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix with orthonormal rows or columns, bfloat16; by Newton-Schulz."""
    first, third, fifth = _COEFFICIENTS
    x = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(_NUM_ITERATIONS):
        square = x @ x.T
        x = first * x + (third * square + fifth * square @ square) @ x
    orthonormal: Tensor = x.T if is_tall else x
    return orthonormal
