"""``PlanningStep``: the moves of one step, each safe by construction, as a scheduler sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from hotshoe.api import (
    Granted,
    KVCacheError,
    LastStep,
    RefusalReason,
    Refused,
    RequestView,
    SchedulerError,
)
from hotshoe.engine.request import LiveRequestView, Request, RequestStatus

if TYPE_CHECKING:
    from hotshoe.engine.planner import Planner

_NO_BLOCKS = Refused(RefusalReason.NO_BLOCKS)
_NO_BUDGET = Refused(RefusalReason.NO_BUDGET)
_MAX_NUM_SEQS = Refused(RefusalReason.MAX_NUM_SEQS)
_NOT_READY = Refused(RefusalReason.NOT_READY)
_IN_FLIGHT = Refused(RefusalReason.IN_FLIGHT)
_ALREADY_GRANTED = Refused(RefusalReason.ALREADY_GRANTED)
_ONE_TOKEN = Granted(1)


class Grant(msgspec.Struct):
    """One request's part of the step being planned, with what is needed to undo it.

    Attributes:
        start: position of its first token.
        expected: content of the blocks that it fills; others wait for it.
    """

    request: Request
    num_tokens: int
    num_draft_slots: int
    samples: bool
    was_admitted: bool
    is_decode: bool
    start: int
    expected: Sequence[bytes]


class PlanningStep:
    """One step being planned: the ``StepPlanner`` that a scheduler gets."""

    def __init__(
        self, planner: Planner, arrived: list[RequestView], finished: list[RequestView]
    ) -> None:
        self._planner = planner
        self._limits = planner.limits
        self._kv_cache = planner.kv_cache
        self._is_open = True
        self._num_calls = 0
        self._max_calls = 1000 + 100 * (len(planner.running) + len(planner.waiting))
        self.arrived: Sequence[RequestView] = tuple(arrived)
        self.finished: Sequence[RequestView] = tuple(finished)
        self.token_budget = planner.limits.max_num_batched_tokens
        self.grants: dict[str, Grant] = {}
        self.num_preempted = 0

    @property
    def running(self) -> Sequence[RequestView]:
        return [one.view for one in self._planner.running.values()]

    @property
    def waiting(self) -> Sequence[RequestView]:
        return [one.view for one in self._planner.waiting.values()]

    @property
    def num_free_blocks(self) -> int:
        return self._kv_cache.num_free_blocks

    @property
    def num_blocks(self) -> int:
        return self._kv_cache.num_blocks

    @property
    def clock(self) -> float:
        return self._planner.clock()

    @property
    def last(self) -> LastStep | None:
        return self._planner.last

    def run(self, request: RequestView, max_tokens: int | None = None) -> Granted | Refused:
        live = self._live(request)
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise SchedulerError(
                f"step.run({live.request_id!r}, max_tokens={max_tokens!r}): "
                "max_tokens must be an int of at least 1, or None for no limit"
            )
        if live.granted_tokens:
            return _ALREADY_GRANTED
        if live.status is RequestStatus.RUNNING:
            return self._run_running(live, max_tokens)
        return self._run_waiting(live, max_tokens)

    def _run_running(self, request: Request, max_tokens: int | None) -> Granted | Refused:
        total = len(request.token_ids) + request.num_pending_tokens
        remaining = total - request.num_computed_tokens
        # with its last possible token in flight, or drafts unverified, nothing is known to compute
        if remaining <= 0 or total >= request.max_num_tokens:
            return _IN_FLIGHT
        num_tokens = self._trim(remaining, max_tokens)
        if num_tokens == 0:
            return _NO_BUDGET
        slots = 0
        if num_tokens == remaining and request.num_draft_tokens_wanted:
            slots = self._draft_slots(request, num_tokens, total, max_tokens)
        reach = request.num_computed_tokens + num_tokens
        if not self._has_room(request, reach + slots):
            if not slots or not self._has_room(request, reach):
                return _NO_BLOCKS
            slots = 0
        return self._grant(request, num_tokens, slots, num_tokens == remaining, was_admitted=False)

    def _run_waiting(self, request: Request, max_tokens: int | None) -> Granted | Refused:
        if request.num_in_flight:
            return _IN_FLIGHT
        if not request.is_ready:
            return _NOT_READY
        if self._planner.has_protected and self._planner.is_starving(request):
            return _IN_FLIGHT
        if not self._planner.has_free_row:
            return _MAX_NUM_SEQS
        if not self.token_budget:
            return _NO_BUDGET
        kv_cache = self._kv_cache
        if kv_cache.is_coming(request.blocks):
            return _NOT_READY
        total = len(request.token_ids)
        reach = min(total + self._limits.num_lookahead_slots, self._limits.max_model_len)
        if kv_cache.num_blocks_needed(request.blocks, reach) > kv_cache.num_free_blocks:
            # the whole prompt must fit: admitting chunk by chunk would only preempt it again
            return _NO_BLOCKS
        cached = kv_cache.take_cached(request.blocks)
        num_tokens = self._trim(total - cached, max_tokens)
        reach = min(
            cached + num_tokens + self._limits.num_lookahead_slots, self._limits.max_model_len
        )
        try:
            allocated = kv_cache.allocate(request.blocks, reach)
        except KVCacheError:
            kv_cache.free(request.blocks)
            raise
        if allocated is None:
            kv_cache.free(request.blocks)
            return _NO_BLOCKS
        self._planner.admit(request, cached)
        return self._grant(request, num_tokens, 0, num_tokens == total - cached, was_admitted=True)

    def _trim(self, remaining: int, max_tokens: int | None) -> int:
        num_tokens = min(remaining, self.token_budget)
        if max_tokens is not None:
            num_tokens = min(num_tokens, max_tokens)
        threshold = self._limits.long_prefill_token_threshold
        return num_tokens if threshold is None else min(num_tokens, threshold)

    def _draft_slots(
        self, request: Request, num_tokens: int, total: int, max_tokens: int | None
    ) -> int:
        slots = min(
            request.num_draft_tokens_wanted,
            self.token_budget - num_tokens,
            request.max_num_tokens - total - 1,
        )
        return slots if max_tokens is None else min(slots, max_tokens - num_tokens)

    def _has_room(self, request: Request, num_tokens: int) -> bool:
        lookahead = self._limits.num_lookahead_slots
        if lookahead:
            num_tokens = min(num_tokens + lookahead, self._limits.max_model_len)
        blocks = request.blocks
        return (
            num_tokens <= blocks.capacity or self._kv_cache.allocate(blocks, num_tokens) is not None
        )

    def _grant(
        self, request: Request, num_tokens: int, slots: int, samples: bool, *, was_admitted: bool
    ) -> Granted:
        is_decode = len(request.token_ids) + request.num_pending_tokens > request.num_prompt_tokens
        self.token_budget -= num_tokens + slots
        request.granted_tokens = num_tokens + slots
        start = request.num_computed_tokens
        request.num_computed_tokens = start + num_tokens
        # how many tokens a verification yields is not known before it commits
        if samples and not slots:
            request.num_pending_tokens += 1
        # single tokens fill a block now and then; nobody waits for the next word of another
        expected = (
            self._kv_cache.expect(request.blocks, start, start + num_tokens)
            if num_tokens > 1
            else ()
        )
        self.grants[request.request_id] = Grant(
            request, num_tokens, slots, samples, was_admitted, is_decode, start, expected
        )
        granted = num_tokens + slots
        return _ONE_TOKEN if granted == 1 else Granted(granted, slots)

    def preempt(self, request: RequestView) -> bool:
        live = self._live(request)
        if live.status is not RequestStatus.RUNNING or live.view.is_protected:
            return False
        grant = self.grants.get(live.request_id)
        if grant is not None:
            self._undo(grant)
            if grant.was_admitted:
                return True
        self._planner.preempt(live)
        self.num_preempted += 1
        return True

    def _undo(self, grant: Grant) -> None:
        request = grant.request
        del self.grants[request.request_id]
        self._kv_cache.settle(grant.expected)
        self.token_budget += grant.num_tokens + grant.num_draft_slots
        request.granted_tokens = 0
        request.num_computed_tokens -= grant.num_tokens
        if grant.samples and not grant.num_draft_slots:
            request.num_pending_tokens -= 1
        if grant.was_admitted:
            self._planner.unadmit(request)

    def undo_all(self) -> None:
        """Take every grant of this step back."""
        for grant in list(self.grants.values()):
            self._undo(grant)

    def reject(self, request: RequestView, why: str) -> None:
        live = self._live(request)
        if live.status is not RequestStatus.WAITING:
            raise SchedulerError(
                f"step.reject({live.request_id!r}): only waiting requests can be rejected, "
                f"this one is {live.status.name.lower()}"
            )
        del self._planner.waiting[live.request_id]
        live.status = RequestStatus.FINISHED
        self._planner.rejected.append((live, why))

    def idle(self, why: str, until: float | None = None) -> None:
        self._check_open()
        is_time = isinstance(until, int | float) and not math.isnan(until)
        if until is not None and not is_time:
            raise SchedulerError(
                f"step.idle({why!r}, until={until!r}): until must be a time on step.clock in "
                "seconds, or None to wait until the policy chooses otherwise"
            )
        self._planner.idle_reason = why
        self._planner.idle_until = until

    def num_blocks_needed(self, request: RequestView, num_tokens: int) -> int:
        live = self._live(request)
        return self._kv_cache.num_blocks_needed(live.blocks, live.num_computed_tokens + num_tokens)

    def close(self) -> None:
        """The policy has had its turn; later calls are refused."""
        self._is_open = False

    def _live(self, view: RequestView) -> Request:
        if type(view) is not LiveRequestView:
            raise SchedulerError(f"expected a request view, got {view!r}")
        self._check_open()
        self._num_calls += 1
        if self._num_calls > self._max_calls:
            raise SchedulerError(
                f"the scheduler made {self._num_calls} moves in one step; "
                "it seems to repeat a move that is refused"
            )
        request = view._request
        if request.status is RequestStatus.FINISHED:
            raise SchedulerError(f"request {request.request_id!r} has ended")
        planner = self._planner
        own = planner.running if request.status is RequestStatus.RUNNING else planner.waiting
        if own.get(request.request_id) is not request:
            raise SchedulerError(f"request {request.request_id!r} is one of another engine")
        return request

    def _check_open(self) -> None:
        if not self._is_open:
            raise SchedulerError("the step planner was used after schedule() had returned")
