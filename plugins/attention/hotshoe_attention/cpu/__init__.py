"""Native attention for CPUs: packed pages, rotation fused in, AVX-512, AVX2 or neither."""

from __future__ import annotations

from pydantic import Field

from hotshoe.api import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    Component,
    PluginOptions,
    hookimpl,
)
from hotshoe_native.isa import Isa
from hotshoe_native.library import diagnose, load, prepare

CAPABILITIES = AttentionCapabilities(
    fused_rope=True,
    dtypes=("float32", "bfloat16"),
    kv_dtypes=("float32", "bfloat16"),
    is_recordable=True,
    is_batch_invariant=True,
)


class CpuAttentionOptions(PluginOptions):
    """Threads and instructions."""

    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads that share a call; torch uses as many then. By default as many as "
        "torch uses.",
    )
    isa: Isa = Field(
        default="auto", description="Instruction set; auto is the widest that the CPU has."
    )


def build(options: CpuAttentionOptions, context: AttentionContext) -> AttentionBackend:
    """The backend; torch is imported here, not with the module."""
    import torch

    from hotshoe_attention.cpu.backend import CpuAttentionBackend

    if options.num_threads is not None:
        # both run on the threads of one runtime, which keeps a team of one size
        torch.set_num_threads(options.num_threads)
    return CpuAttentionBackend(
        CAPABILITIES, load(options.isa), context, num_threads=torch.get_num_threads()
    )


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="attention/0",
        factory=build,
        options=CpuAttentionOptions,
        capabilities=CAPABILITIES,
        auto_priority=2,
        prepare=prepare,
        diagnose=diagnose,
    )
