"""The Llama family's forward pass (arXiv:2302.13971) over packed tokens."""

# T=num_tokens N=num_heads K=num_kv_heads H=head_dim

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hotshoe.api import CheckpointTensor, Model, ModelContext, ModelLoadError
from hotshoe.api.layers import ForwardStep, LayerFactory, Linear, RMSNorm, rotary_tables
from hotshoe_models.llama.config import LlamaConfig

CosSin = tuple[Tensor, Tensor]
Loads = dict[str, Callable[[CheckpointTensor], None]]


class LlamaModel(Model):
    """Embedding, decoder layers, final norm and head."""

    def __init__(self, context: ModelContext) -> None:
        self.config = config = LlamaConfig.parse(context.config)
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        layers = context.layers
        cos_sin = rotary_tables(
            context.config,
            rotary_dim=config.head_dim,
            max_positions=context.max_model_len,
            device=context.device,
        )
        self.embed_tokens = layers.embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size
        )
        self.layers = [
            DecoderLayer(f"model.layers.{i}", config, config.sliding_windows[i], layers, cos_sin)
            for i in range(config.num_layers)
        ]
        self.norm = layers.rms_norm("model.norm", config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = layers.linear("lm_head", config.hidden_size, config.vocab_size, is_head=True)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.embed_tokens)
        self._add = layers.kernels.add
        self._dtype = context.dtype
        self._tied_tensor: CheckpointTensor | None = None
        self._loads = self._loads_by_name()

    def forward(self, token_ids: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        x, residual = self.embed_tokens(token_ids), None
        last = len(self.layers) - 1
        rows = None if step.wants(last) or step.wants(-1) else step.wanted_rows
        for i, layer in enumerate(self.layers):
            x, residual = layer(x, residual, positions, step, rows if i == last else None)
            if step.wants(i):
                step.hidden_states[i] = self._add(x, residual)
        x, _ = self.norm(x, residual)
        if step.wants(-1):
            step.hidden_states[-1] = x
        return x

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embed_tokens(token_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head.logits(hidden_states)

    def load_tensor(self, tensor: CheckpointTensor) -> bool:
        load = self._loads.get(tensor.name) or self._own_load(tensor.name)
        if load is None:
            return False
        load(tensor)
        return True

    def _loads_by_name(self) -> Loads:
        loads = _norm_loads(self.norm)
        if not self.config.tie_word_embeddings:
            loads |= _linear_loads(self.lm_head)
        for layer in self.layers:
            loads |= layer.loads_by_name()
        return loads

    def _own_load(self, name: str) -> Callable[[CheckpointTensor], None] | None:
        # kept in the table they would be cycles, and weights would outlive a closed engine
        if name == "model.embed_tokens.weight":
            return self._load_embedding
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            return self._compare_tied
        return None

    def _load_embedding(self, tensor: CheckpointTensor) -> None:
        self.embed_tokens.load(tensor)
        if self.config.tie_word_embeddings:
            self._compare_tied(tensor)

    def _compare_tied(self, tensor: CheckpointTensor) -> None:
        """The embedding and a tied head that the checkpoint has all the same, in any order."""
        first, self._tied_tensor = self._tied_tensor, tensor
        if first is not None and _digest(first, self._dtype) != _digest(tensor, self._dtype):
            raise ModelLoadError(
                "tie_word_embeddings is true, but tensors 'lm_head.weight' and "
                "'model.embed_tokens.weight' differ; set it to false in config.json"
            )


def _digest(tensor: CheckpointTensor, dtype: torch.dtype) -> bytes:
    """Of a tensor's values: comparing digests, one tensor is in memory at a time."""
    values = tensor.to_dense(dtype).contiguous().view(torch.uint8)
    return hashlib.sha256(values.cpu().numpy().data).digest()


class DecoderLayer:
    """Attention and MLP, each behind a norm that also adds the residual."""

    def __init__(
        self,
        name: str,
        config: LlamaConfig,
        sliding_window: int | None,
        layers: LayerFactory,
        cos_sin: CosSin,
    ) -> None:
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        eps = config.rms_norm_eps
        self.input_layernorm = layers.rms_norm(f"{name}.input_layernorm", hidden_size, eps=eps)
        self.self_attn = SelfAttention(f"{name}.self_attn", config, sliding_window, layers, cos_sin)
        self.post_attention_layernorm = layers.rms_norm(
            f"{name}.post_attention_layernorm", hidden_size, eps=eps
        )
        self.gate_up_proj = layers.linear(
            f"{name}.mlp.gate_up_proj",
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            has_bias=config.mlp_bias,
        )
        self.down_proj = layers.linear(
            f"{name}.mlp.down_proj", intermediate_size, hidden_size, has_bias=config.mlp_bias
        )
        self._take_rows = layers.kernels.take_rows

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        step: ForwardStep,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What becomes of all tokens, or of some rows: their keys and values are written anyway."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, positions, step, rows)
        if rows is not None:
            residual = self._take_rows(residual, rows)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.down_proj(self.gate_up_proj.silu_and_mul(x)), residual

    def loads_by_name(self) -> Loads:
        """What to do with each checkpoint tensor of this layer."""
        return (
            _norm_loads(self.input_layernorm, self.post_attention_layernorm)
            | _linear_loads(self.gate_up_proj, self.down_proj)
            | self.self_attn.loads_by_name()
        )


class SelfAttention:
    """Merged q, k and v projections, optional head norms, attention, output projection."""

    def __init__(
        self,
        name: str,
        config: LlamaConfig,
        sliding_window: int | None,
        layers: LayerFactory,
        cos_sin: CosSin,
    ) -> None:
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._head_dim = head_dim
        self._num_heads = [num_heads, num_kv_heads, num_kv_heads]
        self.qkv_proj = layers.linear(
            f"{name}.qkv_proj",
            config.hidden_size,
            {
                "q_proj": num_heads * head_dim,
                "k_proj": num_kv_heads * head_dim,
                "v_proj": num_kv_heads * head_dim,
            },
            has_bias=config.qkv_bias,
        )
        self.head_norms: tuple[RMSNorm, RMSNorm] | None = None
        if config.qk_norm:
            self.head_norms = (
                layers.rms_norm(f"{name}.q_norm", head_dim, eps=config.rms_norm_eps),
                layers.rms_norm(f"{name}.k_norm", head_dim, eps=config.rms_norm_eps),
            )
        self.attention = layers.attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            sliding_window=sliding_window,
            cos_sin=cos_sin,
        )
        self.o_proj = layers.linear(
            f"{name}.o_proj", num_heads * head_dim, config.hidden_size, has_bias=config.o_bias
        )

    def __call__(
        self, x: Tensor, positions: Tensor, step: ForwardStep, rows: Tensor | None
    ) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], sum(self._num_heads), self._head_dim)
        q_TNH, k_TKH, v_TKH = torch.split(heads, self._num_heads, 1)
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms
            q_TNH, _ = q_norm(q_TNH)
            k_TKH, _ = k_norm(k_TKH)
        return self.o_proj(self.attention(q_TNH, k_TKH, v_TKH, positions, step, rows).flatten(1))

    def loads_by_name(self) -> Loads:
        """What to do with each checkpoint tensor of this part."""
        norms = self.head_norms or ()
        return _norm_loads(*norms) | _linear_loads(self.qkv_proj, self.o_proj)


def _norm_loads(*norms: RMSNorm) -> Loads:
    return {f"{norm.name}.weight": norm.load for norm in norms}


def _linear_loads(*linears: Linear) -> Loads:
    """A merged layer's tensors lie beside it in the checkpoint, under the names of its parts."""
    loads: Loads = {}
    for linear in linears:
        parent = linear.spec.name.rpartition(".")[0]
        for part, _ in linear.spec.parts:
            stem = linear.spec.name if part == "weight" else f"{parent}.{part}"
            loads[f"{stem}.weight"] = partial(linear.load, part)
            if linear.spec.has_bias:
                loads[f"{stem}.bias"] = partial(linear.load, part, is_bias=True)
    return loads
