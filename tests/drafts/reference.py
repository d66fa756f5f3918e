"""What drafters draft according to the papers: straight-line torch over whole sequences, without
caches, batches or layers of the engine.
"""

# T=entries N=heads H=head_dim

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Features = Callable[[Sequence[int]], Sequence[Tensor]]
"""Of all tokens of a sequence, ``[T, hidden_size]`` by layer that the head reads."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def rotate(x_TNH: Tensor, theta: float) -> Tensor:
    half = x_TNH.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half) / half)
    angles = torch.arange(x_TNH.shape[0])[:, None, None] * frequencies
    left, right = x_TNH[..., :half], x_TNH[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def attention(config: Mapping[str, Any], weights: Weights, name: str, x: Tensor) -> Tensor:
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    length, theta = x.shape[0], config["rope_theta"]
    q = rotate(linear(weights, f"{name}q_proj", x).view(length, num_heads, -1), theta)
    k = rotate(linear(weights, f"{name}k_proj", x).view(length, num_kv_heads, -1), theta)
    v = linear(weights, f"{name}v_proj", x).view(length, num_kv_heads, -1)
    k, v = (one.repeat_interleave(num_heads // num_kv_heads, 1) for one in (k, v))
    scores = torch.einsum("tnh,snh->nts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("nts,snh->tnh", scores.softmax(-1), v)
    return linear(weights, f"{name}o_proj", mixed.flatten(1))


def mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    gated = F.silu(linear(weights, f"{name}gate_proj", x)) * linear(weights, f"{name}up_proj", x)
    return linear(weights, f"{name}down_proj", gated)


def eagle3_layer(
    config: Mapping[str, Any], weights: Weights, embedded: Tensor, feature: Tensor
) -> Tensor:
    """Output of the layer for every entry, from features that ``fc`` or the layer itself gave."""
    eps, name = config["rms_norm_eps"], "midlayer."
    normed = rms_norm(feature, weights[f"{name}hidden_norm.weight"], eps)
    embedded = rms_norm(embedded, weights[f"{name}input_layernorm.weight"], eps)
    residual = normed if config.get("norm_before_residual") else feature
    x = torch.cat([embedded, normed], -1)
    x = residual + attention(config, weights, f"{name}self_attn.", x)
    normed = rms_norm(x, weights[f"{name}post_attention_layernorm.weight"], eps)
    return x + mlp(weights, f"{name}mlp.", normed)


def eagle1_layer(
    config: Mapping[str, Any], weights: Weights, embedded: Tensor, feature: Tensor
) -> Tensor:
    """Likewise; there's no norm before attention."""
    x = linear(weights, "fc", torch.cat([embedded, feature], -1))
    x = x + attention(config, weights, "layers.0.self_attn.", x)
    normed = rms_norm(
        x, weights["layers.0.post_attention_layernorm.weight"], config["rms_norm_eps"]
    )
    return x + mlp(weights, "layers.0.mlp.", normed)


def normed_eagle1_layer(
    config: Mapping[str, Any], weights: Weights, embedded: Tensor, feature: Tensor
) -> Tensor:
    """Likewise, with norms of the embedding and before attention, by their names in the layout of
    speculators.
    """
    eps = config["rms_norm_eps"]
    embedded = rms_norm(embedded, weights["embedding_layernorm.weight"], eps)
    x = linear(weights, "fusion_fc", torch.cat([embedded, feature], -1))
    normed = rms_norm(x, weights["transformer.input_layernorm.weight"], eps)
    x = x + attention(config, weights, "transformer.self_attn.", normed)
    normed = rms_norm(x, weights["transformer.post_attention_layernorm.weight"], eps)
    return x + mlp(weights, "transformer.mlp.", normed)


def eagle_drafts(
    config: Mapping[str, Any],
    weights: Weights,
    features: Features,
    token_ids: Sequence[int],
    num_drafts: int,
) -> list[int]:
    """Greedy chain behind some tokens.

    Args:
        config: of the head.
        weights: of the head, with ``embed_tokens.weight`` and ``lm_head.weight``; EAGLE-3 by its
            names in the original layout, EAGLE-1 with norms in that of speculators.
        features: of the target.
        token_ids: committed ones; the target has computed all but the last.
        num_drafts: length of the chain.
    """
    is_eagle3 = "midlayer.hidden_norm.weight" in weights
    last_norm = weights.get("norm.weight" if is_eagle3 else "pre_lm_head_layernorm.weight")
    layer = (
        eagle3_layer if is_eagle3 else eagle1_layer if last_norm is None else normed_eagle1_layer
    )
    read = features(token_ids[:-1])
    known = linear(weights, "fc", torch.cat(list(read), -1)) if is_eagle3 else read[0]
    following = list(token_ids[1:])
    drafts: list[int] = []
    for _ in range(num_drafts):
        embedded = weights["embed_tokens.weight"][torch.tensor(following)]
        output = layer(config, weights, embedded, known)[-1:]
        x = output if last_norm is None else rms_norm(output, last_norm, config["rms_norm_eps"])
        token_id = int((x @ weights["lm_head.weight"].T).argmax())
        if "d2t" in weights:
            token_id += int(weights["d2t"][token_id])
        drafts.append(token_id)
        following.append(token_id)
        known = torch.cat([known, output])
    return drafts


def medusa_drafts(weights: Weights, hidden: Tensor, num_heads: int, num_blocks: int) -> list[int]:
    """One token per head, from the last hidden state, ``[hidden_size]``."""
    drafts = []
    for head in range(num_heads):
        x = hidden
        for block in range(num_blocks):
            found = F.silu(linear(weights, f"{head}.{block}.linear", x))
            proj = weights.get(f"{head}.{block}.proj.weight")
            x = x + (found if proj is None else proj @ found)
        drafts.append(int((weights[f"{head}.{num_blocks}.weight"] @ x).argmax()))
    return drafts
