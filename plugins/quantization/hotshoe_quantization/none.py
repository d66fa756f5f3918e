"""No quantization: every weight becomes one dense tensor in the model's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotshoe.api import (
    CheckpointTensor,
    Component,
    LinearSpec,
    ModelLoadError,
    PluginOptions,
    Quantization,
    QuantizationCapabilities,
    QuantizationContext,
    Weight,
    WeightBuilder,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import Tensor

CAPABILITIES = QuantizationCapabilities(weight_formats=("dense",))


class DenseBuilder(WeightBuilder):
    """Writes each part into its rows of one tensor as it comes, so that a merged projection never
    exists twice.
    """

    def __init__(self, spec: LinearSpec) -> None:
        self._spec = spec
        self._rows: dict[str, slice] = {}
        start = 0
        for part, num_rows in spec.parts:
            self._rows[part] = slice(start, start + num_rows)
            start += num_rows
        self._tensors: dict[str, Tensor] = {}
        kinds = ("weight", "bias") if spec.has_bias else ("weight",)
        self._missing = {(kind, part) for kind in kinds for part in self._rows}

    def load(self, part: str, tensor: CheckpointTensor, *, is_bias: bool = False) -> None:
        kind = "bias" if is_bias else "weight"
        self._check(kind, part, tensor)
        values = tensor.to_dense(self._spec.dtype)
        if len(self._rows) == 1:
            self._tensors[kind] = values.to(self._spec.device)
        else:
            if kind not in self._tensors:
                self._tensors[kind] = self._allocate(kind)
            self._tensors[kind][self._rows[part]].copy_(values)
        self._missing.discard((kind, part))

    def finalize(self) -> Weight:
        if self._missing:
            lacking = ", ".join(f"{kind} of {part!r}" for kind, part in sorted(self._missing))
            raise ModelLoadError(
                f"{self._spec.name!r} is incomplete: the checkpoint has no {lacking}"
            )
        return Weight(
            format="dense",
            out_features=self._spec.out_features,
            in_features=self._spec.in_features,
            tensors=self._tensors,
        )

    def _check(self, kind: str, part: str, tensor: CheckpointTensor) -> None:
        name = self._spec.name
        if part not in self._rows:
            raise ModelLoadError(
                f"{name!r} has no part {part!r} for tensor {tensor.name!r}; parts: "
                f"{list(self._rows)}"
            )
        if kind == "bias" and not self._spec.has_bias:
            raise ModelLoadError(f"tensor {tensor.name!r}: {name!r} was declared without a bias")
        if (kind, part) not in self._missing:
            raise ModelLoadError(
                f"tensor {tensor.name!r}: {kind} of {part!r} in {name!r} came twice"
            )
        rows = self._rows[part]
        expected = self._shape(kind, rows.stop - rows.start)
        if tuple(tensor.shape) != expected:
            raise ModelLoadError(
                f"tensor {tensor.name!r} has shape {tuple(tensor.shape)}, but {part!r} of {name!r} "
                f"needs {expected}"
            )

    def _allocate(self, kind: str) -> Tensor:
        import torch

        shape = self._shape(kind, self._spec.out_features)
        return torch.empty(shape, dtype=self._spec.dtype, device=self._spec.device)

    def _shape(self, kind: str, num_rows: int) -> tuple[int, ...]:
        return (num_rows,) if kind == "bias" else (num_rows, self._spec.in_features)


class NoQuantization(Quantization):
    """Dense weights in the model's dtype."""

    def builder(self, spec: LinearSpec) -> WeightBuilder:
        return DenseBuilder(spec)


def build(options: PluginOptions, context: QuantizationContext) -> Quantization:
    """The method; it needs no facts about the machine."""
    return NoQuantization()


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="quantization/0", factory=build, capabilities=CAPABILITIES, auto_priority=1
    )
