"""The sampler in Triton: interpreted on the CPU, and compiled for GPUs that aren't there."""

from __future__ import annotations

import pytest
import torch

from hotshoe.api import ConfigError, SamplerCapabilities, SamplerContext
from hotshoe_samplers import triton
from hotshoe_triton.compile_only import CAPABILITIES, compile_only
from interpreted.run import run_interpreted


def test_interpreted_it_draws_what_the_definition_draws() -> None:
    run_interpreted("sampler.py")


@pytest.mark.full
def test_interpreted_it_draws_what_the_definition_draws_many_times() -> None:
    run_interpreted("sampler.py", markers="full")


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        (90, ("bfloat16",)),
        *(
            pytest.param(capability, triton.capabilities().logits_dtypes, marks=pytest.mark.full)
            for capability in CAPABILITIES
        ),
    ],
)
def test_it_compiles_into_one_kernel_with_little_outside_of_registers(
    capability: int, dtypes: tuple[str, ...]
) -> None:
    from hotshoe_samplers.triton.sampler import TritonSampler

    sampler = TritonSampler(SamplerCapabilities(logits_dtypes=dtypes))
    with compile_only(capability) as launches:
        sampler.compile(torch.device("meta"), vocab_size=49_152)
    assert [launch.grid for launch in launches] == [(1, 1, 1)] * len(dtypes)
    assert all(launch.local_bytes <= 64 for launch in launches)


def test_a_cpu_is_refused_with_the_reason() -> None:
    component = triton.hotshoe_component()
    assert component.capabilities == triton.capabilities()
    assert triton.capabilities().devices == ("cuda",)
    assert triton.capabilities().logits_dtypes == ("float32", "bfloat16", "float16")
    context = SamplerContext(device=torch.device("cpu"), vocab_size=8)
    with pytest.raises(ConfigError, match="Triton kernels can't run on 'cpu'"):
        component.factory(component.options(), context)
