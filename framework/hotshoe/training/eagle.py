"""A draft head after EAGLE-3: one decoder layer over the target's features and the next token.

Drafting feeds the head its own output as the next feature, and training does the same for a few
steps (training-time test), so that the head learns to go on from what it made itself (Li et al.
2025, arXiv:2503.01840).
"""

# B=num_examples T=max_len H=hidden_size N=num_heads K=num_kv_heads D=head_dim

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotshoe.training.batches import Batch
from hotshoe.training.heads import DraftHead
from hotshoe.training.target import Target

_SMALL = 0.01
"""Spread of weights that start near nothing."""
_INPUT_SCALE = 0.1
"""Size of the state that a head starts from, relative to the target's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleShape:
    """Sizes of a head; the target's where not given."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float

    @classmethod
    def of(cls, config: Mapping[str, Any], intermediate_size: int | None = None) -> EagleShape:
        """The shape that follows a target's ``config.json``."""
        num_heads = int(config["num_attention_heads"])
        rope = config.get("rope_parameters") or {}
        return cls(
            hidden_size=int(config["hidden_size"]),
            intermediate_size=intermediate_size or int(config["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        )


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = x.float().square().mean(-1, keepdim=True).add(self.eps).rsqrt()
        return (x * scale).to(self.weight.dtype) * self.weight


class _Attention(nn.Module):
    """Attention of the head: entries of the first step are shared, those of later steps belong to
    one chain each.
    """

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        size = shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, shape.num_heads * size, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, shape.num_kv_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, shape.num_kv_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * size, shape.hidden_size, bias=False)
        self.shape = shape

    def forward(self, x: Tensor, positions: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend, and append this step's keys and values to those of the earlier steps.

        Query i of step j sees the entries 0 to i of the first step, and its own chain's entries of
        the steps 1 to j.
        """
        shape = self.shape
        batch, length = x.shape[:2]
        group = shape.num_heads // shape.num_kv_heads
        q = self.q_proj(x).view(batch, length, shape.num_heads, shape.head_dim)
        k = self.k_proj(x).view(batch, length, shape.num_kv_heads, shape.head_dim)
        v = self.v_proj(x).view(batch, length, shape.num_kv_heads, shape.head_dim)
        cos, sin = _rotary(positions, shape)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        earlier.append((k, v))
        if len(earlier) == 1:
            attended = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                enable_gqa=True,
            ).transpose(1, 2)
        else:
            attended = _attend_chains(
                q.view(batch, length, shape.num_kv_heads, group, shape.head_dim), earlier
            )
        joined = attended.reshape(batch, length, shape.num_heads * shape.head_dim)
        projected: Tensor = self.o_proj(joined)
        return projected


class _MLP(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return gated


class _Layer(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.hidden_norm = _Norm(shape.hidden_size, shape.norm_eps)
        self.input_layernorm = _Norm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = _Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = _Attention(shape)
        self.mlp = _MLP(shape)

    def forward(
        self,
        feature: Tensor,
        embedded: Tensor,
        positions: Tensor,
        earlier: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        joined = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)
        feature = feature + self.self_attn(joined, positions, earlier)
        feature = feature + self.mlp(self.post_attention_layernorm(feature))
        return feature


class EagleHead(DraftHead):
    """The head; its parameters have the names of the EAGLE-3 checkpoint layout.

    Args:
        shape: its sizes.
        fused_layers: target layers whose outputs ``fc`` fuses.
    """

    def __init__(self, shape: EagleShape, fused_layers: Sequence[int]) -> None:
        super().__init__()
        size = shape.hidden_size
        self.fc = nn.Linear(len(fused_layers) * size, size, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = _Norm(shape.hidden_size, shape.norm_eps)
        self.shape = shape
        self.fused_layers = tuple(fused_layers)

    @torch.no_grad()
    def start_from(self, target: Target, seed: int) -> None:
        """Start as what hands on the target's last state, with layers that resemble its last one.

        Args:
            seed: of the weights that start near nothing.
        """
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                parameter.copy_(_SMALL * torch.randn(parameter.shape, generator=generator))
        size = self.shape.hidden_size
        self.fc.weight[:, -size:] += torch.eye(size)
        # the norms don't mind, and what the layer adds soon outweighs what it was given: the last
        # state stands for the token that is known by now
        self.fc.weight *= _INPUT_SCALE
        self.norm.weight.copy_(target.norm)
        last = target.last_layer
        layer = self.midlayer
        layer.hidden_norm.weight.copy_(last["input_layernorm.weight"])
        layer.post_attention_layernorm.weight.copy_(last["post_attention_layernorm.weight"])
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(layer.self_attn, name).weight
            projection[:, size:] = last[f"self_attn.{name}.weight"]
        layer.self_attn.o_proj.weight.copy_(0.3 * last["self_attn.o_proj.weight"])
        rows = min(self.shape.intermediate_size, last["mlp.down_proj.weight"].shape[1])
        layer.mlp.gate_proj.weight[:rows] = last["mlp.gate_proj.weight"][:rows]
        layer.mlp.up_proj.weight[:rows] = last["mlp.up_proj.weight"][:rows]
        layer.mlp.down_proj.weight[:, :rows] = 0.3 * last["mlp.down_proj.weight"][:, :rows]

    def unroll(self, batch: Batch, embedding: Tensor, num_steps: int) -> list[Tensor]:
        example, position = batch.rows
        length = batch.token_ids.shape[1]
        token_ids = F.pad(batch.token_ids, (0, num_steps))
        feature = self.fc(batch.features.to(self.fc.weight.dtype)).float()
        positions = torch.arange(length)
        earlier: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for step in range(num_steps):
            embedded = F.embedding(token_ids[:, step + 1 : step + 1 + length], embedding)
            feature = self.midlayer(feature, embedded, positions + step, earlier)
            outputs.append(self.norm(feature[example, position - 2 - step]))
        return outputs

    def checkpoint_config(self, target: Target, draft_vocab_size: int) -> dict[str, Any]:
        shape = self.shape
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
            "max_position_embeddings": target.config.get("max_position_embeddings", 2048),
            "vocab_size": target.vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "dtype": "bfloat16",
            # layers are counted from 1 here: 0 would be the embedding
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.fused_layers],
            },
        }


def _attend_chains(q: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of a later step. q: ``[B, T, K, N/K, D]``; returns the same shape."""
    scale = q.shape[-1] ** -0.5
    length = q.shape[1]
    q = q * scale
    first_k, first_v = earlier[0]
    hidden = torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
    # [B, K, N/K, T, T]: entries of the first step
    shared = torch.einsum("btkgd,bskd->bkgts", q, first_k) + hidden
    own = [torch.einsum("btkgd,btkd->bkgt", q, k).unsqueeze(-1) for k, _ in earlier[1:]]
    weights = torch.cat([shared, *own], dim=-1).float().softmax(-1).to(q.dtype)
    attended = torch.einsum("bkgts,bskd->btkgd", weights[..., :length], first_v)
    for index, (_, v) in enumerate(earlier[1:]):
        weight = weights[..., length + index].permute(0, 3, 1, 2).unsqueeze(-1)
        attended = attended + weight * v.unsqueeze(3)
    return attended


def _rotary(positions: Tensor, shape: EagleShape) -> tuple[Tensor, Tensor]:
    """cos and sin, ``[T, 1, D/2]`` float32."""
    half = shape.head_dim // 2
    frequencies = shape.rope_theta ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(positions.float(), frequencies).unsqueeze(1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
