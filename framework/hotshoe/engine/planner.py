"""The planner: who waits and who runs, and a policy's choices turned into a ``StepPlan``."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from hotshoe.api import (
    AppendedBlocks,
    KVCacheError,
    LastStep,
    NewRequest,
    RequestView,
    ResumedRequest,
    Scheduler,
    SchedulerError,
    SchedulerStalledError,
    StepPlan,
)
from hotshoe.engine.planning_step import Grant, PlanningStep
from hotshoe.engine.request import Request, RequestStatus
from hotshoe.kv_cache.manager import KVCacheManager


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
        if request.is_known_to_workers or (request.ready is not None and request.is_ready):
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
        ready = [one for one in self.waiting.values() if one.is_ready]
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
        if not plan.is_empty:
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
