"""Paged attention in Triton for NVIDIA GPUs: ragged batches of prompts, decoding and verification.

Rotation and the writing of the pages are one launch, which also plans on the device how the rest is
divided; so a recorded step (a CUDA graph) fits whatever lengths it's replayed on. Prompts are cut
into tiles of queries, contexts of requests that decode into parts of positions, which the last of
them combines. Grouped queries share a tile, so each key and value is read once for all of them.
Pages may be int8, with a scale for each token and KV head: half the memory, and a quarter of
float32's.
"""

from __future__ import annotations

from hotshoe.api import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    Component,
    hookimpl,
)
from hotshoe_attention.triton.options import TritonAttentionOptions
from hotshoe_triton.runtime import (
    devices,
    diagnose,
    dtypes,
    is_interpreting,
    prepare,
    reasons_against_packages,
    require_device,
)


def capabilities() -> AttentionCapabilities:
    """On this machine: the interpreter runs on the CPU, and no recording sees what it does."""
    return AttentionCapabilities(
        fused_rope=True,
        devices=devices(),
        dtypes=dtypes(),
        kv_dtypes=(*dtypes(), "int8"),
        is_recordable=not is_interpreting(),
        takes_padding=True,
    )


def build(options: TritonAttentionOptions, context: AttentionContext) -> AttentionBackend:
    """The backend; torch and triton are imported here, not with the module."""
    from hotshoe_attention.triton.backend import TritonAttentionBackend
    from hotshoe_attention.triton.tiles import gpu_of

    require_device(context.device)
    return TritonAttentionBackend(options, capabilities(), context, gpu_of(context.device))


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="attention/0",
        factory=build,
        options=TritonAttentionOptions,
        capabilities=capabilities(),
        unsupported=reasons_against_packages(),
        auto_priority=3,
        prepare=prepare,
        diagnose=diagnose,
    )
