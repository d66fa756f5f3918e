"""``triton``: what ``standard`` draws, by one kernel that sorts nothing, for NVIDIA GPUs."""

from __future__ import annotations

from hotshoe.api import (
    Component,
    PluginOptions,
    Sampler,
    SamplerCapabilities,
    SamplerContext,
    hookimpl,
)
from hotshoe_triton.runtime import (
    devices,
    diagnose,
    dtypes,
    is_interpreting,
    prepare,
    reasons_against_packages,
    require_device,
)


def capabilities() -> SamplerCapabilities:
    """What the sampler can do, compiled or interpreted."""
    return SamplerCapabilities(devices=devices(), logits_dtypes=dtypes())


def build(options: PluginOptions, context: SamplerContext) -> Sampler:
    """The sampler; torch and triton are imported here, not with the module."""
    require_device(context.device)
    from hotshoe_samplers.triton.sampler import TritonSampler

    sampler = TritonSampler(capabilities())
    if not is_interpreting():
        sampler.compile(context.device, context.vocab_size)
    return sampler


@hookimpl
def hotshoe_component() -> Component:
    """Describe the sampler."""
    return Component(
        contract="sampler/0",
        factory=build,
        capabilities=capabilities(),
        unsupported=reasons_against_packages(),
        auto_priority=3,
        prepare=prepare,
        diagnose=diagnose,
    )
