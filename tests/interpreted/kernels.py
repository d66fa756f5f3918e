"""The Triton kernels in the interpreter: the conformance suite."""

from __future__ import annotations

from hotshoe.api import Component
from hotshoe.testing.kernels import KernelsConformance
from hotshoe_kernels import triton


class TestTritonKernels(KernelsConformance):
    shapes_NK = ((1, 1), (33, 7), (10, 96))
    quantized_shapes_NK = ((10, 96),)
    num_rows = (1, 3, 4, 5)
    quantized_num_rows = (1, 3, 9)
    part_rows = (3, 1, 5, 7, 4, 6)

    def component(self) -> Component:
        return triton.hotshoe_component()
