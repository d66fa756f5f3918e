"""Llama models of any size with random weights, for measuring how speed depends on size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hotshoe.testing.models import write_byte_tokenizer

SHAPES: dict[str, dict[str, int]] = {
    "135M": {"hidden": 576, "intermediate": 1536, "layers": 30, "heads": 9, "kv_heads": 3},
    "360M": {"hidden": 960, "intermediate": 2560, "layers": 32, "heads": 15, "kv_heads": 5},
    "1.7B": {"hidden": 2048, "intermediate": 8192, "layers": 24, "heads": 32, "kv_heads": 32},
}
"""By number of parameters, as the SmolLM2 family has them."""

_POOL_SIZE = 1 << 24


def model_config(size: str) -> dict[str, Any]:
    """The ``config.json`` of a size."""
    shape = SHAPES[size]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "torch_dtype": "bfloat16",
    }


def write_random_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write it, one file a layer, so that no more than a layer is in memory.

    The values are pieces of one pool of random numbers: drawing billions takes minutes, and to a
    matrix product they are all the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_byte_tokenizer(folder)
    pool = torch.randn(_POOL_SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
    pool *= 0.02
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, part in enumerate(_parts(config, pool)):
        name = f"model-{number:05d}.safetensors"
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
        total_size += sum(tensor.nbytes for tensor in part.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")


def _parts(config: Mapping[str, Any], pool: Tensor) -> Iterator[dict[str, Tensor]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int) -> Tensor:
        repeats = -(-rows * columns // len(pool))
        return pool.repeat(repeats)[: rows * columns].view(rows, columns).clone()

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    yield {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield {
            f"{prefix}input_layernorm.weight": ones.clone(),
            f"{prefix}post_attention_layernorm.weight": ones.clone(),
            f"{prefix}self_attn.q_proj.weight": matrix(width, hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_width, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_width, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, width),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        }
