"""The blocks of a GGUF file as they are stored: no second quantization, no more memory than the
file.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hotshoe.api import (
    Component,
    ConfigError,
    PluginOptions,
    Quantization,
    QuantizationCapabilities,
    QuantizationContext,
    hookimpl,
)

FORMATS = ("dense", "q4_0", "q4_1", "q8_0")
CAPABILITIES = QuantizationCapabilities(weight_formats=FORMATS, embedding_formats=FORMATS)


class GGUFOptions(PluginOptions):
    """What becomes of blocks that no kernel executes."""

    other_blocks: Literal["q8_0", "dense"] = Field(
        default="q8_0",
        description="What q5 and K-quant blocks become: 8-bit blocks, or dense in the model dtype.",
    )


def build(options: GGUFOptions, context: QuantizationContext) -> Quantization:
    """The method; torch is imported here, not with the module."""
    if context.checkpoint_format != "gguf":
        found = context.checkpoint_format
        stored = "its weights are drawn" if found == "random" else f"the model is stored as {found}"
        raise ConfigError(
            f"quantization.name 'gguf' keeps the blocks of a GGUF file, but {stored}; set "
            "quantization to 'int8' or 'none'"
        )
    from hotshoe_quantization.gguf.quantization import GGUFQuantization

    return GGUFQuantization(other_blocks=options.other_blocks)


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="quantization/0", factory=build, options=GGUFOptions, capabilities=CAPABILITIES
    )
