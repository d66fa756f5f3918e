"""Attention contract: the plugin owns the KV pages, so it alone decides how they are laid out,
written and read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hotshoe.errors import NotRecordableError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What a layer keeps per token. Layers with equal specs form one cache group and share block
    tables.

    Attributes:
        sliding_window: only so many latest positions are attended to; None = all.
        dtype: of the pages, as torch names it (``float32``, ``bfloat16``).
    """

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """All that makes one attention layer differ from another.

    Attributes:
        num_heads: query heads, a multiple of ``kv.num_kv_heads`` (grouped-query attention,
            arXiv:2305.13245).
        scale: multiplies ``q k^T``.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None = not capped.
        has_sinks: whether a learned logit per head joins the softmax without a value (as in
            gpt-oss).
        dtype: of q, k, v and the output.
    """

    num_heads: int
    kv: KVCacheSpec
    scale: float
    dtype: str
    softcap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCapabilities:
    """What a backend can do, as data.

    Attributes:
        fused_rope: ``forward`` rotates q and k itself; the layer then passes them unrotated.
        devices: torch device types it runs on.
        dtypes: accepted ``AttentionSpec.dtype``.
        kv_dtypes: accepted ``KVCacheSpec.dtype``.
        is_recordable: ``forward`` does nothing that ``Kernels.record`` of the same native library
            doesn't see, and takes from the batch only its tensors, its numbers of requests and
            tokens, and the ``max_`` fields as upper bounds: so it may run again on other values
            in the same tensors. With kernels whose recordings are of ``any_size``, also after
            ``resize``.
        is_batch_invariant: whether the result for a token is the same, bit for bit, whatever other
            requests are in the batch, and however its own prompt was cut into steps.
        takes_padding: whether a batch may hold padding, as ``AttentionBatch`` describes it.
        takes_fewer_queries: whether a batch may have fewer queries than tokens, likewise. Without
            it the last layer of a prompt attends from every token, for the few whose logits are
            wanted.
    """

    fused_rope: bool = False
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    kv_dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    is_recordable: bool = False
    is_batch_invariant: bool = False
    takes_padding: bool = False
    takes_fewer_queries: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTensor:
    """One tensor of a layer's cache: ``[num_blocks, *block_shape]``."""

    name: str
    block_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How one layer's pages look. The core allocates the tensors, zeroed, and never looks in."""

    tensors: tuple[KVTensor, ...]
    bytes_per_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The ragged batch of one step, for one cache group. Several query tokens per request are the
    normal case.

    A batch for a backend that ``takes_padding`` may be filled up to a size that steps have in
    common. A token whose slot is -1 is padding: its keys and values are written nowhere. A request
    whose ``seq_lens`` is 0 is padding too: each of its tokens is, and their output is finite and
    otherwise anything, as is that of tokens past the last request's. ``positions`` of padding are
    0.

    A batch for a backend that ``takes_fewer_queries`` may leave out queries whose output nobody
    looks at: what is left are the last ones of each request, or none of it. ``query_start_loc``,
    ``max_query_len`` and ``query_lens_list`` count those, as do the rows of q and of the output.
    The keys and values of all tokens are written nevertheless: ``slot_mapping``, ``positions`` and
    the rows of k and v are as ever. Such a batch has no padding.

    Attributes:
        query_start_loc: ``[num_reqs + 1]`` int32; request i owns queries
            ``query_start_loc[i]:query_start_loc[i + 1]``, which are its tokens unless some were
            left out.
        seq_lens: ``[num_reqs]`` int32; KV length including this step's tokens. The queries are
            its last positions.
        block_table: ``[num_reqs, max_blocks]`` int32; entries past ``ceil(seq_len /
            block_size)`` are undefined.
        slot_mapping: ``[num_tokens]`` int64; token's place is block ``slot // block_size``,
            offset ``slot % block_size``.
        positions: ``[num_tokens]`` int64.
        max_query_len: longest run of query tokens; at least that for a backend that is recordable
            or takes padding.
        max_seq_len: largest of ``seq_lens``, or at least that, likewise.
        query_lens_list: query lengths as Python ints, so that a backend needs no device sync to
            branch on them; may be empty for one that takes padding, which doesn't read them.
        seq_lens_list: ``seq_lens`` as Python ints, likewise.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    positions: Tensor
    block_size: int
    max_query_len: int
    max_seq_len: int
    query_lens_list: Sequence[int]
    seq_lens_list: Sequence[int]


class AttentionLayerView(Protocol):
    """The attention layer that calls ``forward``."""

    @property
    def layer_index(self) -> int: ...
    @property
    def spec(self) -> AttentionSpec: ...
    @property
    def sinks(self) -> Tensor | None:
        """``[num_heads]`` float32 if ``spec.has_sinks``."""

    @property
    def cos_sin(self) -> tuple[Tensor, Tensor] | None:
        """``[max_positions, rotary_dim // 2]`` float32 each, for backends with ``fused_rope``; None
        = no rotation.
        """


LayerCache = Mapping[str, "Tensor"]
"""One layer's cache tensors by the names of its ``KVLayout``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """Facts an attention backend may be built on."""

    device: torch.device
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class AttentionBackend(ABC):
    """Writes and reads the KV cache. Built once per worker as ``factory(options,
    AttentionContext)``.
    """

    capabilities: AttentionCapabilities

    @abstractmethod
    def supports(self, spec: AttentionSpec) -> list[str]:
        """Reasons why this backend can't run such a layer; empty = it can. Called at assembly,
        before weights are loaded.
        """

    @abstractmethod
    def layout(self, spec: AttentionSpec) -> KVLayout:
        """How a layer's pages look; equal for layers of one cache group."""

    @abstractmethod
    def build_metadata(self, batch: AttentionBatch, group: KVCacheSpec) -> Any:
        """Prepare a step, once per cache group, and once more where a layer leaves out queries.

        Args:
            batch: the step's batch, with the block table of this group.
            group: what every layer of the group keeps; the layers may still differ in heads,
                softcap and sinks.

        Returns:
            Whatever ``forward`` of the group's layers wants to be handed.
        """

    def resize(self, metadata: Any, num_reqs: int, num_tokens: int) -> None:
        """Let recorded calls of ``forward`` run on the first so many requests and tokens of the
        batch that metadata were built for, from their next replay on.

        Called only if a backend ``is_recordable`` with kernels whose recordings are of
        ``any_size``. A batch of fewer queries has as many as its ``query_start_loc`` says then.

        Args:
            metadata: from ``build_metadata``.
            num_reqs: no more than the batch has.
            num_tokens: likewise.

        Raises:
            NotRecordableError: if it has to be that batch.
        """
        raise NotRecordableError(f"{type(self).__name__} doesn't resize its batches")

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayerView,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        metadata: Any,
    ) -> Tensor:
        """Write this step's K and V into the pages, then attend causally.

        Args:
            layer: the layer's facts.
            q: ``[num_queries, num_heads, head_dim]``, a row for each token unless the batch has
                fewer queries; may be a strided view; may be overwritten.
            k: ``[num_tokens, num_kv_heads, head_dim]``, likewise.
            v: ``[num_tokens, num_kv_heads, head_dim_v]``, likewise.
            cache: the layer's tensors, written in place.
            metadata: from ``build_metadata``.

        Returns:
            ``[num_queries, num_heads, head_dim_v]``, contiguous, dtype of q.
        """

    @abstractmethod
    def copy_slots(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        """Copy token slots within each layer's pages, as if all were read before any is written.

        Args:
            caches: one per layer of a cache group.
            source: ``[n]`` int64 slots, as in ``AttentionBatch.slot_mapping``.
            target: ``[n]`` int64 slots, without repeats.
        """
