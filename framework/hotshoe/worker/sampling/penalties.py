"""Repetition, presence and frequency penalties over counts that grow with each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from hotshoe.worker.sampling.edits import Ids, as_ids, flat_indices
from hotshoe.worker.sampling.rows import Feature

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe.worker.sampling.records import SamplingStep
    from hotshoe.worker.sampling.rows import Layout


class TokenCounts:
    """The distinct tokens of one request and how often each stands in its output."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def catch_up(self, token_ids: NDArray[np.int32], num_tokens: int, num_prompt: int) -> None:
        """Count the tokens committed since the last call.

        Args:
            token_ids: the committed tokens, prompt first.
            num_tokens: how many there are.
            num_prompt: how many of them are the prompt, which is seen but not counted.
        """
        assert num_tokens >= self._num_seen, "committed tokens are never taken back"
        if self._num_seen < num_prompt:
            for token_id in np.unique(token_ids[:num_prompt]).tolist():
                self._add(token_id, 0)
            self._num_seen = num_prompt
        for token_id in token_ids[self._num_seen : num_tokens].tolist():
            self._add(token_id, 1)
        self._num_seen = num_tokens

    def with_drafts(self, drafts: Sequence[int]) -> tuple[Ids, NDArray[np.float32]]:
        """Distinct token ids and their counts in the output, as if the drafts were committed."""
        size = len(self._slots)
        if not drafts:
            return self._ids[:size], self._counts[:size]
        new = [token_id for token_id in dict.fromkeys(drafts) if token_id not in self._slots]
        slots = self._slots | {token_id: size + slot for slot, token_id in enumerate(new)}
        counts = np.concatenate((self._counts[:size], np.zeros(len(new), dtype=np.float32)))
        for token_id in drafts:
            counts[slots[token_id]] += 1
        return np.concatenate((self._ids[:size], as_ids(new))), counts

    def _add(self, token_id: int, count: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token_id
        self._counts[slot] += count


class Penalties:
    """Applies the penalties of all requests that have any."""

    def __init__(self) -> None:
        self._counts: dict[int, TokenCounts] = {}

    def add(self, row: int) -> None:
        """Start counting for a request; its history is read when it first samples."""
        self._counts[row] = TokenCounts()

    def remove(self, row: int) -> None:
        """Forget a request."""
        self._counts.pop(row, None)

    def needs_history(self, rows: Sequence[int]) -> bool:
        """Whether any of these batch rows is penalised."""
        return any(row in self._counts for row in rows)

    def apply(self, logits: Tensor, layout: Layout, step: SamplingStep) -> None:
        """Penalise in place; each row by its own history, its draft prefix included."""
        rows: list[int] = []
        ids: list[Ids] = []
        counts: list[NDArray[np.float32]] = []
        strengths: list[tuple[float, float, float]] = []
        for index in layout.requests_with(Feature.PENALTIES):
            row = layout.rows[index]
            seen = self._counts[row]
            num_tokens, num_prompt = int(step.num_tokens[row]), int(step.num_prompt_tokens[row])
            seen.catch_up(step.token_ids[row], num_tokens, num_prompt)
            params = layout.table.request(row).sampling_params
            for num_drafts, logits_row in enumerate(layout.positions(index)):
                row_ids, row_counts = seen.with_drafts(step.draft_token_ids[index][:num_drafts])
                rows.append(logits_row)
                ids.append(row_ids)
                counts.append(row_counts)
                strengths.append(
                    (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
                )
        lengths = [len(row_ids) for row_ids in ids]
        factors = np.repeat(np.array(strengths, dtype=np.float32), lengths, axis=0)
        stage = layout.transfers.stage
        repetition, presence, frequency = stage(factors).unbind(1)
        count = stage(np.concatenate(counts))
        flat, where = logits.view(-1), flat_indices(rows, ids, logits, layout)
        values = flat[where]
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat[where] = values - frequency * count - presence * (count > 0)
