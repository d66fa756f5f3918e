"""The sampler in Triton: interpreted on the CPU, and compiled for GPUs that aren't there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotshoe.api import ConfigError, SampleInput, SamplerContext
from hotshoe_samplers import triton
from hotshoe_triton.compile_only import CAPABILITIES, compile_only
from interpreted.run import run_interpreted

NUM_ROWS, VOCAB_SIZE = 4, 49_152


def test_interpreted_it_draws_what_the_definition_draws() -> None:
    run_interpreted("sampler.py")


@pytest.mark.full
def test_interpreted_it_draws_what_the_definition_draws_many_times() -> None:
    run_interpreted("sampler.py", markers="full")


def on_meta(dtype: torch.dtype, *shape: int) -> Any:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, torch.bfloat16),
        *(
            pytest.param(capability, dtype, marks=pytest.mark.full)
            for capability in CAPABILITIES
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        ),
    ],
)
def test_it_compiles_into_one_kernel_with_little_outside_of_registers(
    capability: int, dtype: torch.dtype
) -> None:
    from hotshoe_samplers.triton.sampler import TritonSampler

    numbers = on_meta(torch.float32, NUM_ROWS)
    inputs = SampleInput(
        logits=on_meta(dtype, NUM_ROWS, VOCAB_SIZE),
        temperature=numbers,
        top_k=on_meta(torch.int64, NUM_ROWS),
        top_p=numbers,
        min_p=numbers,
        is_all_greedy=False,
        is_any_filtered=True,
        extra_args=[None] * NUM_ROWS,
    )
    with compile_only(capability) as launches:
        TritonSampler(triton.capabilities()).draw(inputs, on_meta(torch.float64, NUM_ROWS))
    (launch,) = launches
    assert launch.grid == (NUM_ROWS, 1, 1)
    assert launch.local_bytes <= 64


def test_a_cpu_is_refused_with_the_reason() -> None:
    component = triton.hotshoe_component()
    assert component.capabilities == triton.capabilities()
    assert triton.capabilities().devices == ("cuda",)
    assert triton.capabilities().logits_dtypes == ("float32", "bfloat16", "float16")
    context = SamplerContext(device=torch.device("cpu"), vocab_size=8)
    with pytest.raises(ConfigError, match="Triton kernels can't run on 'cpu'"):
        component.factory(component.options(), context)
