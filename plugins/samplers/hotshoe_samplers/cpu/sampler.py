"""The definition of ``standard``, drawn from by one native op."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hotshoe.api import Candidates, SampleInput, SamplerCapabilities, ShapeError
from hotshoe_native.ops import NativeLibrary
from hotshoe_native.sampling import (
    mask_args,
    most_likely_args,
    sample_args,
    sample_scratch_bytes,
)
from hotshoe_samplers.standard.sampler import StandardSampler, quick_candidates

# R=rows, V=vocab_size


class CpuSampler(StandardSampler):
    """Temperature, top_k, top_p and min_p as ``StandardSampler`` defines them.

    A draw reads a row a few times whatever its distribution looks like, wide nuclei included. Rows
    are shared among the threads; each is worked on by one of them, in the same order always.

    Args:
        capabilities: of the plugin.
        library: has the ops.
        vocab_size: V.
        num_threads: that a step of several rows uses.
    """

    def __init__(
        self,
        capabilities: SamplerCapabilities,
        library: NativeLibrary,
        *,
        vocab_size: int,
        num_threads: int,
    ) -> None:
        self.capabilities = capabilities
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        self._sample = library.op("sample")
        self._most_likely = library.op("most_likely")
        self._mask = library.op("mask")
        num_bytes = num_threads * sample_scratch_bytes(library, vocab_size)
        self._scratch = torch.empty(num_bytes, dtype=torch.uint8)

    def candidates(self, inputs: SampleInput) -> Candidates:
        """The definition, in float32 whatever the logits come in, without sorting if that helps."""
        return quick_candidates(replace(inputs, logits=inputs.logits.float()))

    def draw(self, inputs: SampleInput, uniforms: Tensor) -> Tensor:
        """The same tokens in one call."""
        logits = self._checked(inputs.logits)
        num_rows = logits.shape[0]
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        args = sample_args(
            logits,
            temperature=inputs.temperature,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            min_p=inputs.min_p,
            uniforms=uniforms,
            token_ids=token_ids,
            scratch=self._scratch,
        )
        self._sample(args, self._threads_for(num_rows))
        return token_ids

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """In one pass over the logits."""
        logits = self._checked(logits)
        num_rows = logits.shape[0]
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        best = torch.empty(num_rows, dtype=torch.float32)
        self._most_likely(most_likely_args(logits, token_ids, best), self._threads_for(num_rows))
        return token_ids, best

    def mask(self, logits: Tensor, bitmask: Tensor) -> None:
        """Writes where a token is forbidden, and reads nothing but the masks."""
        if logits.stride(1) != 1:
            super().mask(logits, bitmask)
        else:
            self._mask(mask_args(logits, bitmask.contiguous()), self._threads_for(logits.shape[0]))

    def _checked(self, logits: Tensor) -> Tensor:
        """Rows that lie in one piece; the scratch memory is for rows of one width."""
        if logits.shape[1] != self._vocab_size:
            raise ShapeError(f"logits are {logits.shape[1]} wide, not {self._vocab_size}")
        return logits if logits.stride(1) == 1 else logits.contiguous()

    def _threads_for(self, num_rows: int) -> int:
        # all or one: the runtime ends threads that a smaller team leaves idle, and starts them anew
        return self._num_threads if num_rows > 1 else 1
