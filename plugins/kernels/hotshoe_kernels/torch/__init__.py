"""Kernels from plain torch ops: the portable choice, and what the others are compared with."""

from __future__ import annotations

from hotshoe.api import (
    Component,
    Kernels,
    KernelsCapabilities,
    KernelsContext,
    PluginOptions,
    hookimpl,
)

CAPABILITIES = KernelsCapabilities(weight_formats=("dense",), devices=("cpu", "cuda"))


def build(options: PluginOptions, context: KernelsContext) -> Kernels:
    """The kernels; torch is imported here, not with the module."""
    from hotshoe_kernels.torch.kernels import TorchKernels

    return TorchKernels(CAPABILITIES)


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="kernels/0", factory=build, capabilities=CAPABILITIES, auto_priority=1
    )
