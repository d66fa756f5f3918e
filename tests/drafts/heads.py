"""Heads with random weights for the tiny target, written in the layouts that heads are published
in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hotshoe.testing.models import write_tiny_checkpoint

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
VOCAB = 259


def layer_config(**overrides: Any) -> dict[str, Any]:
    """A Llama's fields, of one layer."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
    }
    return config | overrides


def write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Config and safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def random_matrix(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.randn((rows, columns), generator=generator) * 1.5 * columns**-0.5


def eagle3_tensors(seed: int, draft_vocab: int, num_features: int = 3) -> dict[str, Tensor]:
    """The lean layout: neither embedding nor head."""
    generator = torch.Generator().manual_seed(seed)

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(HIDDEN, generator=generator)

    ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    return {
        "fc.weight": random_matrix(generator, HIDDEN, num_features * HIDDEN),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        **layer_tensors(generator, "midlayer.", 2 * HIDDEN),
        "norm.weight": norm(),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": known,
    }


def layer_tensors(generator: torch.Generator, name: str, width: int) -> dict[str, Tensor]:
    """Attention and MLP."""
    kv = KV_HEADS * HEAD_DIM
    return {
        f"{name}self_attn.q_proj.weight": random_matrix(generator, HEADS * HEAD_DIM, width),
        f"{name}self_attn.k_proj.weight": random_matrix(generator, kv, width),
        f"{name}self_attn.v_proj.weight": random_matrix(generator, kv, width),
        f"{name}self_attn.o_proj.weight": random_matrix(generator, HIDDEN, HEADS * HEAD_DIM),
        f"{name}mlp.gate_proj.weight": random_matrix(generator, INTERMEDIATE, HIDDEN),
        f"{name}mlp.up_proj.weight": random_matrix(generator, INTERMEDIATE, HIDDEN),
        f"{name}mlp.down_proj.weight": random_matrix(generator, HIDDEN, INTERMEDIATE),
    }


def write_eagle3(path: Path, *, seed: int = 1, draft_vocab: int = 100) -> Path:
    """An EAGLE-3 head in the lean layout."""
    config = layer_config(
        draft_vocab_size=draft_vocab,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 1, 2]},
    )
    return write(path, config, eagle3_tensors(seed, draft_vocab))


def write_eagle1(path: Path, *, seed: int = 2) -> Path:
    """An EAGLE-1 head as its authors publish it: the first layer lacks its input norm."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "embed_tokens.weight": random_matrix(generator, VOCAB, HIDDEN),
        "fc.weight": random_matrix(generator, HIDDEN, 2 * HIDDEN),
        "fc.bias": 0.1 * torch.randn(HIDDEN, generator=generator),
        **layer_tensors(generator, "layers.0.", HIDDEN),
        "layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    return write(path, layer_config(architectures=["LlamaForCausalLM"]), tensors)


def write_normed_eagle1(path: Path, *, seed: int = 4) -> Path:
    """An EAGLE-1 head with layernorms, in the layout of speculators."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "fusion_fc.weight": random_matrix(generator, HIDDEN, 2 * HIDDEN),
        "fusion_fc.bias": 0.1 * torch.randn(HIDDEN, generator=generator),
        **layer_tensors(generator, "transformer.", HIDDEN),
    }
    for norm in (
        "embedding_layernorm",
        "transformer.input_layernorm",
        "transformer.post_attention_layernorm",
        "pre_lm_head_layernorm",
    ):
        tensors[f"{norm}.weight"] = 1 + 0.5 * torch.randn(HIDDEN, generator=generator)
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "fusion_bias": True,
        "layernorms": True,
        "transformer_layer_config": layer_config(),
    }
    return write(path, config, tensors)


def write_medusa(
    path: Path,
    *,
    seed: int = 3,
    num_heads: int = 3,
    num_blocks: int = 1,
    width: int | None = None,
    is_lean: bool = False,
) -> Path:
    """Medusa heads, each with a matrix of its own or all with the target's; their blocks have a
    projection where a width is given.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            name = f"{head}.{block}.linear"
            tensors[f"{name}.weight"] = random_matrix(generator, width or HIDDEN, HIDDEN)
            tensors[f"{name}.bias"] = 0.1 * torch.randn(width or HIDDEN, generator=generator)
            if width is not None:
                tensors[f"{head}.{block}.proj.weight"] = random_matrix(generator, HIDDEN, width)
        if not is_lean:
            tensors[f"{head}.{num_blocks}.weight"] = random_matrix(generator, VOCAB, HIDDEN)
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_blocks}
    return write(path, config, tensors)


def write_bigram_target(path: Path) -> Path:
    """A tiny target whose next token follows from the last one alone: neither attention nor MLPs
    add anything to the embedding.
    """
    write_tiny_checkpoint(path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name == "model.norm.weight":
            tensor.fill_(1)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def write_perfect_eagle3(path: Path, *, draft_vocab: int = VOCAB) -> Path:
    """Always right about the bigram target, as far as its vocabulary goes: each entry attends to
    itself alone, and passes the embedding of its token on.
    """
    tensors = dict.fromkeys(
        ("norm.weight", "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"),
        torch.ones(HIDDEN),
    )
    eye, nothing = torch.eye(HIDDEN), torch.zeros(HIDDEN, 2 * HIDDEN)
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    tensors |= {
        "fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{attention}q_proj.weight": nothing,
        f"{attention}k_proj.weight": nothing,
        # what comes in as the feature goes out again: only the embedding is left
        f"{attention}v_proj.weight": torch.cat([eye, -eye], 1),
        # rotated by their positions, equal queries and keys are most alike at equal positions
        f"{attention}q_proj.bias": torch.full((HIDDEN,), 20.0),
        f"{attention}k_proj.bias": torch.full((HIDDEN,), 20.0),
        f"{attention}v_proj.bias": torch.zeros(HIDDEN),
        f"{attention}o_proj.weight": eye,
        f"{mlp}gate_proj.weight": torch.zeros(INTERMEDIATE, HIDDEN),
        f"{mlp}up_proj.weight": torch.zeros(INTERMEDIATE, HIDDEN),
        f"{mlp}down_proj.weight": torch.zeros(HIDDEN, INTERMEDIATE),
        "d2t": torch.zeros(draft_vocab, dtype=torch.int64),
    }
    config = layer_config(
        num_key_value_heads=HEADS,
        attention_bias=True,
        draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=[1, 1, 2],
    )
    return write(path, config, {name: one.clone() for name, one in tensors.items()})


def write_perfect_eagle1(path: Path) -> Path:
    """Always right about the bigram target: it passes the embedding of its token on."""
    tensors = layer_tensors(torch.Generator().manual_seed(0), "layers.0.", HIDDEN)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    tensors["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    return write(path, layer_config(architectures=["LlamaForCausalLM"]), tensors)
