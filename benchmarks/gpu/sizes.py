"""What is measured: on a GPU, and in a dry run on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from random_model import model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that a dry run makes smaller.

    Attributes:
        components: config sections of every engine.
        kernels: plugin that is measured alone; ``attention`` likewise.
        models: ``config.json`` by name.
        decode: batch and context of the decode steps that are measured.
        num_steps: decode steps of each.
        prefill_tokens: of one prompt.
        attention_batch: requests and context of the attention kernel alone.
        linear_shapes: rows and columns of the weights that are multiplied alone.
        linear_rows: tokens that they are multiplied with.
        samplers: plugins whose draws are measured.
        drawn: numbers of tokens that they draw at once, and of those that they draw from.
        limit_bytes: of the tensor that is copied for the bandwidth; ``limit_width``: of the
            matrices that are multiplied for the rate.
        num_repeats: of what is measured alone.
        switched: model on which parts are turned off, and batches.
        compared: model, number of requests, least and most prompt tokens, output tokens of the
            comparison of throughput.
        peer_options: of transformers' continuous batching; empty: as it sizes itself.
    """

    device: str
    dtype: str
    components: Mapping[str, Any] = field(default_factory=dict)
    kernels: str
    attention: str
    models: Mapping[str, Mapping[str, Any]]
    decode: tuple[tuple[int, int], ...]
    num_steps: int
    prefill_tokens: int
    attention_batch: tuple[int, int]
    attention_heads: tuple[int, int, int]
    linear_shapes: tuple[tuple[int, int], ...]
    linear_rows: tuple[int, ...]
    samplers: tuple[str, ...]
    drawn: tuple[tuple[int, int], ...]
    limit_bytes: int
    limit_width: int
    num_repeats: int
    switched: tuple[str, tuple[int, ...]]
    compared: tuple[str, int, tuple[int, int], int]
    peer_options: Mapping[str, Any] = field(default_factory=dict)


FULL = Sizes(
    device="cuda",
    dtype="bfloat16",
    kernels="triton",
    attention="triton",
    models={size: model_config(size) for size in ("1.7B", "8B")},
    decode=((1, 128), (64, 2048)),
    num_steps=40,
    prefill_tokens=8192,
    attention_batch=(32, 8192),
    attention_heads=(32, 8, 128),
    linear_shapes=((28672, 4096), (4096, 14336)),
    linear_rows=(1, 16, 64),
    samplers=("triton", "standard"),
    drawn=((1, 151_936), (64, 49_152), (256, 151_936)),
    limit_bytes=4 * 2**30,
    limit_width=8192,
    num_repeats=30,
    switched=("1.7B", (1, 64)),
    compared=("1.7B", 128, (64, 512), 128),
)

_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "torch_dtype": "float32",
}

DRY = Sizes(
    device="cpu",
    dtype="float32",
    components={"kernels": "torch", "attention": "torch_sdpa", "sampler": "standard"},
    kernels="torch",
    attention="torch_sdpa",
    models={"tiny": model_config("1.7B", **_TINY)},
    decode=((1, 4), (4, 16)),
    num_steps=6,
    prefill_tokens=48,
    attention_batch=(2, 32),
    attention_heads=(4, 2, 16),
    linear_shapes=((64, 32),),
    linear_rows=(1, 4),
    samplers=("standard",),
    drawn=((2, 300),),
    limit_bytes=2**16,
    limit_width=32,
    num_repeats=2,
    switched=("tiny", (1, 4)),
    compared=("tiny", 2, (4, 8), 3),
    peer_options={"num_blocks": 16, "max_batch_tokens": 64, "page_size": 32},
)
