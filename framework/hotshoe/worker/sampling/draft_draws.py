"""Drafts drawn as the target's tokens will be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from hotshoe.api.sampler import SampleInput, Sampler
from hotshoe.api.spec_decode import DraftDraws
from hotshoe.worker.random import uniforms
from hotshoe.worker.sampling.rows import RowTable

if TYPE_CHECKING:
    from torch import Tensor

# R=drafts drawn at once, V=vocab_size


class WorkerDraftDraws(DraftDraws):
    """Draws with the sampler, the parameters and the uniforms of the requests that are drafted for.

    Penalties, biases and masks are left out: they move few tokens, and a draft that they would
    forbid is refused like any other wrong one.

    Args:
        sampler: the target's.
        table: parameters by batch row.
        rows: batch row of each request.
        num_tokens: by batch row, the committed tokens, those of the last step included.
        vocab_size: V.
    """

    def __init__(
        self,
        sampler: Sampler,
        table: RowTable,
        rows: Sequence[int],
        num_tokens: NDArray[np.int64],
        vocab_size: int,
    ) -> None:
        self._sampler = sampler
        self._table = table
        self._rows = np.asarray(rows, dtype=np.int64)
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size

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
        positions = self._num_tokens[rows] + np.asarray(num_drafts_before, dtype=np.int64)
        numbers = uniforms(table.seeds[rows], table.choice_indices[rows], positions)
        inputs = SampleInput(
            logits=logits,
            temperature=self._on_device(table.temperature[rows], logits),
            top_k=self._on_device(table.top_k[rows], logits),
            top_p=self._on_device(table.top_p[rows], logits),
            min_p=self._on_device(table.min_p[rows], logits),
            is_all_greedy=False,
            is_any_filtered=table.is_any_filtered(rows[is_drawn]),
            extra_args=[table.request(row).sampling_params.extra_args for row in rows.tolist()],
        )
        greedy = None if is_drawn.all() else self._sampler.most_likely(logits)[0]
        drawn = self._sampler.draw(inputs, self._on_device(numbers, logits))
        if greedy is None:
            return drawn
        return torch.where(self._on_device(is_drawn, logits), drawn, greedy)

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

    @staticmethod
    def _on_device(values: NDArray[np.generic], logits: Tensor) -> Tensor:
        return torch.from_numpy(values).to(logits.device)
