"""The Triton kernels in the interpreter: the conformance suite, what it doesn't ask for, and a
model that runs on them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotshoe import LLM, SamplingParams
from hotshoe.api import Component, Kernels, Weight
from hotshoe.testing.kernels import KernelsConformance
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from hotshoe.weights.gguf_blocks import dequantize
from hotshoe_kernels import triton

QUANTIZED = ("int8", "q8_0", "q4_0", "q4_1")


class TestTritonKernels(KernelsConformance):
    shapes_NK = ((1, 1), (33, 7), (10, 96))
    quantized_shapes_NK = ((10, 96),)
    num_rows = (1, 3, 4, 5)
    quantized_num_rows = (1, 3, 9)
    gated_sizes = (5,)
    part_rows = (3, 1, 5, 7, 4, 6)
    head_rows = 10

    def component(self) -> Component:
        return triton.hotshoe_component()


def make_kernels(dtype: torch.dtype = torch.float32) -> Kernels:
    return TestTritonKernels().build(dtype)


def random_weight(weight_format: str, n: int, k: int) -> tuple[Weight, Tensor]:
    """A weight, and the values that it stands for."""
    torch.manual_seed(0)
    return TestTritonKernels().weight(n, k, torch.float32, weight_format, bias=False)


@pytest.mark.parametrize("weight_format", QUANTIZED)
def test_products_of_very_many_rows_are_those_of_few(weight_format: str) -> None:
    kernels = make_kernels()
    weight, values = random_weight(weight_format, 6, 64)
    x = torch.randn(257, 64)
    output = kernels.linear(x, kernels.prepare_weight(weight))
    torch.testing.assert_close(output, x @ values.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_format", QUANTIZED)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_the_products_of_its_row(
    weight_format: str, value: float
) -> None:
    kernels = make_kernels()
    weight, _ = random_weight(weight_format, 3, 64)
    x = torch.randn(2, 64)
    x[0, 40] = value
    output = kernels.linear(x, kernels.prepare_weight(weight))
    assert not output[0].isfinite().any()
    assert output[1].isfinite().all()


@pytest.mark.parametrize("weight_format", QUANTIZED)
def test_long_sums_are_split_and_added(weight_format: str) -> None:
    kernels = make_kernels()
    weight, values = random_weight(weight_format, 3, 1024)
    x = torch.randn(9, 1024)
    output = kernels.logits(x, kernels.prepare_weight(weight))
    torch.testing.assert_close(output, x @ values.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weight_format", ["dense", *QUANTIZED])
@pytest.mark.parametrize("num_rows", [2, 9, 257])
def test_logits_of_half_precision_are_not_rounded_to_it(weight_format: str, num_rows: int) -> None:
    kernels = make_kernels(torch.float16)
    weight, values = TestTritonKernels().weight(5, 64, torch.float16, weight_format, bias=True)
    bias = weight.tensors["bias"].float()
    x = torch.randn(num_rows, 64).half()
    output = kernels.logits(x, kernels.prepare_weight(weight))
    assert output.dtype == torch.float32
    size = (x.float().abs() @ values.float().abs().T).max()
    assert (output - (x.float() @ values.float().T + bias)).abs().max() < 0.02 * size
    assert not torch.equal(output, output.half().float())


@pytest.mark.parametrize("weight_format", QUANTIZED)
def test_ids_that_have_no_row_give_no_numbers(weight_format: str) -> None:
    kernels = make_kernels()
    weight, _ = random_weight(weight_format, 4, 32)
    ids = torch.tensor([3, 4, -1, 2**40, 0])
    rows = kernels.embedding(ids, kernels.prepare_weight(weight))
    assert rows.isnan().all(1).tolist() == [False, True, True, True, False]
    assert rows.isnan().any(1).tolist() == [False, True, True, True, False]


def test_blocks_are_read_from_the_middle_of_a_file() -> None:
    # a tensor of a memory-mapped file starts anywhere, and its rows may have gaps
    kernels = make_kernels()
    raw = torch.randint(0, 256, (5, 18 * 3 + 7), dtype=torch.uint8)[:, 3:57]
    raw[:, ::18], raw[:, 1::18] = 0, 44  # scales of 1/16
    values = dequantize(raw.contiguous(), "q4_0", torch.float32)
    weight = Weight(format="q4_0", out_features=5, in_features=96, tensors={"blocks": raw})
    rows = kernels.embedding(torch.arange(5), kernels.prepare_weight(weight))
    assert torch.equal(rows, values)


@pytest.mark.parametrize("size", [8193, 10000])
def test_norms_of_rows_wider_than_a_program_holds(size: int) -> None:
    x, residual, scale = torch.randn(3, size), torch.randn(3, size), torch.randn(size)
    total = x + residual
    normed, summed = make_kernels().rms_norm(x, scale, 1e-5, residual)
    expected = torch.nn.functional.rms_norm(total, (size,), scale, 1e-5)
    assert torch.equal(summed, total)
    torch.testing.assert_close(normed, expected, rtol=1e-5, atol=1e-5)
    normed, _ = make_kernels().rms_norm(total, scale, 1e-5)
    torch.testing.assert_close(normed, expected, rtol=1e-5, atol=1e-5)


def test_infinite_activations_stay_in_their_row() -> None:
    kernels = make_kernels()
    weight, values = random_weight("q8_0", 4, 64)
    x = torch.randn(3, 64)
    x[1, 5] = float("inf")
    output = kernels.linear(x, kernels.prepare_weight(weight))
    assert not output[1].isfinite().any()
    others = [0, 2]
    torch.testing.assert_close(output[others], x[others] @ values.T, rtol=0.05, atol=0.5)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_model_runs_on_the_kernels_that_auto_picks(quantization: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = tiny_llama_config(tie_word_embeddings=True, **sizes)
    model = write_tiny_checkpoint(tmp_path, config, architecture="Qwen3ForCausalLM")
    # 8 bits are enough for the first token of an answer
    num_tokens = 2 if quantization == "none" else 1
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def generated(**settings: Any) -> tuple[int, ...]:
        shared = {"attention": "torch_sdpa", "sampler": "standard", "dtype": "float32"}
        with LLM(str(model), max_model_len=64, **shared, **settings) as llm:
            (output,) = llm.generate(["hello there"], params)
        return output.outputs[0].token_ids

    assert generated(quantization=quantization) == generated(kernels="torch")
