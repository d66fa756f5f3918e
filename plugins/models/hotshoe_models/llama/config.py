"""What the family's members differ in, read from a checkpoint's ``config.json``.

Fields that a file leaves out take the value that transformers gives them for that architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hotshoe.api import ModelLoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """One member of the family.

    Attributes:
        qkv_bias: whether the query, key and value projections have biases; ``o_bias`` and
            ``mlp_bias`` likewise.
        qk_norm: whether each head of q and k is normed before it is rotated.
        sliding_windows: by layer; None = the layer attends to all positions.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read the config of any architecture that this plugin serves.

        Raises:
            ModelLoadError: if a field is missing, or asks for something that these layers don't
                compute.
        """
        architecture = (config.get("architectures") or ["LlamaForCausalLM"])[0]
        traits = _TRAITS.get(architecture)
        if traits is None:
            raise ModelLoadError(
                f"architecture {architecture!r} is not of the Llama family; known: "
                f"{sorted(_TRAITS)}"
            )
        _refuse_unsupported(config)
        num_heads = _required(config, "num_attention_heads")
        hidden_size = _required(config, "hidden_size")
        has_bias = bool(config.get("attention_bias", False)) and traits.reads_attention_bias
        return cls(
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=_required(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or traits.num_kv_heads or num_heads,
            head_dim=config.get("head_dim") or traits.head_dim or hidden_size // num_heads,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=has_bias or traits.always_qkv_bias,
            o_bias=has_bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and traits.reads_mlp_bias,
            qk_norm=traits.qk_norm,
            sliding_windows=tuple(traits.windows(config)),
        )


def _required(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int):
        raise ModelLoadError(f"model config field {field!r} must be an integer, got {value!r}")
    return value


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(
            f"hidden_act {activation!r} is not supported by the Llama family plugin; allowed: "
            "'silu'"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for source in (config, rope):
        factor = source.get("partial_rotary_factor") or 1.0
        if factor != 1.0:
            raise ModelLoadError(
                f"partial_rotary_factor {factor!r} is not supported by the Llama family plugin; "
                "allowed: 1.0"
            )


def _no_windows(config: Mapping[str, Any]) -> list[int | None]:
    return [None] * config["num_hidden_layers"]


def _same_window(config: Mapping[str, Any]) -> list[int | None]:
    return [config.get("sliding_window", 4096)] * config["num_hidden_layers"]


def _upper_windows(config: Mapping[str, Any]) -> list[int | None]:
    """Qwen: by ``layer_types``, or else the layers from ``max_window_layers`` on."""
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    types = config.get("layer_types") or [
        "sliding_attention" if window is not None and i >= first else "full_attention"
        for i in range(num_layers)
    ]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != num_layers:
        raise ModelLoadError(
            f"layer_types must name 'full_attention' or 'sliding_attention' for each of "
            f"{num_layers} layers, got {types!r}"
        )
    return [window if kind == "sliding_attention" else None for kind in types]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What an architecture's name implies."""

    windows: Callable[[Mapping[str, Any]], list[int | None]] = _no_windows
    num_kv_heads: int | None = None
    head_dim: int | None = None
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    always_qkv_bias: bool = False
    qk_norm: bool = False


_TRAITS = {
    "LlamaForCausalLM": _Traits(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": _Traits(windows=_same_window, num_kv_heads=8),
    "Qwen2ForCausalLM": _Traits(windows=_upper_windows, num_kv_heads=32, always_qkv_bias=True),
    "Qwen3ForCausalLM": _Traits(
        windows=_upper_windows,
        num_kv_heads=32,
        head_dim=128,
        reads_attention_bias=True,
        qk_norm=True,
    ),
}
