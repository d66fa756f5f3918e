"""Drafts drawn as the target's tokens will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from hotshoe.api.sampler import SampleInput, Sampler, gumbel_max
from hotshoe.api.spec_decode import DraftDraws
from hotshoe.worker.random import uniforms
from hotshoe.worker.sampling.judge import DraftSources, DrawnDrafts
from hotshoe.worker.sampling.rows import RowTable

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe.worker.sampling.transfers import Transfers

# R=drafts drawn at once, V=vocab_size


class WorkerDraftDraws(DraftDraws):
    """Draws with the sampler, the parameters and the uniforms of the requests that are drafted for.

    Penalties, biases and masks are left out: they move few tokens, and a draft that they would
    forbid is refused like any other wrong one.

    Args:
        sampler: the target's.
        table: parameters by batch row.
        transfers: to the device of the logits.
        rows: batch row of each request.
        num_tokens: by batch row, the committed tokens, those of the last step included.
        vocab_size: V.
        sources: told what each draft was drawn from; None if nobody asks for it.
    """

    def __init__(
        self,
        sampler: Sampler,
        table: RowTable,
        transfers: Transfers,
        rows: Sequence[int],
        num_tokens: NDArray[np.int64],
        vocab_size: int,
        sources: DraftSources | None = None,
    ) -> None:
        self._sampler = sampler
        self._table = table
        self._transfers = transfers
        self._rows = np.asarray(rows, dtype=np.int64)
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._sources = sources
        # drafts are drawn one after the other, mostly for the same requests
        self._requests: Sequence[int] = ()
        self._parameters: SampleInput | None = None
        self._is_drawn_on_device: Tensor | None = None

    def draw(
        self,
        logits: Tensor,
        requests: Sequence[int],
        num_drafts_before: Sequence[int],
        token_ids: Tensor | None = None,
    ) -> Tensor:
        table, rows = self._table, self._rows[np.asarray(requests, dtype=np.int64)]
        logits = self._over_vocabulary(logits, token_ids)
        is_drawn = table.temperature[rows] > 0
        if not is_drawn.any():
            return self._sampler.most_likely(logits)[0]
        if self._parameters is None or self._requests != requests:
            self._requests = list(requests)
            self._parameters = self._parameters_of(rows, is_drawn, logits)
            self._is_drawn_on_device = None if is_drawn.all() else self._transfers.stage(is_drawn)
        positions = self._num_tokens[rows] + np.asarray(num_drafts_before, dtype=np.int64)
        numbers = uniforms(table.seeds[rows], table.choice_indices[rows], positions)
        inputs = replace(self._parameters, logits=logits)
        is_drawn_on_device = self._is_drawn_on_device
        if is_drawn_on_device is None:
            return self._drawn(inputs, numbers, rows, positions)
        greedy = self._sampler.most_likely(logits)[0]  # before a draw overwrites the logits
        drawn = self._drawn(inputs, numbers, rows, positions)
        return torch.where(is_drawn_on_device, drawn, greedy)

    def _drawn(
        self,
        inputs: SampleInput,
        numbers: NDArray[np.float64],
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> Tensor:
        keys = self._transfers.stage(numbers)
        if self._sources is None:
            return self._sampler.draw(inputs, keys)
        candidates = self._sampler.candidates(inputs)
        if _share_memory(candidates.probs, inputs.logits):
            # a drafter writes its next logits there before these drafts are verified
            candidates = replace(candidates, probs=candidates.probs.clone())
        drawn = gumbel_max(candidates, keys)
        self._sources.add(rows, positions, DrawnDrafts(drawn, candidates))
        return drawn

    def _parameters_of(
        self, rows: NDArray[np.int64], is_drawn: NDArray[np.bool_], logits: Tensor
    ) -> SampleInput:
        table, stage = self._table, self._transfers.stage
        return SampleInput(
            logits=logits,
            temperature=stage(table.temperature[rows]),
            top_k=stage(table.top_k[rows]),
            top_p=stage(table.top_p[rows]),
            min_p=stage(table.min_p[rows]),
            is_all_greedy=False,
            is_any_filtered=table.is_any_filtered(rows[is_drawn]),
            extra_args=[table.request(row).sampling_params.extra_args for row in rows.tolist()],
        )

    def _over_vocabulary(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """``[R, V]`` in a type that the sampler takes; ``-inf`` where the drafter has no token."""
        dtype = str(logits.dtype).removeprefix("torch.")
        if dtype not in self._sampler.capabilities.logits_dtypes:
            logits = logits.float()
        if token_ids is None and logits.shape[1] == self._vocab_size:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        if token_ids is None:
            width = min(logits.shape[1], self._vocab_size)
            whole[:, :width] = logits[:, :width]
            return whole
        return whole.index_copy_(1, token_ids, logits)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
