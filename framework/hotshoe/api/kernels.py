"""Kernels contract: the small fused ops that model layers call, and the weight formats that
``linear`` and ``embedding`` execute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hotshoe.errors import NotRecordableError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """The weight of a linear layer or an embedding in some format. A head tied to an embedding has
    the very same one.

    Attributes:
        format: tag, such as ``dense``; ``KernelsCapabilities`` lists those that a kernel
            library executes. ``mixed`` if there are parts.
        out_features: N.
        in_features: K.
        tensors: as the format defines them, and optionally ``bias`` ``[N]``. ``dense`` has
            ``weight`` ``[N, K]``; ``int8`` has ``weight`` ``[N, K]`` int8 and ``scales`` ``[N]``
            float32; ``q8_0``, ``q4_0`` and ``q4_1`` have ``blocks`` ``[N, bytes per row]`` uint8,
            as a GGUF file holds them. Other formats are between a quantization and its kernels.
        parts: row ranges of merged projections that have formats of their own, in order, each
            with its tensors, its bias too; empty = one format throughout.
    """

    format: str
    out_features: int
    in_features: int
    tensors: Mapping[str, Tensor]
    parts: tuple[Weight, ...] = field(default=())

    @property
    def formats(self) -> frozenset[str]:
        """Every tag that has to be executable."""
        return frozenset(part.format for part in self.parts) or frozenset((self.format,))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsCapabilities:
    """What a kernel library can do, as data.

    Attributes:
        weight_formats: those that ``linear`` executes.
        devices: torch device types.
        dtypes: of activations.
        embedding_formats: those that ``embedding`` executes.
        is_batch_invariant: whether every result for a token is the same, bit for bit, whatever
            other tokens come with it, and in whatever step.
        recording: what ``record`` is good for. ``any_size``: recordings are cheap, and one serves
            steps of all sizes up to that which it was made with (``Recording.resize``).
            ``buckets``: each costs memory and part of a second, so a few batch sizes are recorded
            at start-up, and steps are padded to one of them. ``none``: it raises.
    """

    weight_formats: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    embedding_formats: tuple[str, ...] = ("dense",)
    is_batch_invariant: bool = False
    recording: Literal["none", "any_size", "buckets"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsContext:
    """Facts a kernel library may be built on."""

    device: torch.device
    dtype: torch.dtype


class Recording(ABC):
    """A forward pass that runs again without Python, on tensors that stay where they are.

    Attributes:
        outputs: what the recorded function returned; overwritten by each replay, also of other
            recordings of the same kernels.
    """

    outputs: tuple[Tensor, ...]

    @abstractmethod
    def replay(self) -> None:
        """Run what was recorded, on what its input tensors hold now."""

    def resize(self, sizes: Sequence[int]) -> None:
        """Let replays compute other numbers of rows from now on.

        The first so many rows of each tensor are read and written; the others of ``outputs`` are
        anything. Called only if ``KernelsCapabilities.recording`` is ``any_size``.

        Args:
            sizes: one for each that ``Kernels.record`` got, and no more than that.

        Raises:
            ValueError: if one is more.
        """
        raise NotImplementedError(f"{type(self).__name__} has one size")


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

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """As ``linear``, for a model's head. May be float32 whatever the dtype of x: rounded to
        bfloat16 the logits of likely tokens are often equal, and the best of them is lost.
        """
        return self.linear(x, weight)

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

    def linear_silu_and_mul(self, x: Tensor, weight: Weight) -> Tensor:
        """``silu(gate) * up`` of what ``linear`` gives, for a weight of gates and then as many
        factors: ``[num_tokens, in_features]`` to ``[num_tokens, out_features // 2]``.

        This one calls both ops. Kernels that compute it in one need not write the product to
        memory; gates and factors may be rounded to the dtype of x in between, or not.
        """
        return self.silu_and_mul(self.linear(x, weight))

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Rows of a weight: ``[num_tokens]`` int64 ids to ``[num_tokens, in_features]`` in the
        dtype of activations.

        This one serves ``dense`` weights that ``prepare_weight`` left as they were.
        """
        return weight.tensors["weight"].index_select(0, token_ids)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """``x + y`` as a new tensor, ``[num_tokens, size]`` each."""
        return x + y

    def silu(self, x: Tensor) -> Tensor:
        """``x * sigmoid(x)`` as a new tensor, ``[num_tokens, size]``."""
        import torch

        return torch.nn.functional.silu(x)

    def concat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors ``[num_tokens, size_i]`` of one dtype side by side, ``[num_tokens,
        sum(size_i)]``.
        """
        import torch

        return torch.cat(tuple(tensors), dim=1)

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Some rows of ``[num_tokens, size]``: those that ``rows``, ``[n]`` int64, names."""
        return x.index_select(0, rows)

    def argmax(self, x: Tensor) -> Tensor:
        """Index of the largest value of each row, of equal ones the lowest: ``[n, size]`` to
        ``[n]`` int64.
        """
        return x.argmax(-1)

    def prepare_weight(self, weight: Weight) -> Weight:
        """Repack a weight once after loading, into a format that ``linear`` and ``embedding`` like.

        The input may be consumed.
        """
        return weight

    def record(self, run: Callable[[], tuple[Tensor, ...]], sizes: Sequence[int] = ()) -> Recording:
        """Record what a function computes out of ops of these kernels, and of attention backends
        that are ``is_recordable`` with them.

        The function may be called more than once, and really be computed, so its tensors have to
        hold something harmless at that time, such as padding; replays don't call it. It must be a
        function of what its tensors hold: what it keeps in Python from call to call, such as a
        counter, stays as it is. The tensors that it reads from elsewhere must outlive the
        recording. What it returns must be contiguous tensors that its ops have made.

        Args:
            run: the function.
            sizes: numbers of rows that its tensors have now and ``Recording.resize`` may lower.
                Other numbers must be multiples of one of them, such as all heads of all rows, and
                of no more than one. Empty unless the capabilities say ``any_size``.

        Raises:
            NotRecordableError: if these kernels don't record on their device, or the function does
                what a recording can't hold, such as reading a result back.
        """
        raise NotRecordableError(f"{type(self).__name__} doesn't record")
