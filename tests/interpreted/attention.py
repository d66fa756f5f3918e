"""Attention in Triton in the interpreter: the conformance suite, on fewer shapes."""

from __future__ import annotations

from typing import ClassVar

from hotshoe.api import Component
from hotshoe.testing.attention import AttentionConformance
from hotshoe_attention import triton


class TestTritonAttention(AttentionConformance):
    spec_names: ClassVar = (
        "gqa-7",
        "head-80",
        "narrow-values",
        "softcap-window",
        "sinks-window",
        "float16",
    )
    block_sizes: ClassVar = (4, 64)
    long_context: ClassVar = 200

    def component(self) -> Component:
        return triton.hotshoe_component()
