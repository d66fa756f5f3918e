"""The layers of an EAGLE head, out of the same parts as a model's."""

# T=num_tokens N=num_heads K=num_kv_heads H=head_dim

from __future__ import annotations

import torch
from torch import Tensor

from hotshoe.api import DraftPass, DraftTarget, ModelLoadError
from hotshoe.api.layers import Embedding, LayerFactory, Linear, rotary_tables
from hotshoe_spec_decode.chains import Tensors
from hotshoe_spec_decode.eagle.config import EagleConfig
from hotshoe_spec_decode.weights import (
    D2T,
    T2D,
    Loads,
    ignore,
    linear_loads,
    load_target_head,
    load_tensors,
    target_ids,
)

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


class EagleHead:
    """One decoder layer between the target's embedding and its head.

    Every op is one of the kernels', so that kernels can record a pass.

    Attributes:
        target_ids: the target's id of each token of its vocabulary; None where there is one for
            both. Known once it is loaded.
    """

    def __init__(
        self,
        config: EagleConfig,
        target: DraftTarget,
        layers: LayerFactory,
        *,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.config = config
        self._target = target
        self._kernels = layers.kernels
        self._device = device
        hidden_size, head_dim = config.hidden_size, config.head_dim
        name, eps = config.names.layer, config.rms_norm_eps
        self._check_sizes()
        self.fusion = layers.linear(
            config.names.fusion,
            self._num_fused * target.model.hidden_size,
            hidden_size,
            has_bias=config.has(f"{config.names.fusion}.bias"),
        )
        self.embed_tokens: Embedding | None = None
        if config.has(_EMBEDDING):
            self.embed_tokens = layers.embedding(
                "embed_tokens", config.tensors[_EMBEDDING][0], hidden_size
            )
        norms = ["post_attention_layernorm"]
        if config.is_eagle3 or config.layernorms:
            norms.append("input_layernorm")
        if config.is_eagle3:
            norms.append("hidden_norm")
        self._norms = {
            norm: layers.rms_norm(f"{name}{norm}", hidden_size, eps=eps) for norm in norms
        }
        if config.layernorms:
            norm = "embedding_layernorm"
            self._norms[norm] = layers.rms_norm(norm, hidden_size, eps=eps)
        self._num_heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._head_dim = head_dim
        self.qkv_proj = layers.linear(
            f"{name}self_attn.qkv_proj",
            hidden_size * (2 if config.is_eagle3 else 1),
            dict(
                zip(
                    ("q_proj", "k_proj", "v_proj"),
                    (heads * head_dim for heads in self._num_heads),
                    strict=True,
                )
            ),
            has_bias=config.has(f"{name}self_attn.q_proj.bias"),
        )
        self.attention = layers.attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=head_dim,
            cos_sin=rotary_tables(
                config.layer, rotary_dim=head_dim, max_positions=max_model_len, device=device
            ),
        )
        self.o_proj = layers.linear(
            f"{name}self_attn.o_proj",
            config.num_heads * head_dim,
            hidden_size,
            has_bias=config.has(f"{name}self_attn.o_proj.bias"),
        )
        has_mlp_bias = config.has(f"{name}mlp.gate_proj.bias")
        self.gate_up_proj = layers.linear(
            f"{name}mlp.gate_up_proj",
            hidden_size,
            {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
            has_bias=has_mlp_bias,
        )
        self.down_proj = layers.linear(
            f"{name}mlp.down_proj", config.intermediate_size, hidden_size, has_bias=has_mlp_bias
        )
        self.norm = None
        if config.is_eagle3 or config.layernorms:
            norm = "norm" if config.is_eagle3 else "pre_lm_head_layernorm"
            self.norm = layers.rms_norm(norm, hidden_size, eps=eps)
        self.lm_head: Linear | None = None
        vocab = config.tensors.get(_HEAD) or config.tensors.get(D2T)
        if vocab is not None:
            self.lm_head = layers.linear("lm_head", hidden_size, vocab[0], is_head=True)
        self.target_ids: Tensor | None = None

    # -- loading ----------------------------------------------------------------------------

    @property
    def _num_fused(self) -> int:
        """Vectors of the target that come in side by side."""
        return len(self.config.feature_layers) if self.config.is_eagle3 else 2

    def _check_sizes(self) -> None:
        config, model = self.config, self._target.model
        fusion = f"{config.names.fusion}.weight"
        shape = config.tensors[fusion]
        expected = (config.hidden_size, self._num_fused * model.hidden_size)
        if shape != expected:
            raise ModelLoadError(
                f"tensor {fusion!r} of the drafter has shape {shape}, but {config.kind} with "
                f"hidden_size {config.hidden_size} on {self._num_fused} x {model.hidden_size} of "
                f"the target needs {expected}; was it trained for this model?"
            )
        shared = [name for name in (_EMBEDDING, _HEAD) if not config.has(name)]
        if not config.is_eagle3:
            shared.append("features")
        if shared and config.hidden_size != model.hidden_size:
            raise ModelLoadError(
                f"the drafter's hidden_size is {config.hidden_size} and the target's "
                f"{model.hidden_size}, but it shares the target's "
                f"{', '.join(one.removesuffix('.weight') for one in shared)}; was it trained for "
                "this model?"
            )
        rows = config.tensors.get(_EMBEDDING, (model.vocab_size,))[0]
        if rows < model.vocab_size:
            raise ModelLoadError(
                f"tensor {_EMBEDDING!r} of the drafter has {rows} rows, but the target has "
                f"{model.vocab_size} tokens; was it trained for this model?"
            )

    def load(self, path: str) -> None:
        """Read the checkpoint, and what it leaves to the target.

        Raises:
            ModelLoadError: if a tensor is missing, unknown or doesn't fit.
        """
        config, target = self.config, self._target
        with target.open_checkpoint(path) as checkpoint:
            ids = target_ids(checkpoint.tensors(), target.model.vocab_size)
            load_tensors(checkpoint, self._loads(), what=config.kind)
        self._check_vocabulary(ids)
        if ids is not None:
            self.target_ids = ids.to(self._device)
            if not config.has(_HEAD):
                assert self.lm_head is not None
                load_target_head(self.lm_head, target, ids)

    def _check_vocabulary(self, ids: Tensor | None) -> None:
        if self.lm_head is None:
            return
        rows = self.lm_head.spec.out_features
        tokens = self._target.model.vocab_size if ids is None else ids.shape[0]
        if rows != tokens:
            raise ModelLoadError(
                f"the drafter's lm_head has {rows} rows, but "
                f"{'the target' if ids is None else repr(D2T)} has {tokens} tokens"
            )

    def _loads(self) -> Loads:
        name = self.config.names.layer
        loads: Loads = {D2T: ignore, T2D: ignore}
        for norm in (*self._norms.values(), *([self.norm] if self.norm else [])):
            loads[f"{norm.name}.weight"] = norm.load
        loads |= linear_loads(self.fusion, {"weight": self.config.names.fusion})
        attention, mlp = f"{name}self_attn.", f"{name}mlp."
        for linear, parent in ((self.qkv_proj, attention), (self.gate_up_proj, mlp)):
            loads |= linear_loads(linear, {part: parent + part for part, _ in linear.spec.parts})
        loads |= linear_loads(self.o_proj, {"weight": f"{attention}o_proj"})
        loads |= linear_loads(self.down_proj, {"weight": f"{mlp}down_proj"})
        if self.embed_tokens is not None:
            loads[_EMBEDDING] = self.embed_tokens.load
        if self.lm_head is not None and self.config.has(_HEAD):
            loads |= linear_loads(self.lm_head, {"weight": "lm_head"})
        return loads

    # -- computing --------------------------------------------------------------------------

    def cache(self, entries: DraftPass, token_ids: Tensor, features: Tensors) -> Tensors:
        """Write keys and values of entries. The rest of the layer isn't needed for that.

        Args:
            entries: one for each token.
            token_ids: ``[num_tokens]`` int64, of the token after each entry's own.
            features: ``[num_tokens, hidden_size]`` each, of the target.
        """
        x, _ = self._attend(entries, token_ids, self._fuse(features))
        return (x,)

    def begin(
        self, entries: DraftPass, token_ids: Tensor, last_rows: Tensor, features: Tensors
    ) -> tuple[Tensor, Tensors]:
        """As ``cache``; logits and feature of some of the entries."""
        x, residual = self._attend(entries, token_ids, self._fuse(features))
        take_rows = self._kernels.take_rows
        if entries.step.wanted_rows is None:
            x = take_rows(x, last_rows)
        return self._finish(x, take_rows(residual, last_rows))

    def go_on(
        self, entry: DraftPass, token_ids: Tensor, features: Tensors
    ) -> tuple[Tensor, Tensors]:
        """An entry of each chain, from the feature that the entry before it gave."""
        (feature,) = features
        return self._finish(*self._attend(entry, token_ids, feature))

    def _fuse(self, features: Tensors) -> Tensor:
        if not self.config.is_eagle3:
            return features[0]
        return self.fusion(self._kernels.concat(features))

    def _attend(
        self, entries: DraftPass, token_ids: Tensor, feature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What attention gives, ``[num_tokens, num_heads * head_dim]`` or just the wanted rows of
        that, and the residual of all tokens.
        """
        embed = self.embed_tokens or self._target.model.embed
        embedded = embed(token_ids)
        if self.config.is_eagle3:
            embedded, _ = self._norms["input_layernorm"](embedded)
            x, residual = self._norms["hidden_norm"](feature)
            if self.config.norm_before_residual:
                residual = x
            x = self._kernels.concat([embedded, x])
        else:
            if self.config.layernorms:
                embedded, _ = self._norms["embedding_layernorm"](embedded)
            x = residual = self.fusion(self._kernels.concat([embedded, feature]))
            if self.config.layernorms:
                x, residual = self._norms["input_layernorm"](x)
        heads = self.qkv_proj(x).view(x.shape[0], sum(self._num_heads), self._head_dim)
        q_TNH, k_TKH, v_TKH = torch.split(heads, self._num_heads, 1)
        step = entries.step
        x = self.attention(q_TNH, k_TKH, v_TKH, entries.positions, step, step.wanted_rows)
        return x.flatten(1), residual

    def _finish(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensors]:
        """The rest of the layer, and the head."""
        kernels = self._kernels
        x, residual = self._norms["post_attention_layernorm"](self.o_proj(x), residual)
        x = self.down_proj(self.gate_up_proj.silu_and_mul(x))
        if self.norm is not None:
            x, feature = self.norm(x, residual)
        else:
            x = feature = kernels.add(x, residual)
        if self.lm_head is None:
            return self._target.model.compute_logits(x), (feature,)
        return self.lm_head.logits(x), (feature,)
