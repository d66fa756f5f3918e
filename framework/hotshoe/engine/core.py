"""The engine core. Start reading at ``EngineCore.step``: it is the only loop there is."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from time import perf_counter

from hotshoe.api import (
    EngineDeadError,
    Executor,
    GrammarSpec,
    LastStep,
    PendingResult,
    PositionLogprobs,
    RequestError,
    Scheduler,
    StepResult,
)
from hotshoe.api.sampling_params import check_vocab
from hotshoe.engine.planner import PlannedStep, Planner, PlannerLimits
from hotshoe.engine.planning_step import Grant
from hotshoe.engine.records import Observers, StepTally, finished_record
from hotshoe.engine.request import EngineRequest, Request, RequestStatus, RequestUpdate
from hotshoe.errors import UnavailableError
from hotshoe.kv_cache.manager import KVCacheManager
from hotshoe.worker.random import derive_seed
from hotshoe.worker.sampling import check_logits_processors

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler, KV cache and executor around one step loop (iteration-level scheduling: Orca, OSDI
    '22).

    Attributes:
        scheduler: the policy; may be replaced between steps.
        step_observers: called with a ``StepRecord`` after every commit.
        death: why nothing can be served any more; None = alive.
        finish_observers: called when a request has ended, however.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        kv_cache: KVCacheManager,
        limits: PlannerLimits,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        logits_processors: Collection[str] = (),
        seed: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.kv_cache = kv_cache
        self.limits = limits
        self.vocab_size = vocab_size
        self.clock = executor.clock
        self.planner = Planner(limits, kv_cache, self.clock)
        self.in_flight: deque[tuple[PlannedStep, PendingResult]] = deque()
        self.requests: dict[str, Request] = {}
        self._observers = Observers()
        self.step_observers = self._observers.step
        self.finish_observers = self._observers.finish
        self._eos_token_ids = frozenset(eos_token_ids)
        self._logits_processors = logits_processors
        self._seed = seed
        self._num_arrived = 0
        self._updates: list[RequestUpdate] = []
        self._not_ready: list[Request] = []
        self.death: str | None = None

    # -- the loop -------------------------------------------------------------------------

    def step(self) -> list[RequestUpdate]:
        """Plan and submit as many steps as may be in flight, then commit the oldest.

        Returns:
            What changed, per request; also requests that ended outside a step since the last call.

        Raises:
            SchedulerError: if the policy broke its contract; requests and blocks are as before.
            EngineDeadError: if a worker died, now or before.
        """
        self._check_alive()
        self._settle_ready()
        while len(self.in_flight) < self.executor.max_in_flight:
            try:
                planned = self.planner.plan(self.scheduler, num_in_flight=len(self.in_flight))
            finally:
                self._end_rejected()
            if planned.plan.is_empty:
                break
            self._submit(planned)
        if not self.in_flight:
            return self.take_updates()
        planned, pending = self.in_flight.popleft()
        return self._commit(planned, self._result(planned, pending))

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything, now or after a wait."""
        return bool(
            self.requests or self.in_flight or self._updates or self.planner.has_news_for_workers
        )

    def wait(self, timeout_s: float = 1.0) -> None:
        """Sleep until a step could do something: a grammar is compiled, or the policy's idle time
        is over.

        Returns at once unless every live request waits for such a thing.
        """
        is_idling = self.planner.idle_reason is not None
        if self.in_flight or self._updates or (self.planner.running and not is_idling):
            return
        futures = [one.ready for one in self._not_ready if one.ready is not None]
        if is_idling:
            until = self.planner.idle_until
            timeout_s = timeout_s if until is None else min(timeout_s, until - self.clock())
        elif len(futures) < len(self.planner.waiting) or not futures:
            return
        if timeout_s > 0:
            wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED)
            if not futures:
                _sleep(timeout_s)

    def drain(self) -> None:
        """Let steps in flight commit and tell the workers who has ended; nobody else may be alive.

        For clean-up after an error: schedulers that fail are not asked.
        """
        if self.death is not None:
            self.in_flight.clear()
        while self.in_flight:
            planned, pending = self.in_flight.popleft()
            self._updates += self._commit(planned, self._result(planned, pending))
        if not self.requests:
            self._updates.clear()
            if self.planner.has_news_for_workers and self.death is None:
                self._submit(self.planner.plan_news())
                self._result(*self.in_flight.popleft())

    def _check_alive(self) -> None:
        if self.death is not None:
            raise EngineDeadError(self.death)

    def _submit(self, planned: PlannedStep) -> None:
        try:
            pending = self.executor.submit(planned.plan)
        except EngineDeadError as error:
            self.death = str(error)
            raise
        except Exception as error:
            # whatever the plan says about rows and blocks is lost to the workers
            self.death = (
                f"executor {type(self.executor).__name__} didn't take step "
                f"{planned.plan.step_id}: {error!r}; build a new engine"
            )
            raise EngineDeadError(self.death) from error
        self.in_flight.append((planned, pending))

    def _result(self, planned: PlannedStep, pending: PendingResult) -> StepResult:
        try:
            return pending.result()
        except EngineDeadError as error:
            self.death = str(error)
            raise
        except Exception as error:
            logger.exception("step %d failed", planned.plan.step_id)
            message = f"the step failed in the worker: {error!r}"
            errors = dict.fromkeys(range(len(planned.requests)), message)
            nothing: list[list[int]] = [[] for _ in planned.requests]
            zeros = [0] * len(planned.requests)
            return StepResult(planned.plan.step_id, nothing, zeros, zeros, errors=errors)

    def _commit(self, planned: PlannedStep, result: StepResult) -> list[RequestUpdate]:
        """Take over what a step brought. The only place where a running request changes."""
        started = perf_counter()
        now = self.clock()
        tally, is_observed = StepTally(now), bool(self.step_observers)
        updates = self.take_updates()
        for index, grant in enumerate(planned.grants):
            request = grant.request
            request.num_in_flight -= 1
            if grant.expected:
                self.planner.kv_cache.settle(grant.expected)
            if request.first_scheduled_time_s is None:
                request.first_scheduled_time_s = now - result.timings_s.get("total", 0.0)
            if request.status is RequestStatus.FINISHED:
                self.planner.release_blocks(request)
                continue
            token_ids = result.token_ids[index]
            if grant.num_draft_slots:
                tally.add_drafts(result.num_drafts_used[index], len(token_ids) - 1)
            if index in result.errors:
                field = result.error_fields.get(index)
                error = result.errors[index]
                updates.append(self._end(request, "error", error=error, error_field=field))
                continue
            update = self._commit_request(request, grant, index, result, now)
            if update is not None:
                updates.append(update)
                if is_observed:
                    tally.add_tokens(request, len(update.new_token_ids))
        self.planner.last = LastStep(planned.plan.num_tokens, result.timings_s.get("total", 0.0))
        if is_observed:
            timings = {"plan": planned.plan_time_s, "commit": perf_counter() - started}
            record = tally.record(
                planned,
                self.planner,
                timings | result.timings_s,
                result.num_requests_not_drafted,
            )
            self._observers.tell_step(record)
        return updates

    def _commit_request(
        self, request: Request, grant: Grant, index: int, result: StepResult, now: float
    ) -> RequestUpdate | None:
        token_ids = result.token_ids[index]
        is_running = request.status is RequestStatus.RUNNING
        if is_running:
            request.num_committed_tokens += grant.num_tokens
            request.num_draft_tokens_wanted = result.num_draft_tokens_wanted[index]
        if grant.num_draft_slots:
            request.num_draft_tokens += result.num_drafts_used[index]
            num_accepted = len(token_ids) - 1
            request.num_accepted_tokens += num_accepted
            if is_running:
                request.num_computed_tokens += num_accepted
                request.num_committed_tokens += num_accepted
        elif grant.samples:
            request.num_pending_tokens -= 1
        if result.prompt_logprobs and index in result.prompt_logprobs:
            self._add_prompt_logprobs(request, grant, result, index)
        if not token_ids:
            self._commit_blocks(request, is_running)
            return None
        return self._commit_tokens(request, token_ids, index, result, now, is_running)

    def _commit_tokens(
        self,
        request: Request,
        token_ids: list[int],
        index: int,
        result: StepResult,
        now: float,
        is_running: bool,
    ) -> RequestUpdate:
        num_output_tokens = request.num_output_tokens
        finish_reason, stop_reason, num_kept = self._ending(request, token_ids, num_output_tokens)
        if num_kept < len(token_ids):
            token_ids = token_ids[:num_kept]
        request.token_ids += token_ids
        request.token_times_s += [now] * num_kept
        if request.num_preemptions_without_progress:
            self.planner.made_progress(request)
        self._commit_blocks(request, is_running)
        logprobs = result.logprobs.get(index) if result.logprobs else None
        if logprobs is not None:
            logprobs = logprobs[:num_kept]
        prompt_logprobs = None
        if num_output_tokens == 0 and request.sampling_params.prompt_logprobs is not None:
            prompt_logprobs = request.prompt_logprobs
        if finish_reason is None:
            return RequestUpdate(
                request.request_id,
                token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                num_cached_tokens=None if num_output_tokens else request.num_cached_tokens,
            )
        return self._end(
            request,
            finish_reason,
            new_token_ids=token_ids,
            stop_reason=stop_reason,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _commit_blocks(self, request: Request, is_running: bool) -> None:
        if is_running:
            # drafts accepted behind a stop token are computed, but no tokens of the request
            num_committed = min(request.num_committed_tokens, len(request.token_ids))
            self.kv_cache.commit(request.blocks, num_committed)
        else:
            self.planner.release_blocks(request)

    @staticmethod
    def _ending(
        request: Request, token_ids: list[int], num_output_tokens: int
    ) -> tuple[str | None, int | None, int]:
        """Finish reason, stop reason, and how many of the new tokens are kept."""
        params = request.sampling_params
        num_tokens = request.num_prompt_tokens + num_output_tokens
        for count, token_id in enumerate(token_ids, start=1):
            if num_output_tokens + count >= params.min_tokens:
                if token_id in request.eos_token_ids:
                    return "stop", None, count
                if token_id in params.stop_token_ids:
                    return "stop", token_id, count
            if num_tokens + count >= request.max_num_tokens:
                return "length", None, count
        return None, None, len(token_ids)

    @staticmethod
    def _add_prompt_logprobs(
        request: Request, grant: Grant, result: StepResult, index: int
    ) -> None:
        # entry i of the list is about prompt token i; a chunk that is computed again after a
        # preemption adds nothing
        entries = result.prompt_logprobs[index]
        first = grant.start + 1
        known = len(request.prompt_logprobs)
        request.prompt_logprobs.extend(entries[max(known - first, 0) :])

    # -- requests -------------------------------------------------------------------------

    def add_request(self, source: EngineRequest) -> int:
        """Queue a request.

        Returns:
            The seed that its tokens are drawn with.

        Raises:
            RequestError: if it can never be served; the message says which limit it exceeds.
        """
        self._check_alive()
        params = source.sampling_params
        max_num_tokens = self._check(source)
        arrival_index = self._num_arrived
        self._num_arrived += 1
        seed = source.seed
        if seed is None:
            seed = derive_seed(self._seed, arrival_index)
        request = Request(
            source,
            seed=seed,
            arrival_index=arrival_index,
            arrival_time_s=self.clock() if source.arrival_time_s is None else source.arrival_time_s,
            max_num_tokens=max_num_tokens,
            eos_token_ids=self._eos_token_ids,
            kv_cache=self.kv_cache,
        )
        if params.structured_outputs is not None:
            constraint = params.structured_outputs
            request.ready = self.executor.call(
                "compile_grammar",
                request.request_id,
                GrammarSpec.of(constraint),
                constraint.backend,
            )
            self._not_ready.append(request)
        self.requests[request.request_id] = request
        self.planner.add(request)
        return seed

    def _check(self, source: EngineRequest) -> int:
        """Everything that would make the request impossible; returns its length limit."""
        num_prompt_tokens = len(source.prompt_token_ids)
        limit = self.limits.max_model_len
        if source.request_id in self.requests:
            raise RequestError(
                f"request_id {source.request_id!r} is already in use by a live request"
            )
        if type(source.priority) is not int:
            raise RequestError(f"priority: got {source.priority!r}, allowed: a whole number")
        if not isinstance(source.cache_salt, str | None):
            raise RequestError(f"cache_salt: got {source.cache_salt!r}, allowed: a text or None")
        if num_prompt_tokens == 0:
            raise RequestError("the prompt is empty; give at least one token")
        if num_prompt_tokens >= limit:
            raise RequestError(
                f"prompt has {num_prompt_tokens} tokens but max_model_len is {limit} and one must "
                "be left for the output; shorten the prompt or raise model.max_model_len"
            )
        self._check_ids(source.prompt_token_ids)
        check_vocab(source.sampling_params, self.vocab_size)
        check_logits_processors(source.sampling_params, self._logits_processors)
        max_tokens = source.sampling_params.max_tokens
        if max_tokens is None:
            max_tokens = limit - num_prompt_tokens
        total = num_prompt_tokens + max_tokens
        if total > limit:
            raise RequestError(
                f"prompt of {num_prompt_tokens} tokens + max_tokens {max_tokens} = {total} exceeds "
                f"max_model_len {limit}; lower max_tokens or raise model.max_model_len"
            )
        num_needed = min(total + self.limits.num_lookahead_slots, limit)
        if not self.kv_cache.can_ever_fit(num_needed):
            num_tokens = self.kv_cache.num_blocks * self.kv_cache.block_size
            raise RequestError(
                f"the request may need {num_needed} tokens of KV cache, {num_needed - total} of "
                f"them for drafts, but only {num_tokens} exist; "
                "lower max_tokens, or raise cache.memory_gb or cache.num_blocks"
            )
        return total

    def _check_ids(self, token_ids: list[int]) -> None:
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(
                f"prompt token id {bad} is out of range; "
                f"the model has ids 0 to {self.vocab_size - 1}"
            )

    def abort(self, request_ids: Iterable[str], *, finish_reason: str = "abort") -> None:
        """End requests early; unknown ids are ignored, since they may just have finished.

        The final update of each comes from the next ``step``.
        """
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._updates.append(self._end(request, finish_reason))

    def fail(self, request_ids: Iterable[str], message: str) -> None:
        """End requests with an error; as with ``abort``, the next ``step`` says so."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._updates.append(self._end(request, "error", error=message))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; see ``KVCacheManager.reset_prefix_cache``."""
        return self.kv_cache.reset_prefix_cache()

    def _end(
        self,
        request: Request,
        finish_reason: str,
        *,
        new_token_ids: list[int] | None = None,
        stop_reason: int | None = None,
        error: str | None = None,
        error_field: str | None = None,
        is_unavailable: bool = False,
        logprobs: list[PositionLogprobs] | None = None,
        prompt_logprobs: list[PositionLogprobs | None] | None = None,
    ) -> RequestUpdate:
        request.finish_reason, request.stop_reason, request.error = (
            finish_reason,
            stop_reason,
            error,
        )
        del self.requests[request.request_id]
        self.planner.finish(request)
        if self.finish_observers:
            self._observers.tell_finish(finished_record(request, self.clock()))
        return RequestUpdate(
            request.request_id,
            new_token_ids or [],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=error,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            metrics=request.metrics(),
            error_field=error_field,
            is_unavailable=is_unavailable,
        )

    def _settle_ready(self) -> None:
        for request in self._not_ready[:]:
            if request.ready is None or not request.ready.done():
                continue
            self._not_ready.remove(request)
            if request.status is RequestStatus.FINISHED:
                self.planner.tell_finished(request)
            else:
                request.compiled_time_s = self.clock()
                error = request.ready.exception()
                if error is not None:
                    field = error.field if isinstance(error, RequestError) else None
                    is_unavailable = isinstance(error, UnavailableError)
                    self._updates.append(
                        self._end(
                            request,
                            "error",
                            error=str(error),
                            error_field=field,
                            is_unavailable=is_unavailable,
                        )
                    )

    def _end_rejected(self) -> None:
        for request, why in self.planner.rejected:
            self._updates.append(
                self._end(request, "error", error=f"rejected by the scheduler: {why}")
            )
        self.planner.rejected.clear()

    def take_updates(self) -> list[RequestUpdate]:
        """What happened outside a step since the last one: aborts, rejections."""
        updates, self._updates = self._updates, []
        return updates

    def close(self) -> None:
        """Stop the executor; idempotent."""
        self.executor.close()


def _sleep(seconds: float) -> None:
    import time

    time.sleep(min(seconds, 0.05))
