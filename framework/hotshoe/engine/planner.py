"""The planner: moves that are safe by construction, offered to the scheduler, and their outcome as
a ``StepPlan``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from hotshoe.api import (
    AppendedBlocks,
    Granted,
    KVCacheError,
    LastStep,
    NewRequest,
    RefusalReason,
    Refused,
    RequestView,
    ResumedRequest,
    Scheduler,
    SchedulerError,
    SchedulerStalledError,
    StepPlan,
)
from hotshoe.engine.request import LiveRequestView, Request, RequestStatus
from hotshoe.kv_cache.manager import KVCacheManager

_NO_BLOCKS = Refused(RefusalReason.NO_BLOCKS)
_NO_BUDGET = Refused(RefusalReason.NO_BUDGET)
_MAX_NUM_SEQS = Refused(RefusalReason.MAX_NUM_SEQS)
_NOT_READY = Refused(RefusalReason.NOT_READY)
_IN_FLIGHT = Refused(RefusalReason.IN_FLIGHT)
_ALREADY_GRANTED = Refused(RefusalReason.ALREADY_GRANTED)


class Clock(Protocol):
    """Seconds, monotonic."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerLimits:
    """What no plan may exceed.

    Attributes:
        max_num_batched_tokens: tokens in a step.
        long_prefill_token_threshold: prompt tokens of one request in a step; None = no limit of
            its own.
        max_preemptions_without_progress: after so many a request is protected until it commits
            a token.
        num_lookahead_slots: KV slots past the scheduled tokens that a drafter writes to.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int | None = None
    max_preemptions_without_progress: int = 3
    num_lookahead_slots: int = 0


@dataclass(slots=True)
class Grant:
    """One request's part of the step being planned, with what is needed to undo it.

    Attributes:
        start: position of its first token.
    """

    request: Request
    num_tokens: int
    num_draft_slots: int
    samples: bool
    was_admitted: bool
    is_decode: bool
    start: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan with the requests it is about, in the order of its columns."""

    plan: StepPlan
    requests: list[Request]
    grants: list[Grant]
    num_preempted: int
    plan_time_s: float


class Planner:
    """Owns who waits, who runs and who holds which row; turns a policy's choices into plans.

    Attributes:
        waiting: by request id, in order of arrival; preempted requests among them.
        running: by request id, in order of admission.
    """

    def __init__(self, limits: PlannerLimits, kv_cache: KVCacheManager, clock: Clock) -> None:
        self.limits = limits
        self.kv_cache = kv_cache
        self.clock = clock
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.last: LastStep | None = None
        self.idle_until: float | None = None
        self.idle_reason: str | None = None
        self.rejected: list[tuple[Request, str]] = []
        self._free_rows = list(range(limits.max_num_seqs))[::-1]
        self._next_step_id = 0
        self._arrived: list[RequestView] = []
        self._finished: list[RequestView] = []
        self._finished_ids: list[str] = []
        self._preempted_ids: list[str] = []
        self._protected: Request | None = None
        self._eviction_error: KVCacheError | None = None

    # -- requests come and go ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.waiting[request.request_id] = request
        self._arrived.append(request.view)

    def finish(self, request: Request) -> None:
        """Take a request out of every queue; its blocks come back now, or when its steps in flight
        have committed.
        """
        if request.status is RequestStatus.RUNNING:
            del self.running[request.request_id]
            self._release_row(request)
        else:
            self.waiting.pop(request.request_id, None)
        request.status = RequestStatus.FINISHED
        self._unprotect(request)
        self._finished.append(request.view)
        if request.is_known_to_workers or (request.ready is not None and request.ready.done()):
            self.tell_finished(request)
            if request.request_id in self._preempted_ids:
                self._preempted_ids.remove(request.request_id)
        self.release_blocks(request)

    def tell_finished(self, request: Request) -> None:
        """Let the workers drop what they keep for a request that has ended."""
        self._finished_ids.append(request.request_id)

    def release_blocks(self, request: Request) -> None:
        """Free the blocks of a request that doesn't run any more, once none of its steps is in
        flight.
        """
        if request.num_in_flight == 0 and request.status is not RequestStatus.RUNNING:
            try:
                self.kv_cache.free(request.blocks)
            except KVCacheError as error:
                # they are free all the same: a commit under way must not be cut short by this
                self._eviction_error = self._eviction_error or error
            request.num_sent_blocks = 0

    def made_progress(self, request: Request) -> None:
        """A token was committed: earlier preemptions are forgiven."""
        request.num_preemptions_without_progress = 0
        self._unprotect(request)

    @property
    def has_news_for_workers(self) -> bool:
        """Whether a plan is due even if nobody runs."""
        return bool(self._finished_ids or self._preempted_ids)

    def is_starving(self, request: Request) -> bool:
        """Whether a request was preempted so often without a new token that it must get one."""
        limit = self.limits.max_preemptions_without_progress
        return request.num_preemptions_without_progress >= limit

    @property
    def has_protected(self) -> bool:
        """Whether a request is running that can't be preempted.

        It's one at a time, as two could hold each other's last block for ever. Until it has its
        token no other that starves is admitted, or they would go on to take each other's place
        while the policy leaves it out. So every policy that runs somebody gets tokens in the end.
        """
        return self._protected is not None

    def _unprotect(self, request: Request) -> None:
        if self._protected is request:
            self._protected = None
            request.view.is_protected = False

    def _release_row(self, request: Request) -> None:
        assert request.row is not None
        self._free_rows.append(request.row)
        request.row = None

    # -- planning -------------------------------------------------------------------------

    def plan(self, scheduler: Scheduler, *, num_in_flight: int = 0) -> PlannedStep:
        """Ask the policy, and make a plan of its choices.

        Args:
            scheduler: the policy.
            num_in_flight: submitted steps that have not committed; while there are any,
                choosing nobody is no stall.

        Raises:
            SchedulerError: if the policy broke its contract or raised; its grants are undone.
            SchedulerStalledError: if it ran nobody though somebody could run, and declared no
                idling.
            KVCacheError: if the eviction policy broke its contract, here or since the last call.
        """
        started = perf_counter()
        if self._eviction_error is not None:
            error, self._eviction_error = self._eviction_error, None
            raise error
        step = PlanningStep(self, self._arrived, self._finished)
        self._arrived, self._finished = [], []
        self.idle_until = self.idle_reason = None
        if self.running or self.waiting or step.finished:
            self._ask(scheduler, step)
        if not step.grants and not num_in_flight and not self.has_news_for_workers:
            self._check_stall(scheduler)
        return self._build(step, started)

    def plan_news(self) -> PlannedStep:
        """A plan that only tells the workers who has ended or was preempted; no policy is asked."""
        return self._build(PlanningStep(self, [], []), perf_counter())

    def _ask(self, scheduler: Scheduler, step: PlanningStep) -> None:
        try:
            scheduler.schedule(step)
        except BaseException as error:
            step.undo_all()
            self._arrived, self._finished = list(step.arrived), list(step.finished)
            # a broken eviction policy isn't the scheduler's fault, nor is Ctrl-C
            is_own = isinstance(error, SchedulerError | KVCacheError)
            if is_own or not isinstance(error, Exception):
                raise
            name = type(scheduler).__name__
            raise SchedulerError(f"scheduler {name} raised {error!r}") from error
        finally:
            step.close()

    def _check_stall(self, scheduler: Scheduler) -> None:
        ready = [one for one in self.waiting.values() if one.ready is None or one.ready.done()]
        alive = [*self.running.values(), *ready]
        if not alive or self.idle_reason is not None or self.rejected:
            return
        first = alive[0]
        needed = self.kv_cache.num_blocks_needed(
            first.blocks, min(len(first.token_ids), self.limits.max_num_batched_tokens)
        )
        raise SchedulerStalledError(
            f"scheduler {type(scheduler).__name__} ran nothing and declared no idling, though "
            f"{len(self.running)} requests are running and {len(ready)} are ready to run; "
            f"{self.kv_cache.num_free_blocks} of {self.kv_cache.num_blocks} KV blocks are free; "
            f"the first request, {first.request_id!r}, needs {needed}; "
            "call step.run() for somebody, or step.idle() to wait on purpose"
        )

    def _build(self, step: PlanningStep, started: float) -> PlannedStep:
        new: list[NewRequest] = []
        resumed: list[ResumedRequest] = []
        appended: list[AppendedBlocks] = []
        grants = list(step.grants.values())
        requests: list[Request] = []
        request_ids: list[str] = []
        rows: list[int] = []
        num_tokens: list[int] = []
        num_slots: list[int] = []
        for grant in grants:
            request = grant.request
            row = request.row
            assert row is not None
            requests.append(request)
            request_ids.append(request.request_id)
            rows.append(row)
            num_tokens.append(grant.num_tokens + grant.num_draft_slots)
            num_slots.append(grant.num_draft_slots)
            request.granted_tokens = 0
            request.num_in_flight += 1
            if grant.was_admitted:
                self._announce(request, row, new, resumed)
            elif request.blocks.num_blocks != request.num_sent_blocks:
                appended.append(self._appended_blocks(request, row))
        plan = StepPlan(
            step_id=self._next_step_id,
            finished_request_ids=tuple(self._finished_ids),
            preempted_request_ids=tuple(self._preempted_ids),
            resumed_requests=tuple(resumed),
            new_requests=tuple(new),
            appended_blocks=tuple(appended),
            request_ids=request_ids,
            rows=rows,
            num_scheduled_tokens=num_tokens,
            num_draft_slots=num_slots,
        )
        self._finished_ids, self._preempted_ids = [], []
        self._next_step_id += 1
        return PlannedStep(plan, requests, grants, step.num_preempted, perf_counter() - started)

    def _announce(
        self, request: Request, row: int, new: list[NewRequest], resumed: list[ResumedRequest]
    ) -> None:
        block_ids = tuple(tuple(ids) for ids in request.blocks.block_ids)
        request.num_sent_blocks = request.blocks.num_blocks
        num_computed_tokens = request.num_committed_tokens
        if request.is_known_to_workers:
            resumed.append(ResumedRequest(request.request_id, row, num_computed_tokens, block_ids))
            return
        request.is_known_to_workers = True
        stop_token_ids = {*request.eos_token_ids, *request.sampling_params.stop_token_ids}
        new.append(
            NewRequest(
                request_id=request.request_id,
                row=row,
                prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
                sampling_params=request.sampling_params,
                seed=request.seed,
                choice_index=request.choice_index,
                num_computed_tokens=num_computed_tokens,
                block_ids=block_ids,
                stop_token_ids=tuple(sorted(stop_token_ids)),
            )
        )

    def _appended_blocks(self, request: Request, row: int) -> AppendedBlocks:
        groups = request.blocks.block_ids
        sent = request.num_sent_blocks // len(groups)
        request.num_sent_blocks = request.blocks.num_blocks
        return AppendedBlocks(row, tuple(tuple(ids[sent:]) for ids in groups))

    # -- moves, called by PlanningStep ------------------------------------------------------

    def admit(self, request: Request, num_cached_tokens: int) -> None:
        """Give a waiting request a row; its cached prefix and first blocks are already its own."""
        del self.waiting[request.request_id]
        self.running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        request.num_computed_tokens = request.num_committed_tokens = num_cached_tokens
        request.num_cached_tokens = max(request.num_cached_tokens, num_cached_tokens)
        if self.is_starving(request):
            self._protected = request
            request.view.is_protected = True

    def unadmit(self, request: Request) -> None:
        """Undo ``admit`` within the same step: the workers never heard of it."""
        self._back_to_waiting(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's row and blocks away; it is recomputed when it runs again."""
        request.num_preemptions += 1
        request.num_preemptions_without_progress += 1
        if request.is_known_to_workers:
            self._preempted_ids.append(request.request_id)
        self._back_to_waiting(request)

    def _back_to_waiting(self, request: Request) -> None:
        del self.running[request.request_id]
        self._release_row(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = request.num_committed_tokens = 0
        request.num_draft_tokens_wanted = 0
        self._unprotect(request)
        self.release_blocks(request)
        self.waiting[request.request_id] = request
        in_order = sorted(self.waiting.values(), key=lambda one: one.arrival_index)
        self.waiting = {one.request_id: one for one in in_order}

    @property
    def has_free_row(self) -> bool:
        """Whether one more request may run."""
        return bool(self._free_rows)


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
        if request.ready is not None and not request.ready.done():
            return _NOT_READY
        if self._planner.has_protected and self._planner.is_starving(request):
            return _IN_FLIGHT
        if not self._planner.has_free_row:
            return _MAX_NUM_SEQS
        if not self.token_budget:
            return _NO_BUDGET
        kv_cache = self._kv_cache
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
        self.grants[request.request_id] = Grant(
            request, num_tokens, slots, samples, was_admitted, is_decode, start
        )
        return Granted(num_tokens + slots, slots)

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
