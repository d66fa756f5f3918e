"""Kernels in Triton for NVIDIA GPUs: fused small ops, quantized weights, CUDA graphs."""

from __future__ import annotations

from hotshoe.api import (
    Component,
    Kernels,
    KernelsCapabilities,
    KernelsContext,
    hookimpl,
)
from hotshoe_kernels.triton.options import TritonKernelsOptions
from hotshoe_triton.runtime import (
    devices,
    diagnose,
    dtypes,
    prepare,
    reasons_against_packages,
    require_device,
)

FORMATS = ("dense", "int8", "q8_0", "q4_0", "q4_1")


def capabilities() -> KernelsCapabilities:
    """What the kernels can do, compiled or interpreted.

    Which way a product is computed, and so its last bits, depends on the number of rows.
    """
    return KernelsCapabilities(
        weight_formats=FORMATS,
        embedding_formats=FORMATS,
        devices=devices(),
        dtypes=dtypes(),
        is_batch_invariant=False,
        recording="buckets",
    )


def build(options: TritonKernelsOptions, context: KernelsContext) -> Kernels:
    """The kernels; torch and triton are imported here, not with the module."""
    require_device(context.device)
    from hotshoe_kernels.triton.kernels import build_kernels

    return build_kernels(options, capabilities(), context)


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="kernels/0",
        factory=build,
        options=TritonKernelsOptions,
        capabilities=capabilities(),
        unsupported=reasons_against_packages(),
        auto_priority=3,
        prepare=prepare,
        diagnose=diagnose,
    )
