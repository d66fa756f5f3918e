"""Paged attention from plain torch ops: the reference that other backends are compared with."""

from __future__ import annotations

from hotshoe.api import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    Component,
    PluginOptions,
    hookimpl,
)

CAPABILITIES = AttentionCapabilities(devices=("cpu", "cuda"), takes_fewer_queries=True)


def build(options: PluginOptions, context: AttentionContext) -> AttentionBackend:
    """The backend; torch is imported here, not with the module."""
    from hotshoe_attention.torch_sdpa.backend import TorchSdpaBackend

    return TorchSdpaBackend(CAPABILITIES, context)


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="attention/0", factory=build, capabilities=CAPABILITIES, auto_priority=1
    )
