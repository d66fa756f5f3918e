"""``cpu``: what ``standard`` draws, by a native kernel that sorts nothing."""

from __future__ import annotations

from pydantic import Field

from hotshoe.api import (
    Component,
    PluginOptions,
    Sampler,
    SamplerCapabilities,
    SamplerContext,
    hookimpl,
)
from hotshoe_native.isa import Isa
from hotshoe_native.library import diagnose, load, prepare

CAPABILITIES = SamplerCapabilities(devices=("cpu",), logits_dtypes=("float32", "bfloat16"))


class CpuSamplerOptions(PluginOptions):
    """Threads and instructions."""

    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads that share the rows of a step; 1, or as many as the other components "
        "use, or threads come and go at every step. By default as many as torch uses.",
    )
    isa: Isa = Field(
        default="auto", description="Instruction set; auto is the widest that the CPU has."
    )


def build(options: CpuSamplerOptions, context: SamplerContext) -> Sampler:
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
        options=CpuSamplerOptions,
        capabilities=CAPABILITIES,
        auto_priority=2,
        prepare=prepare,
        diagnose=diagnose,
    )
