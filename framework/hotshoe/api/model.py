"""Model contract: an architecture as a torch module over packed tokens, built from
``hotshoe.api.layers``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotshoe.errors import PluginContractError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hotshoe.api.layers import ForwardStep, LayerFactory
    from hotshoe.api.quantization import CheckpointTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCapabilities:
    """Which checkpoints a model plugin reads: names as in the ``architectures`` field of a Hugging
    Face ``config.json``.
    """

    architectures: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """What a model is built from.

    Attributes:
        config: the checkpoint's ``config.json`` as a mapping (made from the header for GGUF).
        layers: makes every layer that touches kernels, attention or weights.
        dtype: of weights and activations.
    """

    config: Mapping[str, Any]
    layers: LayerFactory
    dtype: torch.dtype
    device: torch.device
    max_model_len: int


class Model(ABC):
    """A causal language model. Built once per worker as ``factory(options, ModelContext)``, without
    weights.

    Every parameter belongs to a layer made by ``ModelContext.layers``, so no memory is taken before
    its tensor is read.
    """

    hidden_size: int
    vocab_size: int

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        """Hidden states after the final norm.

        They must depend on the arguments alone, and the ops that are called not even on the number
        of tokens: where kernels record a pass (``Kernels.record``), this isn't called in each step.

        Args:
            token_ids: ``[num_tokens]`` int64, packed over requests.
            positions: ``[num_tokens]`` int64.
            step: attention metadata and caches; also collects hidden states that a drafter
                asked for.

        Returns:
            ``[num_tokens, hidden_size]``; or, to do less in the last layer, just
            ``step.wanted_rows`` of that.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """``[n, hidden_size]`` to ``[n, vocab_size]``, in the model's dtype or float32."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token embeddings, ``[n]`` int64 to ``[n, hidden_size]``, as the first layer gets them.
        Optional: only drafters that share them ask.

        Raises:
            PluginContractError: if the model doesn't offer them.
        """
        raise PluginContractError(f"{type(self).__name__} doesn't offer its embeddings to drafters")

    @abstractmethod
    def load_tensor(self, tensor: CheckpointTensor) -> bool:
        """Take one checkpoint tensor; False = not part of this model (the loader reports those it
        doesn't know to be harmless).
        """
