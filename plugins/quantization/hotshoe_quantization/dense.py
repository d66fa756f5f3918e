"""Dense weights, and how the parts of a merged projection come together."""

from __future__ import annotations

import torch
from torch import Tensor

from hotshoe.api import CheckpointTensor, LinearSpec, Weight, WeightBuilder
from hotshoe_quantization.parts import PartChecklist


class DenseBuilder(WeightBuilder):
    """Writes each part into its rows of one tensor as it comes, so that a merged projection never
    exists twice.
    """

    def __init__(self, spec: LinearSpec) -> None:
        self._spec = spec
        self._checklist = PartChecklist(spec)
        self._tensors: dict[str, Tensor] = {}

    def load(self, part: str, tensor: CheckpointTensor, *, is_bias: bool = False) -> None:
        rows = self._checklist.accept(part, tensor, is_bias=is_bias)
        values = tensor.to_dense(self._spec.dtype)
        fill_rows(self._tensors, "bias" if is_bias else "weight", rows, values, self._spec)

    def finalize(self) -> Weight:
        self._checklist.require_all()
        return Weight(
            format="dense",
            out_features=self._spec.out_features,
            in_features=self._spec.in_features,
            tensors=self._tensors,
        )


def fill_rows(
    tensors: dict[str, Tensor], name: str, rows: slice, values: Tensor, spec: LinearSpec
) -> None:
    """Put a part's values into their rows of a layer's tensor.

    Args:
        tensors: the layer's; the one of that name is allocated when its first rows come.
        name: such as ``weight``.
        rows: where the values belong.
        values: ``[rows, ...]``; kept if the layer has this part alone.
        spec: of the layer.
    """
    if len(spec.parts) == 1:
        tensors[name] = values.to(spec.device)
        return
    if name not in tensors:
        shape = (spec.out_features, *values.shape[1:])
        tensors[name] = torch.empty(shape, dtype=values.dtype, device=spec.device)
    tensors[name][rows].copy_(values)
