"""``cpu``: what ``standard`` draws, by a native kernel that sorts nothing."""

from __future__ import annotations

from hotshoe.api import (
    Component,
    Sampler,
    SamplerCapabilities,
    SamplerContext,
    hookimpl,
)
from hotshoe_native.library import diagnose, load, prepare
from hotshoe_native.options import NativeOptions

CAPABILITIES = SamplerCapabilities(devices=("cpu",), logits_dtypes=("float32", "bfloat16"))


def build(options: NativeOptions, context: SamplerContext) -> Sampler:
    """The sampler; torch is imported here, not with the module."""
    import torch

    from hotshoe_samplers.cpu.sampler import CpuSampler

    return CpuSampler(
        CAPABILITIES,
        load(options.isa),
        vocab_size=context.vocab_size,
        num_threads=options.num_threads or torch.get_num_threads(),
    )


@hookimpl
def hotshoe_component() -> Component:
    """Describe the sampler."""
    return Component(
        contract="sampler/0",
        factory=build,
        options=NativeOptions,
        capabilities=CAPABILITIES,
        auto_priority=2,
        prepare=prepare,
        diagnose=diagnose,
    )
