"""Native kernels for CPUs: C++, compiled at first use, with AVX-512, AVX2 or neither."""

from __future__ import annotations

from hotshoe.api import (
    Component,
    Kernels,
    KernelsCapabilities,
    KernelsContext,
    hookimpl,
)
from hotshoe_native.library import diagnose, load, prepare
from hotshoe_native.options import NativeOptions

FORMATS = ("dense", "int8", "q8_0", "q4_0", "q4_1")
CAPABILITIES = KernelsCapabilities(
    weight_formats=FORMATS,
    embedding_formats=FORMATS,
    dtypes=("float32", "bfloat16"),
    is_batch_invariant=True,
    recording="any_size",
)


def build(options: NativeOptions, context: KernelsContext) -> Kernels:
    """The kernels; torch is imported here, not with the module."""
    from hotshoe_kernels.cpu.kernels import CpuKernels

    return CpuKernels(
        CAPABILITIES,
        load(options.isa),
        dtype=context.dtype,
        num_threads=options.share_threads(),
    )


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="kernels/0",
        factory=build,
        options=NativeOptions,
        capabilities=CAPABILITIES,
        auto_priority=2,
        prepare=prepare,
        diagnose=diagnose,
    )
