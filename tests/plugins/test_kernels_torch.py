"""The torch kernels: the conformance suite, and the modules of transformers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hotshoe.api import Component, Kernels, KernelsContext, Weight
from hotshoe.testing.kernels import KernelsConformance
from hotshoe_kernels import torch as torch_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class TestTorchKernels(KernelsConformance):
    def component(self) -> Component:
        return torch_kernels.hotshoe_component()


def kernels() -> Kernels:
    component = torch_kernels.hotshoe_component()
    context = KernelsContext(device=torch.device("cpu"), dtype=torch.float32)
    built = component.factory(component.options(), context)
    assert isinstance(built, Kernels)
    return built


def dense(num_rows: int, num_columns: int, *, bias: bool = False) -> Weight:
    tensors = {"weight": torch.randn(num_rows, num_columns)}
    if bias:
        tensors["bias"] = torch.randn(num_rows)
    return Weight(format="dense", out_features=num_rows, in_features=num_columns, tensors=tensors)


def test_linear_adds_its_bias_and_joins_parts() -> None:
    x = torch.randn(3, 8)
    plain, biased = dense(5, 8), dense(2, 8, bias=True)
    merged = Weight(
        format="mixed", out_features=7, in_features=8, tensors={}, parts=(plain, biased)
    )

    output = kernels().linear(x, merged)

    expected = torch.cat(
        (
            x @ plain.tensors["weight"].T,
            x @ biased.tensors["weight"].T + biased.tensors["bias"],
        ),
        1,
    )
    torch.testing.assert_close(output, expected)


def test_rms_norm_equals_transformers_bit_for_bit_in_float32() -> None:
    norm = LlamaRMSNorm(64, eps=1e-5)
    weight = torch.rand(64) + 0.5
    norm.weight.data.copy_(weight)
    x, residual = torch.randn(7, 64) * 5, torch.randn(7, 64)
    expected_sum = residual + x

    normed, same = kernels().rms_norm(x, weight, 1e-5)
    normed_sum, total = kernels().rms_norm(x, weight, 1e-5, residual)

    assert torch.equal(normed, norm(x))
    assert torch.equal(same, x)
    assert torch.equal(normed_sum, norm(expected_sum))
    assert torch.equal(total, expected_sum)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rms_norm_in_half_precision_rounds_once(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 64).to(dtype), (torch.rand(64) + 0.5).to(dtype)

    normed, _ = kernels().rms_norm(x, weight, 1e-5)

    exact = F.rms_norm(x.double(), (64,), weight.double(), 1e-5)
    torch.testing.assert_close(normed.double(), exact, atol=0, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    packed = torch.randn(6, 7, 16).to(dtype)
    q, k = packed[:, :4], packed[:, 4:6]
    positions = torch.tensor([3, 0, 9, 1, 1, 30])
    angles = torch.outer(torch.arange(32.0), 1000.0 ** (-torch.arange(8) / 8))
    cos, sin = (torch.cat((f(angles), f(angles)), 1)[positions] for f in (torch.cos, torch.sin))
    expected = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None].to(dtype), sin[None].to(dtype)
    )

    rotated = kernels().rope(q, k, positions, angles.cos(), angles.sin())

    for output, reference in zip(rotated, expected, strict=True):
        assert torch.equal(output, reference[0].transpose(0, 1))


def test_rope_leaves_the_rest_of_a_head_alone() -> None:
    q, k = torch.randn(2, 3, 16), torch.randn(2, 1, 16)
    angles = torch.rand(5, 4)
    positions = torch.tensor([4, 2])

    whole, _ = kernels().rope(
        q[..., :8].clone(), k[..., :8].clone(), positions, angles.cos(), angles.sin()
    )
    partial, _ = kernels().rope(q.clone(), k.clone(), positions, angles.cos(), angles.sin())

    assert torch.equal(partial[..., :8], whole)
    assert torch.equal(partial[..., 8:], q[..., 8:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_takes_the_gate_first(dtype: torch.dtype) -> None:
    x = torch.randn(5, 32).to(dtype)
    expected = F.silu(x[:, :16]) * x[:, 16:]
    assert torch.equal(kernels().silu_and_mul(x), expected)
