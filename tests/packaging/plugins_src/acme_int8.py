"""``acme_int8``: 8-bit integers with one scale a row, quantized part by part while loading."""

from __future__ import annotations

from typing import Any

from hotshoe.api import (
    CheckpointTensor,
    Component,
    LinearSpec,
    Quantization,
    QuantizationCapabilities,
    Weight,
    WeightBuilder,
    hookimpl,
)

LOADED: list[str] = []
"""Names of the checkpoint tensors that were read."""


class Int8Builder(WeightBuilder):
    def __init__(self, spec: LinearSpec) -> None:
        self._spec = spec
        self._parts: dict[str, tuple[Any, Any]] = {}
        self._biases: dict[str, Any] = {}

    def load(self, part: str, tensor: CheckpointTensor, *, is_bias: bool = False) -> None:
        LOADED.append(tensor.name)
        values = tensor.to_dense(self._spec.dtype)
        if is_bias:
            self._biases[part] = values
            return
        scale = values.abs().amax(-1).clamp(min=1e-12) / 127
        self._parts[part] = (values / scale[:, None]).round().char(), scale

    def finalize(self) -> Weight:
        import torch

        names = [name for name, _ in self._spec.parts]
        rows, scales = zip(*(self._parts[name] for name in names), strict=True)
        tensors = {"weight": torch.cat(rows), "scale": torch.cat(scales)}
        if self._biases:
            tensors["bias"] = torch.cat([self._biases[name] for name in names])
        return Weight(
            format="acme_int8",
            out_features=self._spec.out_features,
            in_features=self._spec.in_features,
            tensors=tensors,
        )


class Int8(Quantization):
    def builder(self, spec: LinearSpec) -> WeightBuilder:
        return Int8Builder(spec)


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="quantization/0",
        factory=lambda options, context: Int8(),
        capabilities=QuantizationCapabilities(
            weight_formats=("acme_int8",), embedding_formats=("acme_int8",)
        ),
    )
