"""Changes to logits that address single tokens: flat indices collected per row, applied at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotshoe.worker.sampling.rows import Feature

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe.api.types import NewRequest
    from hotshoe.worker.sampling.records import SamplingStep
    from hotshoe.worker.sampling.rows import Layout

Ids = NDArray[np.int64]


class StaticEdits:
    """``logit_bias`` and ``allowed_token_ids``: the same at every position of a request."""

    def __init__(self) -> None:
        self._bias: dict[int, tuple[Ids, NDArray[np.float32]]] = {}
        self._allowed: dict[int, Ids] = {}
        self._layout: Layout | None = None
        self._bias_tensors: tuple[Tensor, Tensor] | None = None
        self._allowed_tensors: tuple[Tensor, Tensor] | None = None

    def add(self, row: int, request: NewRequest) -> None:
        """Prepare the arrays of a request."""
        params = request.sampling_params
        if params.logit_bias:
            values = np.array(list(params.logit_bias.values()), dtype=np.float32)
            self._bias[row] = as_ids(list(params.logit_bias)), values
        if params.allowed_token_ids is not None:
            self._allowed[row] = as_ids(params.allowed_token_ids)

    def remove(self, row: int) -> None:
        """Forget a request."""
        self._bias.pop(row, None)
        self._allowed.pop(row, None)

    def apply(self, logits: Tensor, layout: Layout) -> None:
        """Add biases, then mask what isn't allowed, in place."""
        if layout is not self._layout:
            self._gather(layout, logits)
        flat = logits.view(-1)
        if self._bias_tensors is not None:
            where, values = self._bias_tensors
            flat[where] += values
        if self._allowed_tensors is not None:
            where, rows = self._allowed_tensors
            kept = flat[where]
            logits.index_fill_(0, rows, -torch.inf)
            flat[where] = kept

    def _gather(self, layout: Layout, logits: Tensor) -> None:
        self._layout, self._bias_tensors, self._allowed_tensors = layout, None, None
        biased = _logits_rows(layout, Feature.LOGIT_BIAS)
        if biased:
            pairs = [self._bias[layout.rows[index]] for index, _ in biased]
            values = np.concatenate([values for _, values in pairs])
            self._bias_tensors = (
                flat_indices([row for _, row in biased], [ids for ids, _ in pairs], logits, layout),
                layout.transfers.stage(values),
            )
        allowed = _logits_rows(layout, Feature.ALLOWED_TOKENS)
        if allowed:
            rows = [row for _, row in allowed]
            ids = [self._allowed[layout.rows[index]] for index, _ in allowed]
            self._allowed_tensors = (
                flat_indices(rows, ids, logits, layout),
                layout.transfers.stage(as_ids(rows)),
            )


class HistoryMasks:
    """``bad_words_token_ids`` and ``min_tokens``: what they mask depends on the tokens so far."""

    def __init__(self) -> None:
        self._words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._stop_ids: dict[int, Ids] = {}
        self._min_tokens: dict[int, int] = {}

    def add(self, row: int, request: NewRequest) -> None:
        """Prepare the arrays of a request."""
        params = request.sampling_params
        if params.bad_words_token_ids:
            self._words[row] = params.bad_words_token_ids
        if params.min_tokens:
            self._stop_ids[row] = as_ids(request.stop_token_ids)
            self._min_tokens[row] = params.min_tokens

    def remove(self, row: int) -> None:
        """Forget a request."""
        self._words.pop(row, None)
        self._stop_ids.pop(row, None)
        self._min_tokens.pop(row, None)

    def apply(self, logits: Tensor, layout: Layout, step: SamplingStep) -> None:
        """Mask what would end an output too early or complete a bad word, in place."""
        rows: list[int] = []
        ids: list[Ids] = []
        for index in layout.requests_with(Feature.MIN_TOKENS):
            row = layout.rows[index]
            num_output = int(step.num_tokens[row]) - int(step.num_prompt_tokens[row])
            num_masked = max(self._min_tokens[row] - num_output, 0)
            for logits_row in layout.positions(index)[:num_masked]:
                rows.append(logits_row)
                ids.append(self._stop_ids[row])
        for index in layout.requests_with(Feature.BAD_WORDS):
            row = layout.rows[index]
            tail = _output_tail(self._words[row], step, row)
            for num_drafts, logits_row in enumerate(layout.positions(index)):
                history = [*tail, *step.draft_token_ids[index][:num_drafts]]
                rows.append(logits_row)
                ids.append(as_ids(_completing(self._words[row], history)))
        if rows:
            logits.view(-1)[flat_indices(rows, ids, logits, layout)] = -torch.inf


def as_ids(token_ids: Sequence[int]) -> Ids:
    """Token ids as int64."""
    return np.array(token_ids, dtype=np.int64)


def flat_indices(rows: Sequence[int], ids: Sequence[Ids], logits: Tensor, layout: Layout) -> Tensor:
    """Positions in the flattened logits, on their device: for each logits row its token ids."""
    lengths = [len(row_ids) for row_ids in ids]
    starts = np.repeat(as_ids(rows) * logits.shape[1], lengths)
    return layout.transfers.stage(starts + np.concatenate(ids))


def _logits_rows(layout: Layout, feature: int) -> list[tuple[int, int]]:
    """(request index, logits row) of every row of the requests that ask for a feature."""
    indices = layout.requests_with(feature)
    return [(index, row) for index in indices for row in layout.positions(index)]


def _output_tail(words: Sequence[Sequence[int]], step: SamplingStep, row: int) -> list[int]:
    """As much of the end of the output as the longest word needs."""
    end = int(step.num_tokens[row])
    start = max(int(step.num_prompt_tokens[row]), end + 1 - max(map(len, words)))
    tail: Any = step.token_ids[row, start:end].tolist()
    return list(tail)


def _completing(words: Sequence[Sequence[int]], history: list[int]) -> list[int]:
    """Last tokens of the words of which the history already holds the rest."""
    masked = []
    for word in words:
        num_before = len(word) - 1
        if num_before <= len(history) and history[len(history) - num_before :] == list(word[:-1]):
            masked.append(word[-1])
    return masked
