"""Kernels, attention and samplers on the GPU, against their references."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from hotshoe.api import (
    AttentionSpec,
    Candidates,
    Component,
    SampleInput,
    Sampler,
)
from hotshoe.testing.attention import AttentionConformance
from hotshoe.testing.attention_reference import TOLERANCES
from hotshoe.testing.kernels import KernelsConformance
from hotshoe.testing.sampler import SamplerConformance
from hotshoe_attention import torch_sdpa
from hotshoe_attention import triton as triton_attention
from hotshoe_kernels import torch as torch_kernels
from hotshoe_kernels import triton as triton_kernels
from hotshoe_samplers import standard
from hotshoe_samplers import triton as triton_sampler

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


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


class TestTorchKernels(KernelsConformance):
    device: ClassVar[str] = "cuda"

    def component(self) -> Component:
        return torch_kernels.hotshoe_component()


class OnGpu(Sampler):
    """A sampler on the GPU that is used like one on the CPU."""

    def __init__(self, sampler: Sampler) -> None:
        self.capabilities = sampler.capabilities
        self._sampler = sampler

    def candidates(self, inputs: SampleInput) -> Candidates:
        found = self._sampler.candidates(self._moved(inputs))
        token_ids = None if found.token_ids is None else found.token_ids.cpu()
        return Candidates(found.probs.cpu(), token_ids)

    def draw(self, inputs: SampleInput, uniforms: Tensor) -> Tensor:
        return self._sampler.draw(self._moved(inputs), uniforms.to(CUDA)).cpu()

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        token_ids, best = self._sampler.most_likely(logits.to(CUDA))
        return token_ids.cpu(), best.cpu()

    def mask(self, logits: Tensor, bitmask: Tensor) -> None:
        on_gpu = logits.to(CUDA)
        self._sampler.mask(on_gpu, bitmask.to(CUDA))
        logits.copy_(on_gpu)

    def _moved(self, inputs: SampleInput) -> SampleInput:
        return replace(
            inputs,
            logits=inputs.logits.to(CUDA),
            temperature=inputs.temperature.to(CUDA),
            top_k=inputs.top_k.to(CUDA),
            top_p=inputs.top_p.to(CUDA),
            min_p=inputs.min_p.to(CUDA),
        )


class SamplerOnGpu(SamplerConformance):
    """The suite, whose own tensors are on the CPU."""

    def sampler(self, vocab_size: int, device: torch.device = CPU) -> Sampler:
        if device != CPU:
            return super().sampler(vocab_size, device)
        return OnGpu(super().sampler(vocab_size, CUDA))


class TestStandardSampler(SamplerOnGpu):
    def component(self) -> Component:
        return standard.hotshoe_component()


class TestTritonSampler(SamplerOnGpu):
    def component(self) -> Component:
        return triton_sampler.hotshoe_component()
