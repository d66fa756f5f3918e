"""Sampling parameters by batch row, and how one step's logits rows map onto them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hotshoe.api.sampling_params import SamplingParams
from hotshoe.api.types import NewRequest
from hotshoe.errors import ShapeError
from hotshoe.worker.random import UniformsAhead

if TYPE_CHECKING:
    from torch import Tensor

    from hotshoe.worker.sampling.records import SamplingStep
    from hotshoe.worker.sampling.transfers import Transfers


class Feature:
    """What a request asks for beyond plain sampling, as bits of a number; most ask for nothing.

    Not an ``IntFlag``: testing one takes as long as a call of a native op.
    """

    PENALTIES = 1
    LOGIT_BIAS = 2
    ALLOWED_TOKENS = 4
    BAD_WORDS = 8
    MIN_TOKENS = 16
    LOGITS_PROCESSORS = 32
    LOGPROBS = 64


_TINY = float(np.finfo(np.float32).tiny)


class RowTable:
    """Parameters of the requests by batch row, in arrays that live as long as the worker."""

    def __init__(self, max_num_seqs: int) -> None:
        self.version = 0
        self.requests: list[NewRequest | None] = [None] * max_num_seqs
        self.features = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self.choice_indices = np.zeros(max_num_seqs, dtype=np.int64)
        self.needs_history = np.zeros(max_num_seqs, dtype=np.bool_)

    def add(self, row: int, request: NewRequest, *, has_processors: bool) -> int:
        """Put a request on a row and say what it asks for."""
        params = request.sampling_params
        self.version += 1
        self.requests[row] = request
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        # samplers are promised that it is above 0, which float32 could make of it
        self.top_p[row] = max(params.top_p, _TINY)
        self.min_p[row] = params.min_p
        self.seeds[row] = request.seed
        self.choice_indices[row] = request.choice_index
        features = features_of(request, has_processors=has_processors)
        self.features[row] = features
        self.needs_history[row] = _needs_history(features, params)
        return features

    def remove(self, row: int) -> None:
        """Forget the request of a row."""
        self.version += 1
        self.requests[row] = None
        self.features[row] = 0
        self.needs_history[row] = False

    def is_any_filtered(self, rows: NDArray[np.integer]) -> bool:
        """Whether any of these rows has top_k, top_p or min_p."""
        filtered = (self.top_k[rows] > 0) | (self.top_p[rows] < 1) | (self.min_p[rows] > 0)
        return bool(filtered.any())

    def request(self, row: int) -> NewRequest:
        """The request on a row, which must hold one."""
        request = self.requests[row]
        assert request is not None, f"batch row {row} holds no request"
        return request


def features_of(request: NewRequest, *, has_processors: bool) -> int:
    """Which features the parameters of a request switch on."""
    params = request.sampling_params
    asked = {
        Feature.PENALTIES: params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0,
        Feature.LOGIT_BIAS: bool(params.logit_bias),
        Feature.ALLOWED_TOKENS: params.allowed_token_ids is not None,
        Feature.BAD_WORDS: bool(params.bad_words_token_ids),
        Feature.MIN_TOKENS: params.min_tokens > 0 and bool(request.stop_token_ids),
        Feature.LOGITS_PROCESSORS: has_processors,
        Feature.LOGPROBS: params.logprobs is not None,
    }
    features = 0
    for feature, is_asked in asked.items():
        if is_asked:
            features |= feature
    return features


def _needs_history(features: int, params: SamplingParams) -> bool:
    """Whether what a request gets next depends on which tokens it has, beyond the logits and
    penalties.
    """
    return (
        bool(features & Feature.LOGITS_PROCESSORS)
        or any(len(word) > 1 for word in params.bad_words_token_ids)
        or params.structured_outputs is not None
    )


@dataclass(frozen=True)
class Layout:
    """Which request and which draft prefix each row of the logits belongs to.

    Lives as long as the batch stays the same, so that what is derived from it is derived once.

    Attributes:
        rows: batch row per request.
        starts: ``[num_reqs + 1]``, first logits row per request.
        request_index: ``[R]``, request of each logits row.
        num_drafts_before: ``[R]``, how many of its drafts precede each logits row.
        features: all features that any request asks for.
        requests: those on the rows.
        features_of_requests: ``[num_reqs]``, what each asks for.
        transfers: to the device of the logits.
    """

    table: RowTable
    requests: list[NewRequest]
    features_of_requests: NDArray[np.int64]
    rows: list[int]
    starts: list[int]
    request_index: NDArray[np.int64]
    num_drafts_before: NDArray[np.int64]
    batch_rows: NDArray[np.int64]
    features: int
    transfers: Transfers

    @classmethod
    def of(cls, step: SamplingStep, table: RowTable, transfers: Transfers) -> Layout:
        """Lay out one step.

        Raises:
            ShapeError: if the parts of the step don't fit together.
        """
        num_drafts = [len(drafts) for drafts in step.draft_token_ids]
        sizes = np.array(num_drafts, dtype=np.int64) + 1
        num_positions = int(sizes.sum())
        if len(step.rows) != len(num_drafts) or num_positions != step.logits.shape[0]:
            raise ShapeError(
                f"{step.logits.shape[0]} rows of logits and {len(num_drafts)} lists of drafts for "
                f"{len(step.rows)} requests with {num_positions} positions"
            )
        ends = np.cumsum(sizes)
        rows = np.asarray(step.rows, dtype=np.int64)
        features = table.features[rows]
        return cls(
            table=table,
            requests=[table.request(row) for row in step.rows],
            features_of_requests=features,
            rows=list(step.rows),
            starts=[0, *ends.tolist()],
            request_index=np.repeat(np.arange(len(rows)), sizes),
            num_drafts_before=np.arange(num_positions) - np.repeat(ends - sizes, sizes),
            batch_rows=np.repeat(rows, sizes),
            features=int(np.bitwise_or.reduce(features)) if len(rows) else 0,
            transfers=transfers,
        )

    def requests_with(self, feature: int) -> list[int]:
        """Indices of the requests that ask for a feature."""
        if not self.features & feature:
            return []
        return np.flatnonzero(self.features_of_requests & feature).tolist()

    def positions(self, index: int) -> range:
        """Logits rows of a request."""
        return range(self.starts[index], self.starts[index + 1])

    @cached_property
    def is_greedy(self) -> NDArray[np.bool_]:
        """``[R]``."""
        is_greedy: NDArray[np.bool_] = self.table.temperature[self.batch_rows] == 0
        return is_greedy

    @cached_property
    def is_all_greedy(self) -> bool:
        """Whether no row needs a uniform."""
        return bool(self.is_greedy.all())

    @cached_property
    def is_any_greedy(self) -> bool:
        """Whether any row needs none."""
        return bool(self.is_greedy.any())

    @cached_property
    def is_greedy_on_device(self) -> Tensor:
        """``[R]`` bool on the device."""
        return self.transfers.stage(self.is_greedy)

    @cached_property
    def drawn_rows(self) -> NDArray[np.intp]:
        """Logits rows that need a uniform."""
        return np.flatnonzero(~self.is_greedy)

    @cached_property
    def uniforms(self) -> UniformsAhead:
        """Of ``drawn_rows``."""
        rows = self.batch_rows[self.drawn_rows]
        return UniformsAhead(self.table.seeds[rows], self.table.choice_indices[rows])

    @cached_property
    def is_any_filtered(self) -> bool:
        """Whether a row that is drawn has top_k, top_p or min_p."""
        return self.table.is_any_filtered(self.batch_rows[self.drawn_rows])

    @cached_property
    def temperature(self) -> Tensor:
        """``[R]`` float32 on the device."""
        return self._gathered(self.table.temperature)

    @cached_property
    def top_k(self) -> Tensor:
        """``[R]`` int64 on the device."""
        return self._gathered(self.table.top_k)

    @cached_property
    def top_p(self) -> Tensor:
        """``[R]`` float32 on the device."""
        return self._gathered(self.table.top_p)

    @cached_property
    def min_p(self) -> Tensor:
        """``[R]`` float32 on the device."""
        return self._gathered(self.table.min_p)

    @cached_property
    def extra_args(self) -> Sequence[Mapping[str, Any] | None]:
        """``SamplingParams.extra_args`` per logits row."""
        extra_args = [request.sampling_params.extra_args for request in self.requests]
        return [extra_args[index] for index in self.request_index.tolist()]

    def _gathered(self, values: NDArray[Any]) -> Tensor:
        return self.transfers.stage(values[self.batch_rows])
