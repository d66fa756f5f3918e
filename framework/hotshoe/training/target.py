"""What a draft head shares with its target: embedding, head, final norm, last layer, shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotshoe.errors import TrainingError
from hotshoe.weights.checkpoint import Checkpoint

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Tensors of the target, float32.

    Attributes:
        config: its ``config.json``.
        embedding: ``[vocab_size, hidden_size]``.
        head: ``[vocab_size, hidden_size]``; the embedding where they are tied.
        norm: ``[hidden_size]``, of the last norm.
        last_layer: tensors of the last decoder layer by their names in it.
    """

    config: Mapping[str, Any]
    embedding: Tensor
    head: Tensor
    norm: Tensor
    last_layer: Mapping[str, Tensor]

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    @property
    def norm_eps(self) -> float:
        return float(self.config.get("rms_norm_eps", 1e-6))


def read_target(checkpoint: Checkpoint) -> Target:
    """Read what draft heads need of a model.

    Raises:
        TrainingError: if the checkpoint names its tensors in another way than Llama's does.
    """
    last = f"model.layers.{int(checkpoint.config['num_hidden_layers']) - 1}."
    found: dict[str, Tensor] = {}
    for tensor in checkpoint.tensors():
        if tensor.name in (_EMBEDDING, _HEAD, _NORM) or tensor.name.startswith(last):
            found[tensor.name] = tensor.to_dense(torch.float32)
    missing = [name for name in (_EMBEDDING, _NORM) if name not in found]
    if missing:
        raise TrainingError(
            f"model {checkpoint.name!r} has no tensors {missing}; draft heads can be trained for "
            "models whose tensors are named as Llama's are"
        )
    return Target(
        config=checkpoint.config,
        embedding=found[_EMBEDDING],
        head=found.get(_HEAD, found[_EMBEDDING]),
        norm=found[_NORM],
        last_layer={
            name.removeprefix(last): tensor
            for name, tensor in found.items()
            if name.startswith(last)
        },
    )
