"""``standard``: temperature, top_k, top_p and min_p."""

from __future__ import annotations

from hotshoe.api import Component, PluginOptions, Sampler, SamplerContext, hookimpl


def build(options: PluginOptions, context: SamplerContext) -> Sampler:
    """The sampler; it has no options and keeps no state."""
    from hotshoe_samplers.standard.sampler import StandardSampler

    return StandardSampler()


@hookimpl
def hotshoe_component() -> Component:
    """Describe the sampler."""
    return Component(contract="sampler/0", factory=build, auto_priority=1)
