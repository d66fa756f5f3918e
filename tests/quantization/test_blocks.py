"""Blocks of GGUF files: kept byte for byte where that is promised, re-expressed as it is said."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from hotshoe import LLM
from hotshoe.api import Quantization
from hotshoe.errors import ConfigError
from hotshoe.testing.forward import DenseTensor, DirectRunner, Parts
from hotshoe.weights.checkpoint import open_checkpoint
from hotshoe.weights.gguf import BLOCK_SIZES
from hotshoe.weights.gguf_blocks import DENSE_DTYPES, dequantize
from hotshoe_attention import torch_sdpa
from hotshoe_kernels import cpu as cpu_kernels
from hotshoe_models import llama
from hotshoe_quantization import gguf as gguf_plugin
from hotshoe_quantization import none
from quantization.dequantizing import (
    BlocksTensor,
    build_quantization,
    dequantizing_kernels,
    start,
    values_of,
)

STORED = ["q4_0", "q4_1", "q8_0"]
OTHERS = [name for name in BLOCK_SIZES if name not in (*STORED, *DENSE_DTYPES)]
# where the float16 scales of a block are; the rest of its bytes may be anything
SCALES = {"q2_k": (80, 84), "q3_k": (108, 110), "q6_k": (208, 210)}
TWO_SCALES = ("q4_1", "q5_1", "q4_k", "q5_k")


def method(**options: object) -> Quantization:
    return build_quantization(gguf_plugin.hotshoe_component(), checkpoint_format="gguf", **options)


def random_tensor(block_format: str, num_rows: int = 6, name: str = "t") -> BlocksTensor:
    """Two blocks a row, or as many as make 512 values."""
    block_size, block_bytes = BLOCK_SIZES[block_format]
    rng = np.random.default_rng(num_rows)
    raw = rng.integers(0, 256, (num_rows, 512 // block_size, block_bytes), dtype=np.uint8)
    begin, end = SCALES.get(block_format, (0, 4 if block_format in TWO_SCALES else 2))
    scales = rng.standard_normal((*raw.shape[:2], (end - begin) // 2)).astype(np.float16)
    raw[..., begin:end] = scales.view(np.uint8)
    return BlocksTensor(name, block_format, torch.from_numpy(raw.reshape(num_rows, -1)))


@pytest.mark.parametrize("block_format", STORED)
def test_formats_that_kernels_execute_are_kept_byte_for_byte(block_format: str) -> None:
    builder = start(method(), 512)
    tensor = random_tensor(block_format)
    builder.load("weight", tensor)
    weight = builder.finalize()
    assert (weight.format, weight.parts) == (block_format, ())
    assert set(weight.tensors) == {"blocks"}
    assert torch.equal(weight.tensors["blocks"], tensor.blocks)


def test_values_in_fives_become_8_bit_blocks_without_a_loss() -> None:
    builder = start(method(), 512)
    tensor = random_tensor("q5_0")
    builder.load("weight", tensor)
    weight = builder.finalize()
    assert weight.format == "q8_0"
    assert torch.equal(values_of(weight), tensor.to_dense(torch.float32))


@pytest.mark.parametrize("block_format", OTHERS)
def test_other_blocks_become_8_bit_blocks_within_half_a_step(block_format: str) -> None:
    builder = start(method(), 512)
    tensor = random_tensor(block_format)
    builder.load("weight", tensor)
    weight = builder.finalize()
    assert weight.format == "q8_0"
    exact = tensor.to_dense(torch.float32).view(6, -1, 32)
    error = (values_of(weight).view(6, -1, 32) - exact).abs()
    # the largest value may lie beyond 127 steps by the rounding of the scale to float16
    step = exact.abs().amax(-1, keepdim=True) / 127
    assert bool((error <= step * (0.5 + 127 * 2**-11) + 1e-7).all())


@pytest.mark.parametrize("block_format", OTHERS)
def test_other_blocks_are_dense_if_that_is_wanted(block_format: str) -> None:
    builder = start(method(other_blocks="dense"), 512)
    tensor = random_tensor(block_format)
    builder.load("weight", tensor)
    weight = builder.finalize()
    assert weight.format == "dense"
    assert torch.equal(weight.tensors["weight"], tensor.to_dense(torch.float32))


def test_half_precision_tensors_become_dense_in_the_dtype_of_the_model() -> None:
    builder = start(method(), 512)
    values = torch.randn(6, 512).half()
    builder.load("weight", DenseTensor("t", values))
    weight = builder.finalize()
    assert weight.format == "dense"
    assert torch.equal(weight.tensors["weight"], values.float())


def test_a_merged_projection_has_parts_where_its_formats_differ() -> None:
    parts = (("a", 4), ("b", 2), ("c", 6), ("d", 2))
    builder = start(method(), 512, parts=parts, has_bias=True)
    tensors = {
        "a": random_tensor("q4_1", 4),
        "b": random_tensor("q4_1", 2),
        "c": random_tensor("q8_0", 6),
        "d": DenseTensor("t", torch.randn(2, 512)),
    }
    biases = {name: torch.randn(rows) for name, rows in parts}
    for name in reversed(tensors):
        builder.load(name, tensors[name])
        builder.load(name, DenseTensor("bias", biases[name]), is_bias=True)
    weight = builder.finalize()
    assert (weight.format, weight.out_features) == ("mixed", 14)
    assert weight.formats == {"q4_1", "q8_0", "dense"}
    assert [(part.format, part.out_features) for part in weight.parts] == [
        ("q4_1", 6),
        ("q8_0", 6),
        ("dense", 2),
    ]
    expected = torch.cat([tensor.to_dense(torch.float32) for tensor in tensors.values()])
    assert torch.equal(values_of(weight), expected)
    joined = torch.cat([part.tensors["bias"] for part in weight.parts])
    assert torch.equal(joined, torch.cat(list(biases.values())))


def test_parts_that_come_to_the_same_format_are_one_weight() -> None:
    builder = start(method(), 512, parts=(("a", 4), ("b", 2)))
    builder.load("a", random_tensor("q6_k", 4))
    builder.load("b", random_tensor("q8_0", 2))
    weight = builder.finalize()
    assert (weight.format, weight.parts) == ("q8_0", ())
    assert weight.tensors["blocks"].shape == (6, 512 // 32 * 34)


def test_what_became_of_the_formats_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    quantization = method()
    for name in ("q4_1", "q4_1", "q8_0", "q6_k", "q5_0"):
        builder = start(quantization, 512)
        builder.load("weight", random_tensor(name))
        builder.finalize()
    with caplog.at_level("INFO", logger="hotshoe_quantization"):
        quantization.finish()
    assert caplog.messages == [
        "quantization=gguf: weights are 2 q4_1, 1 q5_0 as q8_0, 1 q6_k as q8_0, 1 q8_0"
    ]


def test_a_checkpoint_of_another_kind_is_refused(tiny_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(str(tiny_path), quantization="gguf")
    assert str(error.value) == (
        "quantization.name 'gguf' keeps the blocks of a GGUF file, but the model is stored as "
        "safetensors; set quantization to 'int8' or 'none'"
    )


def test_kernels_that_know_dense_weights_alone_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as error:
        LLM(quantization="gguf", kernels="torch", max_model_len=64)
    assert str(error.value) == (
        "kernels.name 'torch' can't be used: weight formats 'q4_0', 'q4_1', 'q8_0' are not "
        "supported (it has dense), needed by quantization 'gguf'"
    )


def write_file(path: Path, *, is_tied: bool) -> None:
    """A llama model, whose q and k have their rows in another order than the model wants."""
    hidden, heads, kv_heads, head_dim, inner, vocab = 64, 4, 2, 16, 96, 40
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    formats = gguf.GGMLQuantizationType
    tensors = {
        "token_embd": ((vocab, hidden), formats.Q8_0),
        "output": ((vocab, hidden), formats.Q4_0),
        "blk.0.attn_q": ((heads * head_dim, hidden), formats.Q4_1),
        "blk.0.attn_k": ((kv_heads * head_dim, hidden), formats.Q4_1),
        "blk.0.attn_v": ((kv_heads * head_dim, hidden), formats.Q8_0),
        "blk.0.attn_output": ((hidden, heads * head_dim), formats.Q5_0),
        "blk.0.ffn_gate": ((inner, hidden), formats.F16),
        "blk.0.ffn_up": ((inner, hidden), formats.Q4_0),
        "blk.0.ffn_down": ((hidden, inner), formats.Q4_0),
    }
    if is_tied:
        del tensors["output"]
    for name, (shape, kind) in tensors.items():
        values = rng.standard_normal(shape, dtype=np.float32) / 4
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", rng.random(hidden, dtype=np.float32) + 0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_file_run_from_its_blocks_gives_the_logits_of_its_values(
    tmp_path: Path, is_tied: bool
) -> None:
    write_file(tmp_path / "model.gguf", is_tied=is_tied)
    logits = []
    for quantization in (none, gguf_plugin):
        parts = Parts(
            model=llama.hotshoe_component(),
            attention=torch_sdpa.hotshoe_component(),
            kernels=dequantizing_kernels(),
            quantization=quantization.hotshoe_component(),
        )
        with open_checkpoint(str(tmp_path / "model.gguf")) as checkpoint:
            runner = DirectRunner(
                checkpoint.config,
                checkpoint.tensors(),
                parts,
                checkpoint_format=checkpoint.format,
            )
        logits.append(runner.step({"a": [3, 1, 4, 1, 5, 9, 2, 6]})["a"])
    assert torch.equal(*logits)


@pytest.mark.parametrize("is_tied", [False, True])
def test_native_kernels_predict_much_what_the_values_do(tmp_path: Path, is_tied: bool) -> None:
    write_file(tmp_path / "model.gguf", is_tied=is_tied)
    predictions = []
    for quantization, kernels in (
        (none, dequantizing_kernels()),
        (gguf_plugin, cpu_kernels.hotshoe_component()),
    ):
        parts = Parts(
            model=llama.hotshoe_component(),
            attention=torch_sdpa.hotshoe_component(),
            kernels=kernels,
            quantization=quantization.hotshoe_component(),
        )
        with open_checkpoint(str(tmp_path / "model.gguf")) as checkpoint:
            runner = DirectRunner(
                checkpoint.config,
                checkpoint.tensors(),
                parts,
                checkpoint_format=checkpoint.format,
            )
        tokens = torch.randint(0, 40, (60,), generator=torch.Generator().manual_seed(1))
        predictions.append(runner.step({"a": tokens.tolist()})["a"].log_softmax(-1))
    exact, quantized = predictions
    assert 0 < (exact.exp() * (exact - quantized)).sum(-1).mean() < 0.005


def test_rows_of_blocks_are_in_the_order_of_the_model(tmp_path: Path) -> None:
    write_file(tmp_path / "model.gguf", is_tied=True)
    with open_checkpoint(str(tmp_path / "model.gguf")) as checkpoint:
        permuted = [one for one in checkpoint.tensors() if "q_proj" in one.name]
        for tensor in permuted:
            raw, dense = tensor.raw(), tensor.to_dense(torch.float32)
            assert torch.equal(dequantize(raw, tensor.format, torch.float32), dense)
    stored = {one.name: one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    source = stored["blk.0.attn_q.weight"]
    # of each head's 16 rows, the file has the first half at even places, the second at odd ones
    rows = torch.from_numpy(source.data.copy()).view(4, 8, 2, -1).transpose(1, 2).reshape(64, -1)
    assert torch.equal(raw, rows)
