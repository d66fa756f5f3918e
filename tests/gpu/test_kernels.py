"""Kernels and attention on the GPU, against their references."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from hotshoe.api import AttentionSpec, Component, Kernels, Recording
from hotshoe.testing.attention import AttentionConformance
from hotshoe.testing.attention_reference import TOLERANCES
from hotshoe.testing.kernels import KernelsConformance
from hotshoe_attention import torch_sdpa
from hotshoe_attention import triton as triton_attention
from hotshoe_kernels import torch as torch_kernels
from hotshoe_kernels import triton as triton_kernels


class TestTritonAttention(AttentionConformance):
    device: ClassVar[str] = "cuda"
    long_context: ClassVar[int] = 5000

    def component(self) -> Component:
        return triton_attention.hotshoe_component()


class TestTorchSdpa(AttentionConformance):
    device: ClassVar[str] = "cuda"
    spec_names: ClassVar = ("gqa-2", "head-128", "softcap-window", "sinks", "bfloat16", "float16")

    def component(self) -> Component:
        return torch_sdpa.hotshoe_component()

    def tolerance(self, spec: AttentionSpec) -> float:
        return TOLERANCES[spec.dtype]


class TestTritonKernels(KernelsConformance):
    device: ClassVar[str] = "cuda"

    def component(self) -> Component:
        return triton_kernels.hotshoe_component()

    def recorded(self, kernels: Kernels, run: Callable[[], tuple[Tensor, ...]]) -> Recording:
        """Here nothing excuses a refusal."""
        return kernels.record(run)


class TestTorchKernels(KernelsConformance):
    device: ClassVar[str] = "cuda"

    def component(self) -> Component:
        return torch_kernels.hotshoe_component()
