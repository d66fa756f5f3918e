"""Dense weights, and the biases of weights of any format."""

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
        write_rows(self._tensors, "bias" if is_bias else "weight", rows, tensor, self._spec)

    def finalize(self) -> Weight:
        self._checklist.require_all()
        return Weight(
            format="dense",
            out_features=self._spec.out_features,
            in_features=self._spec.in_features,
            tensors=self._tensors,
        )


def write_rows(
    tensors: dict[str, Tensor], name: str, rows: slice, tensor: CheckpointTensor, spec: LinearSpec
) -> None:
    """Put a checkpoint tensor's values into their rows of a dense tensor of a layer.

    Args:
        tensors: the layer's; the one of that name is allocated when its first rows come.
        name: ``weight`` or ``bias``.
        rows: where it belongs.
        tensor: ``[rows, ...]``.
        spec: of the layer.
    """
    values = tensor.to_dense(spec.dtype)
    if len(spec.parts) == 1:
        tensors[name] = values.to(spec.device)
        return
    if name not in tensors:
        shape = (spec.out_features, *values.shape[1:])
        tensors[name] = torch.empty(shape, dtype=spec.dtype, device=spec.device)
    tensors[name][rows].copy_(values)
