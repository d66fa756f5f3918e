"""8-bit weights, quantized while they are loaded: half the memory of bfloat16, any checkpoint."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hotshoe.api import (
    Component,
    PluginOptions,
    Quantization,
    QuantizationCapabilities,
    QuantizationContext,
    hookimpl,
)

CAPABILITIES = QuantizationCapabilities(
    weight_formats=("dense", "int8", "q8_0"), embedding_formats=("dense", "q8_0")
)


class Int8Options(PluginOptions):
    """How fine, and what stays as it is."""

    scales: Literal["group", "row"] = Field(
        default="group",
        description="One scale for 32 weights, or for a row: 6% smaller, a little faster, less "
        "exact. Embedding and head have groups always.",
    )
    keep_dense: tuple[str, ...] = Field(
        default=(),
        description="Names of layers that stay dense, * for any characters: lm_head, *.down_proj.",
    )


def build(options: Int8Options, context: QuantizationContext) -> Quantization:
    """The method; torch is imported here, not with the module."""
    from hotshoe_quantization.int8.quantization import Int8Quantization

    return Int8Quantization(scales=options.scales, keep_dense=options.keep_dense)


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="quantization/0", factory=build, options=Int8Options, capabilities=CAPABILITIES
    )
