"""Native attention for CPUs: packed pages, rotation fused in, AVX-512, AVX2 or neither."""

from __future__ import annotations

from hotshoe.api import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    Component,
    hookimpl,
)
from hotshoe_native.library import diagnose, load, prepare
from hotshoe_native.options import NativeOptions

CAPABILITIES = AttentionCapabilities(
    fused_rope=True,
    dtypes=("float32", "bfloat16"),
    kv_dtypes=("float32", "bfloat16", "int8"),
    is_recordable=True,
    is_batch_invariant=True,
    takes_fewer_queries=True,
)


def build(options: NativeOptions, context: AttentionContext) -> AttentionBackend:
    """The backend; torch is imported here, not with the module."""
    from hotshoe_attention.cpu.backend import CpuAttentionBackend

    return CpuAttentionBackend(
        CAPABILITIES, load(options.isa), context, num_threads=options.share_threads()
    )


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="attention/0",
        factory=build,
        options=NativeOptions,
        capabilities=CAPABILITIES,
        auto_priority=2,
        prepare=prepare,
        diagnose=diagnose,
    )
