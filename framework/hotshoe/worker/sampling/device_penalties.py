"""Penalties on a GPU: counts that grow there, so that no token has to come back first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hotshoe.worker.sampling.rows import Feature

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from hotshoe.worker.sampling.records import SamplingStep
    from hotshoe.worker.sampling.rows import Layout

# S=requests that have room, n=logits rows of requests with penalties, V=vocab_size

# what a token adds to its number, of which half is the count then
_IN_PROMPT = 1
_IN_OUTPUT = 2


@dataclass(frozen=True, slots=True)
class _Rows:
    """The logits rows of one layout that are penalised.

    Attributes:
        where: ``[n]`` int64, on the device; None = all.
        slots: ``[n]`` int64, on the device, where their requests are counted.
        strengths: repetition, presence and frequency, each ``[n, 1]`` float32.
    """

    where: Tensor | None
    slots: Tensor
    strengths: tuple[Tensor, Tensor, Tensor]


class DevicePenalties:
    """What ``Penalties`` does, over counts of the whole vocabulary that stay on the device.

    A token is counted when it is drawn. So once a request has drawn one, its next needs nothing
    from the host, unless it has drafts: which of them are kept isn't known here.

    Args:
        vocab_size: V.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._num_counted: dict[int, int] = {}
        self._complete: set[int] = set()  # batch rows of which every drawn token is counted
        self._layout: Layout | None = None
        self._rows: _Rows | None = None

    def add(self, row: int) -> None:
        """Start counting for a request; its history is read when it first samples."""
        self.remove(row)
        if not self._free:
            self._grow()
        slot = self._slots[row] = self._free.pop()
        self._counts[slot].zero_()
        self._num_counted[row] = 0

    def remove(self, row: int) -> None:
        """Forget a request."""
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._free.append(slot)
            del self._num_counted[row]
            self._complete.discard(row)

    def _grow(self) -> None:
        num_before = len(self._counts)
        num_slots = max(2 * num_before, 4)
        counts = torch.zeros((num_slots, self._vocab_size), dtype=torch.int32, device=self._device)
        counts[:num_before] = self._counts
        self._counts = counts
        self._free += range(num_before, num_slots)

    def needs_history(self, rows: Sequence[int]) -> bool:
        """Whether tokens of any of these batch rows aren't counted yet."""
        return any(row in self._slots and row not in self._complete for row in rows)

    def apply(self, logits: Tensor, layout: Layout, step: SamplingStep) -> None:
        """Penalise in place; each row by its own history, its draft prefix included."""
        self._catch_up(layout, step)
        rows = self._rows_of(layout)
        seen = self._counts.index_select(0, rows.slots)
        self._add_drafts(seen, layout, step)
        counts = seen >> 1
        repetition, presence, frequency = rows.strengths
        values = logits if rows.where is None else logits.index_select(0, rows.where)
        penalised = torch.where(values > 0, values / repetition, values * repetition)
        penalised = torch.where(seen > 0, penalised, values)
        penalised = penalised - frequency * counts - presence * (counts > 0)
        if rows.where is None:
            logits.copy_(penalised)
        else:
            logits.index_copy_(0, rows.where, penalised)

    def count_drawn(self, token_ids: Tensor, layout: Layout, step: SamplingStep) -> None:
        """Count the tokens that were drawn, of requests without drafts.

        Args:
            token_ids: ``[R]`` int64, below V.
            layout: of the step.
            step: of which ``apply`` has seen the logits.
        """
        indices = layout.requests_with(Feature.PENALTIES)
        undrafted = [index for index in indices if not step.draft_token_ids[index]]
        for index in indices:
            self._complete.discard(layout.rows[index])
        for index in undrafted:
            row = layout.rows[index]
            self._complete.add(row)
            self._num_counted[row] = int(step.num_tokens[row]) + 1
        if not undrafted:
            return
        rows = self._rows_of(layout)
        slots, where = rows.slots, rows.where
        if len(layout.batch_rows) != len(layout.rows):
            stage = layout.transfers.stage
            slots = stage(np.array([self._slots[layout.rows[index]] for index in undrafted]))
            where = stage(np.array([layout.starts[index] for index in undrafted]))
        drawn = token_ids if where is None else token_ids.index_select(0, where)
        self._add(slots * self._vocab_size + drawn, None)

    def _catch_up(self, layout: Layout, step: SamplingStep) -> None:
        """Count the tokens that were committed and aren't counted."""
        ids: list[NDArray[np.int64]] = []
        weights: list[NDArray[np.int32]] = []
        for index in layout.requests_with(Feature.PENALTIES):
            row = layout.rows[index]
            num_counted, num_tokens = self._num_counted[row], int(step.num_tokens[row])
            assert num_tokens >= num_counted, "committed tokens are never taken back"
            if num_tokens == num_counted:
                continue
            num_prompt = int(step.num_prompt_tokens[row])
            prompt = np.unique(step.token_ids[row, :num_prompt]) if not num_counted else ()
            output = step.token_ids[row, max(num_counted, num_prompt) : num_tokens]
            first = self._slots[row] * self._vocab_size
            ids.append(first + np.concatenate((prompt, output)).astype(np.int64))
            weights.append(np.repeat([_IN_PROMPT, _IN_OUTPUT], [len(prompt), len(output)]))
            self._num_counted[row] = num_tokens
        if ids:
            stage = layout.transfers.stage
            self._add(stage(np.concatenate(ids)), stage(np.concatenate(weights).astype(np.int32)))

    def _add_drafts(self, seen: Tensor, layout: Layout, step: SamplingStep) -> None:
        """Count, in ``[n, V]``, the drafts that come before each row."""
        ids: list[int] = []
        first = 0
        for index in layout.requests_with(Feature.PENALTIES):
            drafts = step.draft_token_ids[index]
            for num_before in range(len(drafts) + 1):
                ids += [first + token_id for token_id in drafts[:num_before]]
                first += self._vocab_size
        if ids:
            where = layout.transfers.stage(np.array(ids))
            seen.view(-1).scatter_add_(0, where, _twos(where))

    def _add(self, where: Tensor, weights: Tensor | None) -> None:
        """Add to flat places; None = that of an output token."""
        weights = _twos(where) if weights is None else weights
        self._counts.view(-1).scatter_add_(0, where, weights)

    def _rows_of(self, layout: Layout) -> _Rows:
        """The rows of a layout, those of the last one if it's the same."""
        if self._rows is not None and layout is self._layout:
            return self._rows
        where: list[int] = []
        slots: list[int] = []
        strengths: list[tuple[float, float, float]] = []
        for index in layout.requests_with(Feature.PENALTIES):
            params = layout.requests[index].sampling_params
            for row in layout.positions(index):
                where.append(row)
                slots.append(self._slots[layout.rows[index]])
                strengths.append(
                    (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
                )
        stage = layout.transfers.stage
        repetition, presence, frequency = stage(np.array(strengths, np.float32))[:, :, None].unbind(
            1
        )
        self._layout = layout
        self._rows = _Rows(
            where=None if len(where) == len(layout.batch_rows) else stage(np.array(where)),
            slots=stage(np.array(slots)),
            strengths=(repetition, presence, frequency),
        )
        return self._rows


def _twos(where: Tensor) -> Tensor:
    return torch.full_like(where, _IN_OUTPUT, dtype=torch.int32)
