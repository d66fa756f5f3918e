"""A GGUF file seen as a Hugging Face checkpoint: config, tensor names and row order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotshoe.errors import ModelLoadError
from hotshoe.weights.files import FileReader
from hotshoe.weights.gguf import GGUFHeader, GGUFTensorInfo, read_gguf_header
from hotshoe.weights.gguf_blocks import DENSE_DTYPES, dequantize

# GGUF architecture -> (Hugging Face architecture, model type)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# The converter interleaves the two halves of each rotary head for these; undone while reading.
PERMUTED_ARCHITECTURES = ("llama", "mistral")

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GLOBAL_PATTERN = re.compile(r"(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFTensor:
    """One tensor of a GGUF file under its Hugging Face name."""

    def __init__(
        self, name: str, info: GGUFTensorInfo, file: FileReader, num_permuted_heads: int | None
    ) -> None:
        self._name = name
        self._info = info
        self._file = file
        self._num_permuted_heads = num_permuted_heads

    @property
    def name(self) -> str:
        """Hugging Face style."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost dimension first."""
        return self._info.shape

    @property
    def format(self) -> str:
        """As stored."""
        return self._info.format

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """The values, rows in Hugging Face order."""
        raw = self.raw()
        if self.format in DENSE_DTYPES:
            return raw.to(dtype)
        return dequantize(raw, self.format, dtype).view(self.shape)

    def raw(self) -> Tensor:
        """The stored bytes, rows in Hugging Face order: permuting rows leaves blocks whole."""
        info = self._info
        rows = torch.empty(info.num_rows, info.num_bytes // info.num_rows, dtype=torch.uint8)
        self._file.read_into(rows, info.offset, what=f"tensor {self._name!r}")
        dense_dtype = DENSE_DTYPES.get(info.format)
        if dense_dtype is not None:
            rows = rows.view(dense_dtype).view(info.shape)
        if self._num_permuted_heads is not None:
            self._check_heads(rows.shape[0], self._num_permuted_heads)
            rows = _undo_permutation(rows, self._num_permuted_heads)
        return rows

    def _check_heads(self, num_rows: int, num_heads: int) -> None:
        if num_rows % (2 * num_heads):
            raise ModelLoadError(
                f"tensor {self._name!r} has {num_rows} rows, which don't make {num_heads} heads of "
                "an even size; convert the model again"
            )


def _undo_permutation(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from (pair, half) order back to (half, pair) order."""
    half = rows.shape[0] // num_heads // 2
    paired = rows.view(num_heads, half, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


class GGUFTensors:
    """The tensors and config of one GGUF file."""

    def __init__(self, path: Path) -> None:
        self.header = read_gguf_header(path)
        _refuse_split_file(self.header)
        self.config = read_config(self.header)
        self._file = FileReader(path)

    @property
    def generation_config(self) -> dict[str, Any]:
        """Token ids that end a generation; GGUF keeps an end of turn apart from the end of text."""
        metadata = self.header.metadata
        eos = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        ids = list(dict.fromkeys(token_id for token_id in eos if token_id is not None))
        return {"eos_token_id": ids} if ids else {}

    @property
    def num_bytes(self) -> int:
        """Over all tensors, as stored."""
        return sum(info.num_bytes for info in self.header.tensors.values())

    @property
    def dtype(self) -> str:
        """Of the embedding, which every file has; bfloat16 if that is stored in blocks."""
        stored = self.header.tensors["token_embd.weight"].format
        return stored if stored in DENSE_DTYPES else "bfloat16"

    def __iter__(self) -> Iterator[GGUFTensor]:
        architecture = self.header.metadata["general.architecture"]
        permuted: dict[str, int] = {}
        if architecture in PERMUTED_ARCHITECTURES:
            permuted["attn_q"] = self.config["num_attention_heads"]
            permuted["attn_k"] = self.config["num_key_value_heads"]
        for info in self.header.tensors.values():
            if info.name == _ROPE_FACTORS:
                continue  # became part of the config
            name, kind = self._translate(info.name)
            yield GGUFTensor(name, info, self._file, permuted.get(kind))

    def close(self) -> None:
        """Close the file; its tensors can't be read any more."""
        self._file.close()

    def _translate(self, name: str) -> tuple[str, str]:
        """The Hugging Face name, and which of a layer's tensors it is."""
        if match := _LAYER_PATTERN.fullmatch(name):
            layer, kind, suffix = match.groups()
            if kind in _LAYER_NAMES:
                return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}", kind
        elif (match := _GLOBAL_PATTERN.fullmatch(name)) and match[1] in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[match[1]]}.{match[2]}", match[1]
        raise ModelLoadError(
            f"GGUF file {str(self.header.path)!r} holds tensor {name!r}, which has no place in a "
            f"{self.config['model_type']} model; use its safetensors checkpoint"
        )


def _refuse_split_file(header: GGUFHeader) -> None:
    num_parts = header.metadata.get("split.count", 1)
    if num_parts not in (0, 1):
        raise ModelLoadError(
            f"GGUF file {str(header.path)!r} is one of {num_parts} parts; "
            "join them first (llama-gguf-split --merge)"
        )


def read_config(header: GGUFHeader) -> dict[str, Any]:
    """A ``config.json`` from a GGUF header.

    Raises:
        ModelLoadError: for an architecture or variant that can't be expressed.
    """
    metadata = _Metadata(header)
    architecture = metadata.require("general.architecture", str, with_prefix=False)
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"GGUF file {str(header.path)!r} holds architecture {architecture!r}; "
            f"supported in GGUF: {', '.join(ARCHITECTURES)}; "
            "other models may work from safetensors"
        )
    if metadata.get("expert_count", 0):
        raise metadata.error(f"{architecture}.expert_count is set: mixtures of experts", "")
    huggingface_name, model_type = ARCHITECTURES[architecture]
    embedding = metadata.tensor("token_embd.weight")
    num_heads = metadata.require("attention.head_count", int)
    hidden_size = metadata.require("embedding_length", int)
    head_dim = metadata.get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise metadata.error(
                f"{architecture}.{key} is {metadata.get(key, None)!r}", f"heads of {head_dim}"
            )
    config: dict[str, Any] = {
        "architectures": [huggingface_name],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.require("block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", num_heads) or num_heads,
        "head_dim": head_dim,
        "intermediate_size": metadata.require("feed_forward_length", int),
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": _shortest(metadata.require("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(metadata.get("rope.freq_base", 10000.0)),
        "max_position_embeddings": metadata.require("context_length", int),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    if scaling := _rope_scaling(metadata):
        config["rope_scaling"] = scaling
    if (window := metadata.get("attention.sliding_window", None)) is not None:
        config["sliding_window"] = window
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        config[f"{name}_token_id"] = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


class _Metadata:
    """Typed look-ups under an architecture's prefix."""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header
        self._values: Mapping[str, Any] = header.metadata
        self.prefix = f"{header.metadata.get('general.architecture')}."

    def get(self, key: str, default: Any) -> Any:
        value = self._values.get(self.prefix + key, default)
        if isinstance(value, list):
            raise self.error(f"{self.prefix}{key} differs between layers", "one value for all")
        if isinstance(default, int) and (not isinstance(value, int) or value < 0):
            raise self.error(f"{self.prefix}{key} is {value!r}", "a count")
        return value

    def require(self, key: str, kind: type, *, with_prefix: bool = True) -> Any:
        full_key = self.prefix + key if with_prefix else key
        value = self._values.get(full_key)
        if not isinstance(value, kind) or value == 0:
            raise ModelLoadError(
                f"GGUF file {str(self._header.path)!r}: metadata {full_key!r} is {value!r}, "
                f"expected {kind.__name__}; convert the model again"
            )
        return value

    def tensor(self, name: str) -> GGUFTensorInfo:
        if name not in self._header.tensors:
            raise ModelLoadError(
                f"GGUF file {str(self._header.path)!r} has no tensor {name!r}: "
                "it is no language model"
            )
        return self._header.tensors[name]

    def rope_factors(self) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """``[head_dim / 2]``, by which each rotary frequency is divided."""
        info = self._header.tensors.get(_ROPE_FACTORS)
        if info is None:
            return None
        if info.format != "float32":
            raise self.error(f"{_ROPE_FACTORS} is stored as {info.format}", "float32")
        return np.fromfile(self._header.path, np.float32, count=info.shape[-1], offset=info.offset)

    def error(self, problem: str, supported: str) -> ModelLoadError:
        hint = f", supported: {supported}" if supported else ", which is not supported in GGUF"
        return ModelLoadError(
            f"GGUF file {str(self._header.path)!r}: {problem}{hint}; use its safetensors checkpoint"
        )


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    factors = metadata.rope_factors()
    if factors is not None:
        return _llama3_scaling(metadata, factors)
    kind = metadata.get("rope.scaling.type", None)
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear", None))
    if kind == "none" or factor is None:
        return None
    scaling: dict[str, Any] = {"rope_type": kind or "linear", "factor": _shortest(factor)}
    if kind == "yarn":
        original = metadata.get("rope.scaling.original_context_length", None)
        if original is not None:
            scaling["original_max_position_embeddings"] = original
    elif kind not in (None, "linear"):
        raise metadata.error(f"rope scaling is {kind!r}", "none, linear, yarn, llama3")
    return scaling


def _llama3_scaling(
    metadata: _Metadata, factors: np.ndarray[Any, np.dtype[np.float32]]
) -> dict[str, Any]:
    """Llama 3.1's parameters from the factors that the converter computed with them.

    The header doesn't keep the parameters. All published models use the same ones except
    ``factor``, which is the largest of the factors; recomputing the rest proves it.
    """
    factor = round(float(factors.max()), 3)  # computed in float32
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = metadata.get("rope.freq_base", 10000.0)
    expected = _llama3_factors(theta, len(factors), factor)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise metadata.error(f"{_ROPE_FACTORS} holds unknown rope factors", "those of Llama 3.1")
    return scaling


def _llama3_factors(
    theta: float, num_frequencies: int, factor: float
) -> np.ndarray[Any, np.dtype[np.float64]]:
    frequencies = theta ** (-np.arange(num_frequencies) / num_frequencies)
    rotations = 8192 * frequencies / (2 * np.pi)
    smooth = np.clip((rotations - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    result: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - smooth) / factor + smooth)
    return result


def _shortest(value: float) -> float:
    """The float that was meant before it was stored in 32 bits: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
