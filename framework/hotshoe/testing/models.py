"""Tiny seeded checkpoints, complete with tokenizer, which transformers reads as well: no download,
and a reference to compare with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_BYTES = 256
END_OF_TEXT, IM_START, IM_END = NUM_BYTES, NUM_BYTES + 1, NUM_BYTES + 2
TINY_VOCAB_SIZE = NUM_BYTES + 3

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_llama_config(**overrides: Any) -> dict[str, Any]:
    """A ``config.json`` of two layers; keys given here replace or join those."""
    config = {
        "model_type": "llama",
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "torch_dtype": "float32",
    }
    return config | overrides


def write_tiny_checkpoint(
    path: Path,
    config: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    shards: int = 1,
    architecture: str = "LlamaForCausalLM",
    tokenizer: bool = True,
) -> Path:
    """Write ``config.json``, float32 safetensors and a tokenizer.

    Args:
        path: folder, made if needed.
        config: by default ``tiny_llama_config()``; must suit the architecture.
        seed: of the weights, which don't depend on the architecture's own initialisation: logits
            spread over several units, biases and norms are not trivial.
        shards: number of weight files; more than one come with an index.
        architecture: a causal language model class of transformers.
        tokenizer: whether to write the byte tokenizer too (``write_byte_tokenizer``).

    Returns:
        The folder.
    """
    fields = dict(tiny_llama_config() if config is None else config)
    fields["architectures"] = [architecture]
    path.mkdir(parents=True, exist_ok=True)
    _write_config(path, fields, architecture)
    _write_weights(path, _random_weights(path, architecture, seed), shards)
    if tokenizer:
        write_byte_tokenizer(path)
    return path


def write_byte_tokenizer(path: Path) -> None:
    """Write a byte-level BPE tokenizer without merges: ids 0 to 255 are the bytes, then come
    ``<|endoftext|>`` (begin and padding), ``<|im_start|>`` and ``<|im_end|>`` (end); with a ChatML
    template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer_class: Any = PreTrainedTokenizerFast  # transformers leaves it untyped
    tokenizer = tokenizer_class(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE, as GPT-2 defines it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


def _write_config(path: Path, fields: dict[str, Any], architecture: str) -> None:
    import transformers

    config_class = getattr(transformers, architecture).config_class
    fields["model_type"] = config_class.model_type
    (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def _random_weights(path: Path, architecture: str, seed: int) -> dict[str, Any]:
    import torch
    import transformers

    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class.from_pretrained(path))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():  # tied parameters are named once
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif parameter.ndim == 1:
            values = 0.1 * values
        elif "embed" in name:
            values *= 0.25  # or a tied head would repeat the last token for ever
        else:
            values *= 1.5 * parameter.shape[-1] ** -0.5
        weights[name] = values
    return weights


def _write_weights(path: Path, weights: dict[str, Any], shards: int) -> None:
    from safetensors.torch import save_file

    metadata = {"format": "pt"}
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata)
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, path / file_name, metadata)
        weight_map |= dict.fromkeys(part, file_name)
    total_size = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
