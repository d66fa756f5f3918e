"""What a model must read and multiply per token, and so how fast a machine can run it at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelCosts:
    """A dense decoder with grouped attention, as the Llama family has it.

    Attributes:
        layer_params: in the matrices of all layers.
        head_params: in the output head, read and multiplied where logits are wanted.
        kv_params_per_token: numbers that a token adds to the KV cache.
        attention_width: of all query heads and layers together.
        gguf_bytes: of all tensors as a GGUF file stores them, if there is one.
    """

    layer_params: int
    head_params: int
    kv_params_per_token: int
    attention_width: int
    gguf_bytes: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], gguf_bytes: int | None = None) -> ModelCosts:
        """From the fields of a ``config.json``."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads", heads)
        head_dim = config.get("head_dim") or hidden // heads
        width, kv_width = heads * head_dim, kv_heads * head_dim
        per_layer = hidden * (2 * width + 2 * kv_width + 3 * config["intermediate_size"])
        return cls(
            layer_params=layers * per_layer,
            head_params=hidden * config["vocab_size"],
            kv_params_per_token=2 * layers * kv_width,
            attention_width=layers * width,
            gguf_bytes=gguf_bytes,
        )

    def weight_bytes(self, variant: str) -> int:
        """What one step reads of the weights at least."""
        if variant in ("gguf", "q4_1") and self.gguf_bytes is not None:
            return self.gguf_bytes
        sizes = {"int8": 1, "fp32": 4}
        return (self.layer_params + self.head_params) * sizes.get(variant, 2)


@dataclass(frozen=True)
class Limits:
    """A machine's rates in bytes and operations a second."""

    read_per_s: float
    bf16_per_s: float
    int8_per_s: float


@dataclass(frozen=True)
class LeastTimes:
    """The least time that a job can take.

    Attributes:
        tpot_s: per decode step; None without one.
        separate_s: in total, if no op reads memory for the next one while it multiplies.
    """

    first_s: float
    total_s: float
    tpot_s: float | None
    separate_s: float


def least_times(
    costs: ModelCosts,
    limits: Limits,
    variant: str,
    prompt_lens: Sequence[int],
    max_tokens: int,
    shared_len: int = 0,
) -> LeastTimes:
    """Every prompt computed at once, then steps of one token per request.

    Each step takes at least the time to read the weights and every request's keys and values, and
    at least the time of its multiplications; the KV cache and attention are counted in bfloat16.
    ``separate_s`` says so of the layers, the output head and attention each by itself.

    Args:
        shared_len: tokens that all prompts begin with, computed once.
    """
    rate = limits.int8_per_s if variant in ("int8", "gguf", "q4_1") else limits.bf16_per_s
    weight_bytes = costs.weight_bytes(variant)
    weight_size = weight_bytes / (costs.layer_params + costs.head_params)
    num_prompts = len(prompt_lens)

    def attention_s(num_pairs: float) -> float:
        return 4 * num_pairs * costs.attention_width / limits.bf16_per_s

    def pairs(start: int, end: int) -> float:
        """How many earlier tokens the tokens of a range look at, together; themselves included."""
        return (end * (end + 1) - start * (start + 1)) / 2

    own = [length - shared_len for length in prompt_lens]
    num_tokens = shared_len + sum(own)
    num_pairs = pairs(0, shared_len) + sum(pairs(shared_len, length) for length in prompt_lens)
    multiplied = num_tokens * costs.layer_params + num_prompts * costs.head_params
    first_s = max(2 * multiplied / rate + attention_s(num_pairs), weight_bytes / limits.read_per_s)
    products = [
        (weight_size * n, 2 * num_prompts * n) for n in (costs.layer_params, costs.head_params)
    ]
    decode_s = separate_s = 0.0
    for step in range(1, max_tokens):
        num_seen = sum(prompt_lens) + num_prompts * step
        ops = [(num_bytes / limits.read_per_s, flops / rate) for num_bytes, flops in products]
        kv_bytes = 2 * costs.kv_params_per_token * num_seen
        ops.append((kv_bytes / limits.read_per_s, attention_s(num_seen)))
        decode_s += max(sum(read_s for read_s, _ in ops), sum(compute_s for _, compute_s in ops))
        separate_s += sum(max(op) for op in ops)
    tpot_s = decode_s / (max_tokens - 1) if max_tokens > 1 else None
    return LeastTimes(first_s, first_s + decode_s, tpot_s, first_s + separate_s)
