"""Samplers on a GPU: the conformance suite, the tokens of the CPU, and nothing that waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from hotshoe.api import Component, Sampler, SamplerContext
from hotshoe.testing.distributions import Filter
from hotshoe.testing.sampler import SamplerConformance, sample_input
from hotshoe.worker.streams import Streams, streams_for
from hotshoe_samplers import standard, triton
from unit.sampling_harness import Drafter, every_kind, no_drafts, outcomes, some_drafts

NUM_ROWS, VOCAB_SIZE = 200, 49_152
FILTERS = [
    Filter(),
    Filter(temperature=0),
    Filter(top_p=0.95),
    Filter(temperature=0.7, top_k=50, top_p=0.9),
    Filter(top_k=20_000),
    Filter(min_p=0.02),
]

# torch says so of what RefusesToWait turns on
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")


class TestStandardSamplerOnGpu(SamplerConformance):
    device: ClassVar = "cuda"

    def component(self) -> Component:
        return standard.hotshoe_component()


class TestTritonSamplerOnGpu(SamplerConformance):
    device: ClassVar = "cuda"

    def component(self) -> Component:
        return triton.hotshoe_component()


class RefusesToWait:
    """The GPU; what waits for it where this is entered is an error."""

    device = torch.device("cuda")

    @property
    def streams(self) -> Streams:
        return streams_for(self.device)

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.cuda()

    def get(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def __enter__(self) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *error: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drafter", [no_drafts, some_drafts])
def test_requests_of_every_kind_get_what_they_get_on_the_cpu(drafter: Drafter) -> None:
    for params in every_kind():
        found, expected = (
            outcomes(RefusesToWait(), params, drafter),
            outcomes(None, params, drafter),
        )
        assert found[0] == expected[0]
        assert found[2] == expected[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_vocabulary_is_drawn_from_as_on_the_cpu(dtype: torch.dtype) -> None:
    numbers = np.random.default_rng(0)
    chosen = [FILTERS[row % len(FILTERS)] for row in range(NUM_ROWS)]
    logits = (torch.from_numpy(numbers.normal(size=(NUM_ROWS, VOCAB_SIZE))) * 3).to(dtype)
    uniforms = torch.from_numpy(numbers.random(NUM_ROWS))
    inputs = sample_input(logits.float(), chosen)
    expected = sampler_of(standard.hotshoe_component(), "cpu").draw(inputs, uniforms)
    there = replace(
        sample_input(logits, chosen),
        logits=logits.cuda(),
        temperature=inputs.temperature.cuda(),
        top_k=inputs.top_k.cuda(),
        top_p=inputs.top_p.cuda(),
        min_p=inputs.min_p.cuda(),
    )
    sampler, on_gpu = sampler_of(triton.hotshoe_component(), "cuda"), uniforms.cuda()
    with RefusesToWait():
        token_ids, best = sampler.most_likely(there.logits)
        drawn = sampler.draw(there, on_gpu)
    assert token_ids.tolist() == logits.float().numpy().argmax(-1).tolist()
    assert best.tolist() == logits.float().amax(-1).tolist()
    # a lead of less than rounding may be decided otherwise
    assert (drawn.cpu() == expected).sum() >= NUM_ROWS - 1


def sampler_of(component: Component, device: str) -> Sampler:
    context = SamplerContext(device=torch.device(device), vocab_size=VOCAB_SIZE)
    built: Sampler = component.factory(component.options(), context)  # type: ignore[assignment]
    return built
