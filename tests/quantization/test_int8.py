"""8-bit weights: how far they are from the values, which layers get which, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotshoe import LLM
from hotshoe.api import Quantization
from hotshoe.errors import ConfigError, ModelLoadError
from hotshoe.testing.forward import DenseTensor, DirectRunner, Parts
from hotshoe.testing.models import tiny_llama_config, write_tiny_checkpoint
from hotshoe.weights.checkpoint import open_checkpoint
from hotshoe_attention import torch_sdpa
from hotshoe_models import llama
from hotshoe_quantization import int8, none
from quantization.dequantizing import build_quantization, dequantizing_kernels, start, values_of


def method(**options: object) -> Quantization:
    return build_quantization(int8.hotshoe_component(), **options)


def test_rows_have_scales_of_their_own_and_values_are_off_by_half_a_step_at_most() -> None:
    values = torch.randn(6, 64) * torch.tensor([1e-6, 1, 1, 50, 1, 1e4])[:, None]
    builder = start(method(scales="row"), 64)
    builder.load("weight", DenseTensor("t", values))
    weight = builder.finalize()
    assert weight.format == "int8"
    assert weight.tensors["weight"].dtype == torch.int8
    scales = weight.tensors["scales"]
    assert torch.equal(scales, values.abs().amax(-1) / 127)
    error = (values_of(weight) - values).abs()
    assert bool((error <= 0.5001 * scales[:, None]).all())


@pytest.mark.parametrize(
    ("scales", "role"), [("group", {}), ("row", {"is_embedding": True}), ("row", {"is_head": True})]
)
def test_groups_of_32_have_scales_of_their_own_and_values_are_off_by_half_a_step_at_most(
    scales: str, role: dict[str, bool]
) -> None:
    values = torch.randn(6, 64)
    values[:, :32] *= 100
    builder = start(method(scales=scales), 64, **role)
    builder.load("weight", DenseTensor("t", values))
    weight = builder.finalize()
    assert weight.format == "q8_0"
    error = (values_of(weight) - values).abs().view(6, 2, 32)
    step = values.abs().view(6, 2, 32).amax(-1, keepdim=True) / 127
    # the largest value may lie beyond 127 steps by the rounding of the scale to float16
    assert bool((error <= step * (0.5 + 127 * 2**-11)).all())


@pytest.mark.parametrize("scales", ["group", "row"])
def test_parts_are_merged_by_rows_whatever_their_dtype_and_order(scales: str) -> None:
    q, k = torch.randn(4, 32).bfloat16(), torch.randn(2, 32).half()
    q_bias, k_bias = torch.randn(4), torch.randn(2)
    whole = start(method(scales=scales), 32)
    whole.load("weight", DenseTensor("t", torch.cat((q.float(), k.float()))))
    builder = start(method(scales=scales), 32, parts=(("q", 4), ("k", 2)), has_bias=True)
    builder.load("k", DenseTensor("k", k))
    builder.load("k", DenseTensor("k.bias", k_bias), is_bias=True)
    builder.load("q", DenseTensor("q.bias", q_bias), is_bias=True)
    builder.load("q", DenseTensor("q", q))
    weight = builder.finalize()
    for name, expected in whole.finalize().tensors.items():
        assert torch.equal(weight.tensors[name], expected)
    assert torch.equal(weight.tensors["bias"], torch.cat((q_bias, k_bias)))


@pytest.mark.parametrize("scales", ["group", "row"])
def test_a_row_of_zeros_stays_zero(scales: str) -> None:
    values = torch.randn(6, 32)
    values[2] = 0
    builder = start(method(scales=scales), 32)
    builder.load("weight", DenseTensor("t", values))
    assert not values_of(builder.finalize())[2].any()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_no_numbers_are_refused(value: float) -> None:
    values = torch.randn(6, 32)
    values[3, 5] = value
    with pytest.raises(ModelLoadError, match=r"tensor 't\.weight' has values that are infinite or"):
        start(method(), 32).load("weight", DenseTensor("t.weight", values))


def test_layers_that_stay_dense_are_logged_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quantization = method(keep_dense=["lm_*", "layers.0.down"])
    for name, width in (("lm_head", 32), ("layers.0.down", 32), ("narrow", 40), ("wide", 64)):
        builder = start(quantization, width, name=name)
        values = torch.randn(6, width)
        builder.load("weight", DenseTensor("t", values))
        weight = builder.finalize()
        assert weight.format == ("q8_0" if name == "wide" else "dense")
    with caplog.at_level("INFO", logger="hotshoe_quantization"):
        quantization.finish()
    assert caplog.messages == [
        "quantization=int8: dense are lm_head (keep_dense has 'lm_*'), layers.0.down (keep_dense "
        "has 'layers.0.down'), narrow (40 inputs are no multiple of 32)"
    ]


def test_a_name_to_keep_dense_that_no_layer_has_is_refused(tiny_path: Path) -> None:
    options = {"keep_dense": ["lm_head", "model.layers.*.donw_proj"]}
    quantization = {"name": "int8", "options": options}
    with pytest.raises(ConfigError) as error:
        LLM(str(tiny_path), quantization=quantization, kernels="cpu", dtype="float32")
    assert str(error.value) == (
        "quantization.options.keep_dense: no layer has a name like 'model.layers.*.donw_proj'; "
        "remove it, or take the name from the model's checkpoint"
    )


def test_kernels_that_know_dense_weights_alone_are_refused_by_name(tiny_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(str(tiny_path), quantization="int8", kernels="torch")
    assert str(error.value) == (
        "kernels.name 'torch' can't be used: weight formats 'int8', 'q8_0' are not supported (it "
        "has dense), needed by quantization 'int8'"
    )


def test_auto_takes_the_kernels_that_execute_them(tiny_path: Path) -> None:
    with LLM(str(tiny_path), quantization="int8") as llm:
        assert llm.components["kernels"].startswith("cpu ")
        assert llm.components["quantization"].startswith("int8 ")
        assert llm.generate("a")


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("scales", ["group", "row"])
def test_a_quantized_model_predicts_much_as_before(
    tmp_path: Path, is_tied: bool, scales: str
) -> None:
    config = tiny_llama_config(tie_word_embeddings=is_tied)
    folder = write_tiny_checkpoint(tmp_path / "tiny", config, tokenizer=False)
    runners = []
    for quantization, options in ((none, {}), (int8, {"scales": scales})):
        parts = Parts(
            model=llama.hotshoe_component(),
            attention=torch_sdpa.hotshoe_component(),
            kernels=dequantizing_kernels(),
            quantization=quantization.hotshoe_component(),
            quantization_options=options,
        )
        with open_checkpoint(str(folder)) as checkpoint:
            runners.append(DirectRunner(checkpoint.config, checkpoint.tensors(), parts))
    tokens = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    exact, quantized = (runner.step({"a": tokens})["a"].log_softmax(-1) for runner in runners)
    divergence = (exact.exp() * (exact - quantized)).sum(-1)
    assert 0 < divergence.mean() < 0.005
