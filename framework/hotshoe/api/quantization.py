"""Quantization contract: checkpoint tensors, shard by shard while they are read, to a weight tagged
with its format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hotshoe.api.kernels import Weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class CheckpointTensor(Protocol):
    """One tensor of a checkpoint, not read until asked for."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> str:
        """A torch dtype name (``bfloat16``), or a block format (``q4_1``)."""

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """The values in a dtype; block formats are dequantized."""

    def raw(self) -> Tensor:
        """The stored bytes as they are: uint8, ``[rows, bytes per row]`` for block formats, else
        the tensor itself.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """A linear layer or an embedding about to be loaded.

    Attributes:
        name: dotted module path.
        in_features: K; the size of the vectors of an embedding.
        parts: names and row counts of merged projections, in order (``("q", 576), ("k", 192),
            ("v", 192)``); one part otherwise, named ``weight``.
        has_bias: whether every part has a bias.
        dtype: of activations, and of what stays dense.
        device: where the weight lives.
        is_embedding: whether rows are looked up by token id. A head that is tied to the embedding
            multiplies with the same weight.
        is_head: whether its outputs are logits, so that its errors go straight into probabilities.
    """

    name: str
    in_features: int
    parts: tuple[tuple[str, int], ...]
    has_bias: bool
    dtype: torch.dtype
    device: torch.device
    is_embedding: bool = False
    is_head: bool = False

    @property
    def out_features(self) -> int:
        """Rows over all parts."""
        return sum(rows for _, rows in self.parts)


class WeightBuilder(ABC):
    """Collects one layer's tensors."""

    @abstractmethod
    def load(self, part: str, tensor: CheckpointTensor, *, is_bias: bool = False) -> None:
        """Take one part's weight ``[rows, in_features]`` or bias ``[rows]``; read it now, keep no
        reference to it.

        Raises:
            ModelLoadError: if its shape doesn't fit the part.
        """

    @abstractmethod
    def finalize(self) -> Weight:
        """The finished weight.

        Raises:
            ModelLoadError: if a part is missing.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationCapabilities:
    """Which weight formats the method can produce; matched against the kernels before anything is
    loaded.

    Attributes:
        weight_formats: of linear layers.
        embedding_formats: of embeddings, and so of heads that are tied to them.
    """

    weight_formats: tuple[str, ...]
    embedding_formats: tuple[str, ...] = ("dense",)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationContext:
    """Facts a method may be built on.

    Attributes:
        device: where weights live.
        dtype: of activations.
        checkpoint_format: ``gguf``, ``safetensors`` or ``pytorch``; ``random`` where weights are
            drawn instead of read.
    """

    device: torch.device
    dtype: torch.dtype
    checkpoint_format: str = "safetensors"


class Quantization(ABC):
    """A weight format. Built once per worker as ``factory(options, QuantizationContext)``."""

    @abstractmethod
    def builder(self, spec: LinearSpec) -> WeightBuilder:
        """Start collecting the weight of a linear layer or an embedding."""

    def finish(self) -> None:  # noqa: B027  # optional: most have nothing to tell
        """Called once, after the last layer was loaded: log what became of the tensors, and refuse
        options that fit none of them.
        """
