"""No quantization: every weight becomes one dense tensor in the model's dtype."""

from __future__ import annotations

from hotshoe.api import (
    Component,
    LinearSpec,
    PluginOptions,
    Quantization,
    QuantizationCapabilities,
    QuantizationContext,
    WeightBuilder,
    hookimpl,
)

CAPABILITIES = QuantizationCapabilities(weight_formats=("dense",))


class NoQuantization(Quantization):
    """Dense weights in the model's dtype."""

    def builder(self, spec: LinearSpec) -> WeightBuilder:
        from hotshoe_quantization.dense import DenseBuilder

        return DenseBuilder(spec)


def build(options: PluginOptions, context: QuantizationContext) -> Quantization:
    """The method; it needs no facts about the machine."""
    return NoQuantization()


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="quantization/0", factory=build, capabilities=CAPABILITIES, auto_priority=1
    )
