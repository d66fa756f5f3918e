"""Kernels contract: the small fused ops that model layers call, and the weight formats that
``linear`` executes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A linear layer's weight in some format.

    Attributes:
        format: tag, such as ``dense``; ``Kernels.weight_formats`` lists those that a kernel
            library executes.
        out_features: N.
        in_features: K.
        tensors: as the format defines them. ``dense`` has ``weight`` ``[N, K]`` and optionally
            ``bias`` ``[N]``.
        parts: row ranges of merged projections that have formats of their own; empty = one
            format throughout.
        is_shared: whether others read the tensors too (a head tied to the embedding), so that they
            must stay as they are.
    """

    format: str
    out_features: int
    in_features: int
    tensors: Mapping[str, Tensor]
    parts: tuple[Weight, ...] = field(default=())
    is_shared: bool = False

    @property
    def formats(self) -> frozenset[str]:
        """Every tag that has to be executable."""
        return frozenset(part.format for part in self.parts) or frozenset((self.format,))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsCapabilities:
    """What a kernel library can do, as data."""

    weight_formats: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsContext:
    """Facts a kernel library may be built on."""

    device: torch.device
    dtype: torch.dtype


class Kernels(ABC):
    """The ops between attention calls. Built once per worker as ``factory(options,
    KernelsContext)``.
    """

    capabilities: KernelsCapabilities

    @abstractmethod
    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """``x W^T + b``: ``[num_tokens, in_features]`` to ``[num_tokens, out_features]``, dtype of
        x.
        """

    @abstractmethod
    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Root-mean-square norm over the last dimension (arXiv:1910.07467), after adding the
        residual if there is one.

        Returns:
            The normed tensor, and the sum before the norm (x itself without a residual): the next
            residual. ``residual`` may be overwritten.
        """

    @abstractmethod
    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate the first ``rotary_dim`` of each head in halves (arXiv:2104.09864, GPT-NeoX
        pairing).

        Args:
            q: ``[num_tokens, num_heads, head_dim]``; may be overwritten.
            k: ``[num_tokens, num_kv_heads, head_dim]``; may be overwritten.
            positions: ``[num_tokens]`` int64.
            cos: ``[max_positions, rotary_dim // 2]`` float32.
            sin: likewise.
        """

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``[num_tokens, 2 * intermediate_size]``, gate first."""

    def prepare_weight(self, weight: Weight) -> Weight:
        """Repack a weight once after loading, into a format that ``linear`` likes.

        The input may be consumed, unless it is ``is_shared``.
        """
        return weight
