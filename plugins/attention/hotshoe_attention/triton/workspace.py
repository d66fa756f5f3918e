"""Memory that the launches of a layer share; layers and steps use it one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from hotshoe_attention.triton.shapes import LayerShape


class Workspace:
    """Grows to what the largest shape takes; what was handed out before stays alive, since a
    recorded step uses it again.
    """

    def __init__(self) -> None:
        self._tensors: dict[torch.dtype, Tensor] = {}
        self._outgrown: list[Tensor] = []

    def of(self, shape: LayerShape, num_tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For a step's plan with so many tiles, int32, and what parts leave, float32."""
        plan = self._at_least(shape.plan.tiles_at + num_tiles, torch.int32, device)
        return plan, self._at_least(shape.num_partials, torch.float32, device)

    def _at_least(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        known = self._tensors.get(dtype)
        if known is None or known.shape[0] < size:
            if known is not None:
                self._outgrown.append(known)
            known = self._tensors[dtype] = torch.empty(size, dtype=dtype, device=device)
        return known
