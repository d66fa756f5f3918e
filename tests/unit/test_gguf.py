"""The GGUF reader against files written, and blocks dequantized, by the reference package."""

import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from hotshoe.errors import ModelLoadError
from hotshoe.weights.checkpoint import Checkpoint, open_checkpoint
from hotshoe.weights.gguf import BLOCK_SIZES, read_gguf_header
from hotshoe.weights.gguf_blocks import DENSE_DTYPES, dequantize

BLOCK_FORMATS = [name for name in BLOCK_SIZES if name not in DENSE_DTYPES]
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 40


def write_model(
    path: Path,
    architecture: str = "llama",
    *,
    tied: bool = False,
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, str | int | float] | None = None,
) -> dict[str, np.ndarray]:
    """A two-layer random model; returns its tensors under their GGUF names."""
    # transformers builds qwen3 with heads of 128 whatever the header says
    head_dim = 128 if architecture == "qwen3" else HEAD_DIM
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {"token_embd.weight": random(VOCAB, HIDDEN), "output_norm.weight": random(HIDDEN)}
    if not tied:
        tensors["output.weight"] = random(VOCAB, HIDDEN)
    for layer in range(2):
        shapes = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HEADS * head_dim, HIDDEN),
            "attn_k": (KV_HEADS * head_dim, HIDDEN),
            "attn_v": (KV_HEADS * head_dim, HIDDEN),
            "attn_output": (HIDDEN, HEADS * head_dim),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        tensors |= {f"blk.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        if architecture == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                tensors[f"blk.{layer}.{name}.bias"] = random(shapes[name][0])
        if architecture == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                tensors[f"blk.{layer}.{name}.weight"] = random(head_dim)
    tensors |= extra or {}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def embedded() -> Iterator[Checkpoint]:
    with open_checkpoint("embedded") as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def reference(embedded: Checkpoint) -> gguf.GGUFReader:
    return gguf.GGUFReader(embedded.path)


def dense_tensors(path: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(str(path)) as checkpoint:
        return {tensor.name: tensor.to_dense(torch.float32) for tensor in checkpoint.tensors()}


@pytest.mark.parametrize("block_format", BLOCK_FORMATS)
def test_every_block_format_dequantizes_to_the_bits_of_the_reference(block_format: str) -> None:
    block_size, block_bytes = BLOCK_SIZES[block_format]
    rng = np.random.default_rng(1)
    # random bytes, but for the float16 scales: NaN in them compares unequal
    raw = rng.integers(0, 256, (5, 3, block_bytes), dtype=np.uint8)
    scales = rng.standard_normal((5, 3, 2)).astype(np.float16).view(np.uint8)
    starts = {
        "q2_k": (80, 84),
        "q3_k": (108, 110),
        "q6_k": (208, 210),
        "q4_0": (0, 2),
        "q5_0": (0, 2),
        "q8_0": (0, 2),
    }
    start, stop = starts.get(block_format, (0, 4))
    raw[..., start:stop] = scales[..., : stop - start]
    rows = raw.reshape(5, -1)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[block_format.upper()])
    actual = dequantize(torch.from_numpy(rows), block_format, torch.float32)
    assert actual.shape == (5, 3 * block_size)
    assert np.array_equal(actual.numpy(), expected)


def test_dequantizing_in_chunks_covers_tensors_larger_than_one_chunk() -> None:
    rng = np.random.default_rng(2)
    values = rng.standard_normal((1100, 256), dtype=np.float32)
    rows = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)
    actual = dequantize(torch.from_numpy(rows), "q8_0", torch.bfloat16)
    assert torch.equal(actual, torch.from_numpy(expected).bfloat16())


def test_header_of_the_embedded_model_equals_the_reference_reader(
    embedded: Checkpoint, reference: gguf.GGUFReader
) -> None:
    header = read_gguf_header(embedded.path)
    for key in ("llama.block_count", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        assert header.metadata[key] == reference.fields[key].contents()
    located = {name: (info.offset, info.num_bytes) for name, info in header.tensors.items()}
    assert located == {t.name: (t.data_offset, int(t.n_bytes)) for t in reference.tensors}


def test_embedded_tensors_equal_the_reference_dequantization(
    embedded: Checkpoint, reference: gguf.GGUFReader
) -> None:
    sources = {tensor.name: tensor for tensor in reference.tensors}
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for tensor in embedded.tensors():
        if tensor.name in names:
            source = sources[names.pop(tensor.name)]
            expected = gguf.quants.dequantize(source.data, source.tensor_type)
            assert np.array_equal(tensor.to_dense(torch.float32).numpy(), expected)
    assert not names


@pytest.mark.slow
def test_all_embedded_tensors_equal_the_reference_dequantization(
    embedded: Checkpoint, reference: gguf.GGUFReader
) -> None:
    for tensor, source in zip(embedded.tensors(), reference.tensors, strict=True):
        expected = gguf.quants.dequantize(source.data, source.tensor_type)
        actual = tensor.to_dense(torch.float32).numpy()
        if "q_proj" in tensor.name or "k_proj" in tensor.name:
            assert sorted(actual[:, 0]) == sorted(expected[:, 0])  # their rows are moved
        else:
            assert np.array_equal(actual, expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_row_order_equal_what_transformers_loads(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path / "tiny.gguf", architecture, tied=tied)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="tiny.gguf",
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    expected = dict(reference.state_dict())
    if tied:
        del expected["lm_head.weight"]
    actual = dense_tensors(tmp_path / "tiny.gguf")
    assert actual.keys() == expected.keys()
    for name, values in actual.items():
        assert torch.equal(values, expected[name]), name
    with open_checkpoint(str(tmp_path / "tiny.gguf")) as checkpoint:
        config = checkpoint.config
    assert config["architectures"] == [type(reference).__name__]
    for key in ("hidden_size", "num_key_value_heads", "tie_word_embeddings"):
        assert config[key] == getattr(reference.config, key), key
    assert config["head_dim"] == reference.model.layers[0].self_attn.head_dim
    assert config["rms_norm_eps"] == 1e-6
    assert config["rope_theta"] == 5000.0
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_raw_blocks_have_their_rows_in_the_same_order_as_the_values(embedded: Checkpoint) -> None:
    for tensor in embedded.tensors():
        if tensor.name == "model.layers.3.self_attn.k_proj.weight":
            raw = tensor.raw()
            assert raw.dtype == torch.uint8
            assert raw.shape == (192, 576 // 32 * 20)
            values = dequantize(raw, tensor.format, torch.float32)
            assert torch.equal(values, tensor.to_dense(torch.float32))
            return
    pytest.fail("the tensor is missing")


def test_llama3_rope_factors_become_the_config_they_were_made_from(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = {**scaling, "rope_theta": 500000.0}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=1,
        rope_parameters=rope,
        max_position_embeddings=131072,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 128, 2) / 128)
    factors = (plain / scaled).numpy().astype(np.float32)
    extra = {"rope_freqs.weight": factors}
    write_model(tmp_path / "a.gguf", extra=extra, metadata={"llama.rope.freq_base": 500000.0})
    with open_checkpoint(str(tmp_path / "a.gguf")) as checkpoint:
        assert checkpoint.config["rope_scaling"] == scaling
        assert "rope_freqs" not in "".join(tensor.name for tensor in checkpoint.tensors())

    write_model(tmp_path / "b.gguf", extra={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(ModelLoadError, match=r"unknown rope factors.*Llama 3\.1"):
        open_checkpoint(str(tmp_path / "b.gguf"))


def test_linear_rope_scaling_is_kept_and_an_unknown_kind_refused(tmp_path: Path) -> None:
    linear: dict[str, str | int | float] = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.5,
    }
    write_model(tmp_path / "a.gguf", metadata=linear)
    with open_checkpoint(str(tmp_path / "a.gguf")) as checkpoint:
        assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}
    write_model(tmp_path / "b.gguf", metadata=linear | {"llama.rope.scaling.type": "longrope"})
    with pytest.raises(ModelLoadError, match="rope scaling is 'longrope', supported: none, linear"):
        open_checkpoint(str(tmp_path / "b.gguf"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "mixtures of experts, which is not supported in GGUF"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, supported: heads of 16"),
        ({"split.count": 3}, r"one of 3 parts; join them first \(llama-gguf-split --merge\)"),
        ({"llama.attention.head_count": 0}, "head_count' is 0, expected int"),
        ({"llama.block_count": "two"}, "'llama.block_count' is 'two', expected int"),
    ],
)
def test_variants_that_cannot_be_expressed_are_refused_by_name(
    tmp_path: Path, metadata: dict[str, str | int | float], message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, metadata=metadata)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(str(path))


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "gemma9")
    with pytest.raises(ModelLoadError, match="architecture 'gemma9'; supported in GGUF: llama, mi"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    extra = {"blk.0.ssm_in.weight": np.zeros((4, 32), np.float32)}
    write_model(tmp_path / "m.gguf", extra=extra)
    with (
        open_checkpoint(str(tmp_path / "m.gguf")) as checkpoint,
        pytest.raises(ModelLoadError, match=r"'blk\.0\.ssm_in\.weight', which has no place"),
    ):
        list(checkpoint.tensors())


def test_unsupported_block_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    data = np.zeros((2, 18), np.uint8)
    writer.add_tensor("x.weight", data, raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="stored as iq4_nl, which is not supported; supported"):
        open_checkpoint(str(path))


def test_a_file_cut_at_any_byte_of_its_header_is_called_truncated(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    content = path.read_bytes()
    header_size = min(info.offset for info in read_gguf_header(path).tensors.values())
    for size in [*range(4, header_size, 37), len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(ModelLoadError, match=r"truncated.*download it again|truncated or dam"):
            open_checkpoint(str(path))


def test_random_damage_to_a_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    content = path.read_bytes()
    rng = np.random.default_rng(3)
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        position = int(rng.integers(4, 3000))
        damaged[position] = int(rng.integers(0, 256))
        path.write_bytes(damaged)
        try:
            with open_checkpoint(str(path)) as checkpoint:
                for tensor in checkpoint.tensors():
                    tensor.raw()
        except ModelLoadError:
            num_refused += 1
    assert num_refused > 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"<html>not found</html>", "not a GGUF file: it starts with b'<htm'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "'general.architecture' is None, expected str"),
    ],
    ids=["empty", "html", "version", "big-endian", "counts", "nothing"],
)
def test_files_that_are_no_gguf_model_say_why(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(str(tmp_path / "m.gguf"))
