"""The native kernels: the conformance suite on every instruction set that this CPU has, threads,
and what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError

from hotshoe import LLM, SamplingParams
from hotshoe.api import Component, ModelLoadError, Weight
from hotshoe.testing.kernels import KernelsConformance
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from hotshoe_kernels import cpu
from hotshoe_kernels.cpu.kernels import CpuKernels
from hotshoe_native.isa import available
from hotshoe_native.options import NativeOptions

ISAS = [isa.name for isa in available()]


class CpuConformance(KernelsConformance):
    isa: ClassVar[str]

    def component(self) -> Component:
        return cpu.hotshoe_component()

    def options(self) -> dict[str, Any]:
        if self.isa not in ISAS:
            pytest.skip(f"this CPU lacks {self.isa}; it has {ISAS}")
        return {"isa": self.isa}


class TestAvx512(CpuConformance):
    isa = "avx512"


class TestAvx2(CpuConformance):
    isa = "avx2"


class TestPortable(CpuConformance):
    isa = "portable"


@pytest.fixture
def _threads_of_torch() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def kernels(dtype: torch.dtype = torch.float32, **options: Any) -> CpuKernels:
    built = TestAvx512().build(dtype, **{"isa": "auto", **options})
    assert isinstance(built, CpuKernels)
    return built


@pytest.mark.usefixtures("_threads_of_torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape_NK", [(1, 5), (40, 64), (300, 96), (1000, 33)], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, shape_NK: tuple[int, int]
) -> None:
    n, k = shape_NK
    values, scale = torch.randn(n, k).to(dtype), torch.rand(k).to(dtype)
    xs = [torch.randn(num_rows, k).to(dtype) for num_rows in (1, 2, 7, 33, 200)]
    outputs = []
    for num_threads in (1, 2, 3, 5):
        built = kernels(dtype, num_threads=num_threads)
        weight = built.prepare_weight(
            Weight(format="dense", out_features=n, in_features=k, tensors={"weight": values})
        )
        ids = torch.arange(n)
        outputs.append(
            [
                built.embedding(ids, weight),
                *(built.linear(x, weight) for x in xs),
                *(built.silu_and_mul(built.linear(x, weight)) for x in xs),
                *(one for x in xs for one in built.rms_norm(x, scale, 1e-5, x.clone())),
            ]
        )
    for others in outputs[1:]:
        for one, other in zip(outputs[0], others, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts_N", [(128,), (80,), (40, 40), (32, 64), (64, 32, 32)], ids=str)
def test_gated_products_have_the_bits_of_two_ops_whatever_the_parts(
    dtype: torch.dtype, parts_N: tuple[int, ...]
) -> None:
    suite, built = TestAvx512(), kernels(dtype)
    formats = ("dense", "int8", "q4_0")
    parts = tuple(
        suite.weight(n, 64, dtype, weight_format)[0]
        for n, weight_format in zip(parts_N, formats, strict=False)
    )
    merged = Weight(
        format="mixed", out_features=sum(parts_N), in_features=64, tensors={}, parts=parts
    )
    weight = built.prepare_weight(merged if len(parts) > 1 else parts[0])
    for num_rows in (1, 2, 9, 70):
        x = torch.randn(num_rows, 64).to(dtype)
        expected = built.silu_and_mul(built.linear(x, weight))
        assert torch.equal(built.linear_silu_and_mul(x, weight), expected)


@pytest.mark.usefixtures("_threads_of_torch")
def test_torch_uses_as_many_threads_as_the_option_says() -> None:
    assert kernels(num_threads=3).num_threads == torch.get_num_threads() == 3
    assert kernels().num_threads == 3


@pytest.mark.parametrize("options", [{"num_threads": 0}, {"isa": "sse"}, {"threads": 2}], ids=str)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        NativeOptions(**options)


def test_half_precision_is_refused_by_the_capabilities() -> None:
    assert "float16" not in cpu.CAPABILITIES.dtypes
    assert cpu.CAPABILITIES.devices == ("cpu",)


def test_dense_values_of_another_dtype_are_refused() -> None:
    tensors = {"weight": torch.randn(4, 4)}
    weight = Weight(format="dense", out_features=4, in_features=4, tensors=tensors)
    with pytest.raises(ModelLoadError, match=r"'torch\.float32', but activations have"):
        kernels(torch.bfloat16).prepare_weight(weight)


def test_quantized_weights_of_odd_width_are_refused() -> None:
    weight, _ = TestAvx512().weight(4, 48, torch.float32, "int8")
    with pytest.raises(ModelLoadError, match="'int8' has 48 inputs, which is no multiple of 32"):
        kernels().prepare_weight(weight)


def test_ids_that_have_no_row_give_no_numbers() -> None:
    built = kernels()
    tensors = {"weight": torch.randn(40, 8)}
    weight = built.prepare_weight(
        Weight(format="dense", out_features=40, in_features=8, tensors=tensors)
    )
    rows = built.embedding(torch.tensor([39, 40, -1, 2**40, 0]), weight)
    assert rows.isnan().all(1).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("architecture", "is_tied"),
    [("LlamaForCausalLM", True), ("Qwen2ForCausalLM", False), ("Qwen3ForCausalLM", True)],
)
def test_models_give_the_tokens_that_torch_kernels_give(
    architecture: str, is_tied: bool, tmp_path: Path
) -> None:
    config = tiny_llama_config(tie_word_embeddings=is_tied)
    folder = write_tiny_checkpoint(tmp_path, config, architecture=architecture)
    prompts = ["a", "the quick brown fox", "0123456789 " * 9]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = []
    for name in ("torch", "cpu"):
        with LLM(
            str(folder), kernels=name, attention="torch_sdpa", dtype="float32", max_model_len=256
        ) as llm:
            outputs.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]
