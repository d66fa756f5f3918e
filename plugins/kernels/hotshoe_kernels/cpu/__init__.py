"""Native kernels for CPUs: C++, compiled at first use, with AVX-512, AVX2 or neither."""

from __future__ import annotations

from pydantic import Field

from hotshoe.api import (
    Component,
    Kernels,
    KernelsCapabilities,
    KernelsContext,
    PluginOptions,
    hookimpl,
)
from hotshoe_native.isa import Isa
from hotshoe_native.library import diagnose, load, prepare

FORMATS = ("dense", "int8", "q8_0", "q4_0", "q4_1")
CAPABILITIES = KernelsCapabilities(
    weight_formats=FORMATS,
    embedding_formats=FORMATS,
    dtypes=("float32", "bfloat16"),
    is_batch_invariant=True,
)


class CpuKernelsOptions(PluginOptions):
    """Threads and instructions."""

    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads that share an op; torch uses as many then. By default as many as "
        "torch uses.",
    )
    isa: Isa = Field(
        default="auto", description="Instruction set; auto is the widest that the CPU has."
    )


def build(options: CpuKernelsOptions, context: KernelsContext) -> Kernels:
    """The kernels; torch is imported here, not with the module."""
    import torch

    from hotshoe_kernels.cpu.kernels import CpuKernels

    if options.num_threads is not None:
        # both run on the threads of one runtime, which keeps a team of one size
        torch.set_num_threads(options.num_threads)
    return CpuKernels(
        CAPABILITIES, load(options.isa), dtype=context.dtype, num_threads=torch.get_num_threads()
    )


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="kernels/0",
        factory=build,
        options=CpuKernelsOptions,
        capabilities=CAPABILITIES,
        auto_priority=2,
        prepare=prepare,
        diagnose=diagnose,
    )
