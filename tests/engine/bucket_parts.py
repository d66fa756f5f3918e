"""What a GPU brings, on the CPU: kernels that record steps of a few sizes, attention that takes
padding, and copies that are done as late as they may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hotshoe.api import (
    AttentionBatch,
    AttentionContext,
    KVCacheSpec,
    LayerCache,
    Recording,
    Weight,
)
from hotshoe.worker.streams import Copy, HostCopy, Streams
from hotshoe_attention.torch_sdpa import CAPABILITIES as SDPA_CAPABILITIES
from hotshoe_attention.torch_sdpa.backend import TorchSdpaBackend
from hotshoe_kernels.torch import CAPABILITIES as KERNELS_CAPABILITIES
from hotshoe_kernels.torch.kernels import TorchKernels

CPU = torch.device("cpu")


class Repeat(Recording):
    """Calls the function again, and puts its results where those of all recordings go."""

    def __init__(self, kernels: BucketKernels, run: Callable[[], tuple[Tensor, ...]]) -> None:
        self._kernels = kernels
        self._run = run
        self.outputs = kernels.placed(run())

    def replay(self) -> None:
        self._kernels.num_replays += 1
        self.outputs = self._kernels.placed(self._run())


class BucketKernels(TorchKernels):
    """Torch's, which record steps of a few sizes.

    Attributes:
        sizes: of the recorded steps, in the order in which they were recorded.
        num_replays: how often one of them ran.
        fail_after: after so many more passes one fails; None = none does.
        failure: that it fails with.
    """

    def __init__(self) -> None:
        super().__init__(replace(KERNELS_CAPABILITIES, recording="buckets"))
        self.sizes: list[int] = []
        self.num_replays = 0
        self.fail_after: int | None = None
        self.failure: Exception = RuntimeError("out of luck")
        self._memory: list[Tensor] = []

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after == 0:
                raise self.failure
        return super().embedding(token_ids, weight)

    def record(self, run: Callable[[], tuple[Tensor, ...]], sizes: Sequence[int] = ()) -> Recording:
        assert not sizes
        recording = Repeat(self, run)
        self.sizes.append(len(recording.outputs[0]))
        return recording

    def placed(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs, in memory that the next ones overwrite."""
        if not self._memory:
            self._memory = [torch.empty_like(one) for one in outputs]
        for memory, one in zip(self._memory, outputs, strict=True):
            memory[: len(one)] = one
        return tuple(memory[: len(one)] for memory, one in zip(self._memory, outputs, strict=True))


@dataclass(frozen=True, slots=True)
class Stripped:
    """A step without its padding."""

    num_queries: int
    num_tokens: int
    metadata: Any


class PaddedAttention(TorchSdpaBackend):
    """``torch_sdpa`` on what is no padding, at the end of a batch."""

    def __init__(self, context: AttentionContext) -> None:
        capabilities = replace(SDPA_CAPABILITIES, is_recordable=True, takes_padding=True)
        super().__init__(capabilities, context)

    def build_metadata(self, batch: AttentionBatch, group: KVCacheSpec) -> Any:
        num_reqs = int((batch.seq_lens > 0).sum())
        ends = batch.query_start_loc[: num_reqs + 1]
        num_queries = int(ends[-1])
        num_tokens = int((batch.slot_mapping >= 0).sum())
        assert (batch.slot_mapping[:num_tokens] >= 0).all()
        # a batch with fewer queries has no padding
        assert num_tokens == num_queries or num_tokens == len(batch.slot_mapping)
        stripped = replace(
            batch,
            query_start_loc=ends,
            seq_lens=batch.seq_lens[:num_reqs],
            block_table=batch.block_table[:num_reqs],
            slot_mapping=batch.slot_mapping[:num_tokens],
            positions=batch.positions[:num_tokens],
            query_lens_list=ends.diff().tolist(),
            seq_lens_list=batch.seq_lens[:num_reqs].tolist(),
        )
        return Stripped(num_queries, num_tokens, super().build_metadata(stripped, group))

    def forward(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: Any
    ) -> Tensor:
        num_queries, num_tokens = metadata.num_queries, metadata.num_tokens
        out = q.new_zeros(q.shape[0], layer.spec.num_heads, layer.spec.kv.head_dim_v)
        if num_tokens:
            real = q[:num_queries], k[:num_tokens], v[:num_tokens]
            out[:num_queries] = super().forward(layer, *real, cache, metadata.metadata)
        return out


class LateStreams(Streams):
    """Copies to the host arrive when somebody waits for them; before, there is nonsense. Memory of
    the host that is copied must be as it was until somebody has waited for that.
    """

    def __init__(self) -> None:
        self._reads: dict[int, _Read] = {}

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def copy_in(self, source: Tensor, target: Tensor) -> Copy:
        target.copy_(source)
        read = _Read(source, source.clone())
        if source.numel():
            before = self._reads.get(source.data_ptr())
            assert before is None or before.is_over, "used again before it was copied"
            self._reads[source.data_ptr()] = read
        return read

    def copy_out(self, *sources: Tensor) -> HostCopy:
        found = [source.clone() for source in sources]
        targets = tuple(torch.full_like(one, 1) for one in found)
        return HostCopy(targets, _Arrives(targets, found))


@dataclass(slots=True)
class _Read:
    source: Tensor  # kept, so that nothing else gets its memory
    seen: Tensor
    is_over: bool = False

    def wait(self) -> None:
        assert torch.equal(self.source, self.seen), "written to before it was copied"
        self.is_over = True


@dataclass(slots=True)
class _Arrives:
    targets: tuple[Tensor, ...]
    found: list[Tensor]

    def wait(self) -> None:
        for target, one in zip(self.targets, self.found, strict=True):
            target.copy_(one)


def attention(block_size: int = 16) -> PaddedAttention:
    """The backend, for models of any size."""
    context = AttentionContext(
        device=CPU,
        block_size=block_size,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=256,
    )
    return PaddedAttention(context)
