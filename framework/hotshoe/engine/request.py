"""One request as the engine core knows it, and the read-only view that policies get."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from enum import Enum, auto
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from hotshoe.api import PositionLogprobs, SamplingParams

if TYPE_CHECKING:
    from hotshoe.kv_cache.manager import KVCacheManager, RequestBlocks


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end hands to the engine: one choice of one prompt, tokenized.

    Attributes:
        seed: 64-bit; None = derived from the engine's seed and the request's number.
        choice_index: which of the ``n`` choices this is.
        priority: lower runs first.
        cache_salt: only requests with an equal salt share cached prefixes.
        metadata: free values for schedulers.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int | None = None
    choice_index: int = 0
    priority: int = 0
    cache_salt: str | None = None
    metadata: dict[str, Any] = {}
    arrival_time_s: float | None = None


class RequestMetrics(msgspec.Struct, frozen=True):
    """Times of one request on the engine's monotonic clock, and what it cost.

    Attributes:
        token_times_s: when each output token was committed.
        num_draft_tokens: drafts verified for it; ``num_accepted_tokens`` were kept.
    """

    arrival_time_s: float
    first_scheduled_time_s: float | None
    token_times_s: list[float]
    num_cached_tokens: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def queue_time_s(self) -> float | None:
        """From arrival to the first step that ran it."""
        if self.first_scheduled_time_s is None:
            return None
        return self.first_scheduled_time_s - self.arrival_time_s

    @property
    def prefill_time_s(self) -> float | None:
        """From the first step that ran it to its first token."""
        if self.first_scheduled_time_s is None or not self.token_times_s:
            return None
        return self.token_times_s[0] - self.first_scheduled_time_s

    @property
    def time_to_first_token_s(self) -> float | None:
        """From arrival to the first token."""
        return self.token_times_s[0] - self.arrival_time_s if self.token_times_s else None

    @property
    def inter_token_times_s(self) -> list[float]:
        """Between consecutive tokens; tokens of one step have 0 between them."""
        times = self.token_times_s
        return [later - earlier for earlier, later in pairwise(times)]


class RequestUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What one step did for one request: what ``EngineCore.step`` returns.

    Attributes:
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``; None = it goes on.
        stop_reason: the stop token id that ended it, if it was one of ``stop_token_ids``.
        error: message if ``finish_reason`` is ``error``.
        prompt_logprobs: one entry per prompt token, None for the first; sent once, when complete.
        metrics: with the last update.
        num_cached_tokens: with the first tokens: how many of the prompt the prefix cache supplied.
        error_field: the sampling parameter that is at fault, if ``error`` is the request's own.
        is_unavailable: whether ``error`` is that it couldn't be served now; later it may.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error_field: str | None = None
    is_unavailable: bool = False


class Request:
    """Mutable state of one request. Changed by the planner while planning and by
    ``EngineCore._commit``, nowhere else.

    Attributes:
        token_ids: prompt and committed output; only grows.
        num_computed_tokens: tokens whose KV is computed or in flight, accepted drafts after
            their commit.
        num_committed_tokens: the part of it that is committed.
        num_pending_tokens: output tokens that steps in flight are sure to produce.
        num_in_flight: submitted steps that hold it and have not committed.
        num_sent_blocks: blocks, over all groups, that the workers know of.
    """

    __slots__ = (
        "arrival_index",
        "arrival_time_s",
        "blocks",
        "choice_index",
        "compiled_time_s",
        "eos_token_ids",
        "error",
        "finish_reason",
        "first_scheduled_time_s",
        "granted_tokens",
        "is_known_to_workers",
        "max_num_tokens",
        "metadata",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_committed_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_draft_tokens_wanted",
        "num_in_flight",
        "num_pending_tokens",
        "num_preemptions",
        "num_preemptions_without_progress",
        "num_prompt_tokens",
        "num_sent_blocks",
        "priority",
        "prompt_logprobs",
        "ready",
        "request_id",
        "row",
        "sampling_params",
        "seed",
        "status",
        "stop_reason",
        "token_ids",
        "token_times_s",
        "view",
    )

    def __init__(
        self,
        source: EngineRequest,
        *,
        seed: int,
        arrival_index: int,
        arrival_time_s: float,
        max_num_tokens: int,
        eos_token_ids: frozenset[int],
        kv_cache: KVCacheManager,
    ) -> None:
        params = source.sampling_params
        self.request_id = source.request_id
        self.token_ids = list(source.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling_params = params
        self.seed = seed
        self.choice_index = source.choice_index
        self.priority = source.priority
        self.metadata: Mapping[str, Any] = MappingProxyType(source.metadata)
        self.arrival_index = arrival_index
        self.arrival_time_s = arrival_time_s
        self.max_num_tokens = max_num_tokens
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.blocks: RequestBlocks = kv_cache.new_request(
            self.token_ids,
            salt=source.cache_salt,
            use_prefix_cache=params.prompt_logprobs is None,
        )
        self.status = RequestStatus.WAITING
        self.row: int | None = None
        self.ready: Future[Any] | None = None
        self.is_known_to_workers = False
        self.num_computed_tokens = 0
        self.num_committed_tokens = 0
        self.num_pending_tokens = 0
        self.num_in_flight = 0
        self.num_sent_blocks = 0
        self.granted_tokens = 0
        self.num_draft_tokens_wanted = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_preemptions_without_progress = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.compiled_time_s: float | None = None
        self.first_scheduled_time_s: float | None = None
        self.token_times_s: list[float] = []
        self.prompt_logprobs: list[PositionLogprobs | None] = [None]
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None
        self.view = LiveRequestView(self, kv_cache)

    @property
    def is_ready(self) -> bool:
        """Whether it has no constraint, or the engine has taken note of how compiling it ended. Not
        what the future says by now: with an error, it must never be planned.
        """
        return self.ready is None or self.compiled_time_s is not None

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    def metrics(self) -> RequestMetrics:
        """A snapshot of times and counts."""
        return RequestMetrics(
            arrival_time_s=self.arrival_time_s,
            first_scheduled_time_s=self.first_scheduled_time_s,
            token_times_s=self.token_times_s,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )


class LiveRequestView:
    """The ``RequestView`` of ``hotshoe.api``: properties only, the same object for the request's
    whole life.
    """

    __slots__ = ("_kv_cache", "_request", "is_protected")

    def __init__(self, request: Request, kv_cache: KVCacheManager) -> None:
        self._request = request
        self._kv_cache = kv_cache
        self.is_protected = False

    def __repr__(self) -> str:
        request = self._request
        return (
            f"<request {request.request_id!r} {request.status.name.lower()}, "
            f"{request.num_computed_tokens}/{len(request.token_ids)} tokens computed>"
        )

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def arrival_index(self) -> int:
        return self._request.arrival_index

    @property
    def arrival_time_s(self) -> float:
        return self._request.arrival_time_s

    @property
    def priority(self) -> int:
        return self._request.priority

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._request.metadata

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self._request.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return self._request.num_output_tokens + self._request.num_pending_tokens

    @property
    def max_num_tokens(self) -> int:
        return self._request.max_num_tokens

    @property
    def num_cached_tokens(self) -> int:
        request = self._request
        if request.status is RequestStatus.WAITING:
            return self._kv_cache.find_longest_cache_hit(request.blocks)
        return request.num_cached_tokens

    @property
    def num_blocks(self) -> int:
        return self._request.blocks.num_blocks

    @property
    def num_reclaimable_blocks(self) -> int:
        return self._kv_cache.num_reclaimable_blocks(self._request.blocks)

    @property
    def num_draft_tokens_wanted(self) -> int:
        return self._request.num_draft_tokens_wanted

    @property
    def granted_tokens(self) -> int:
        return self._request.granted_tokens

    @property
    def num_preemptions(self) -> int:
        return self._request.num_preemptions

    @property
    def is_preemptable(self) -> bool:
        return self._request.status is RequestStatus.RUNNING and not self.is_protected

    @property
    def first_token_time_s(self) -> float | None:
        times = self._request.token_times_s
        return times[0] if times else None

    @property
    def last_token_time_s(self) -> float | None:
        times = self._request.token_times_s
        return times[-1] if times else None
