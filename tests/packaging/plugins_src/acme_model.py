"""``toy``: one attention layer between embedding and head, and a bigram model without attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotshoe.api import (
    CheckpointTensor,
    Component,
    Model,
    ModelCapabilities,
    ModelContext,
    PluginOptions,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe.api.layers import ForwardStep

HEAD_DIM = 16


class BigramModel(Model):
    """What comes next depends on the last token alone."""

    def __init__(self, context: ModelContext) -> None:
        config, layers = context.config, context.layers
        self.hidden_size, self.vocab_size = config["hidden_size"], config["vocab_size"]
        self.embed = layers.embedding("embed", self.vocab_size, self.hidden_size)
        self.head = layers.linear("head", self.hidden_size, self.vocab_size)

    def forward(self, token_ids: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        return self.embed(token_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.head(hidden_states)

    def load_tensor(self, tensor: CheckpointTensor) -> bool:
        if tensor.name == "embed":
            self.embed.load(tensor)
        elif tensor.name == "head":
            self.head.load("weight", tensor)
        else:
            return False
        return True


class ToyModel(BigramModel):
    """``head(norm(x + attention(x)))`` over embeddings x, with two query heads and one for keys."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        layers = context.layers
        parts = {"q": 2 * HEAD_DIM, "k": HEAD_DIM, "v": HEAD_DIM}
        self.qkv = layers.linear("qkv", self.hidden_size, parts)
        self.attention = layers.attention(num_heads=2, num_kv_heads=1, head_dim=HEAD_DIM)
        self.out = layers.linear("out", 2 * HEAD_DIM, self.hidden_size)
        self.norm = layers.rms_norm("norm", self.hidden_size, eps=1e-6)

    def forward(self, token_ids: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        x = self.embed(token_ids)
        heads = self.qkv(x).view(x.shape[0], 4, HEAD_DIM)
        q, k, v = heads.split([2, 1, 1], 1)
        attended = self.attention(q, k, v, positions, step)
        return self.norm(self.out(attended.flatten(1)), x)[0]

    def load_tensor(self, tensor: CheckpointTensor) -> bool:
        if tensor.name in ("q", "k", "v"):
            self.qkv.load(tensor.name, tensor)
        elif tensor.name == "out":
            self.out.load("weight", tensor)
        elif tensor.name == "norm":
            self.norm.load(tensor)
        else:
            return super().load_tensor(tensor)
        return True


MODELS = {"AcmeToyForCausalLM": ToyModel, "AcmeBigramForCausalLM": BigramModel}


def build(options: PluginOptions, context: ModelContext) -> Model:
    return MODELS[context.config["architectures"][0]](context)


@hookimpl
def hotshoe_component() -> Component:
    return Component(
        contract="model/0",
        factory=build,
        capabilities=ModelCapabilities(architectures=tuple(MODELS)),
    )
