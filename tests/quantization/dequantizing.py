"""What quantized weights stand for: a reference that multiplies with the dequantized values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hotshoe.api import (
    Component,
    KernelsCapabilities,
    KernelsContext,
    PluginOptions,
    QuantizationContext,
    Weight,
    WeightBuilder,
)
from hotshoe.api.quantization import LinearSpec, Quantization
from hotshoe.weights.gguf_blocks import dequantize
from hotshoe_kernels.torch.kernels import TorchKernels

CPU = torch.device("cpu")
FORMATS = ("dense", "int8", "q4_0", "q4_1", "q8_0")


class BlocksTensor:
    """A checkpoint tensor in a block format that is already in memory."""

    def __init__(self, name: str, block_format: str, blocks: Tensor) -> None:
        self.name = name
        self.format = block_format
        self.blocks = blocks
        self.shape = tuple(dequantize(blocks, block_format, torch.float32).shape)

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        return dequantize(self.blocks, self.format, dtype)

    def raw(self) -> Tensor:
        return self.blocks.clone()


def values_of(weight: Weight) -> Tensor:
    """``[N, K]`` float32."""
    if weight.parts:
        return torch.cat([values_of(part) for part in weight.parts])
    tensors = weight.tensors
    if weight.format == "dense":
        values = tensors["weight"].float()
    elif weight.format == "int8":
        values = tensors["weight"].float() * tensors["scales"][:, None]
    else:
        values = dequantize(tensors["blocks"], weight.format, torch.float32)
    assert values.shape == (weight.out_features, weight.in_features)
    return values


class DequantizingKernels(TorchKernels):
    """Every format, by way of dense float32."""

    def prepare_weight(self, weight: Weight) -> Weight:
        bias = {name: one for name, one in weight.tensors.items() if name == "bias"}
        tensors = {"weight": values_of(weight), **bias}
        return replace(weight, format="dense", tensors=tensors, parts=())


def dequantizing_kernels() -> Component:
    """For models in float32."""
    capabilities = KernelsCapabilities(weight_formats=FORMATS, embedding_formats=FORMATS)

    def build(options: PluginOptions, context: KernelsContext) -> DequantizingKernels:
        return DequantizingKernels(capabilities)

    return Component(contract="kernels/0", factory=build, capabilities=capabilities)


def build_quantization(
    component: Component, *, checkpoint_format: str = "safetensors", **options: object
) -> Quantization:
    """A method with options."""
    context = QuantizationContext(
        device=CPU, dtype=torch.float32, checkpoint_format=checkpoint_format
    )
    built = component.factory(component.options(**options), context)
    assert isinstance(built, Quantization)
    return built


def start(
    quantization: Quantization,
    in_features: int,
    *,
    name: str = "block.proj",
    parts: tuple[tuple[str, int], ...] = (("weight", 6),),
    has_bias: bool = False,
    is_embedding: bool = False,
    is_head: bool = False,
) -> WeightBuilder:
    """The builder of a float32 layer."""
    return quantization.builder(
        LinearSpec(
            name=name,
            in_features=in_features,
            parts=parts,
            has_bias=has_bias,
            dtype=torch.float32,
            device=CPU,
            is_embedding=is_embedding,
            is_head=is_head,
        )
    )
