"""What observers are told of steps and ended requests, and the telling."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from hotshoe.api import FinishedRequest, StepRecord
from hotshoe.engine.planner import PlannedStep, Planner
from hotshoe.engine.request import Request

logger = logging.getLogger(__name__)

Record = TypeVar("Record", StepRecord, FinishedRequest)


class Observers:
    """Calls observers and survives them.

    Attributes:
        step: called with a ``StepRecord`` after every commit.
        finish: called with a ``FinishedRequest`` when a request has ended, however.
    """

    def __init__(self) -> None:
        self.step: list[Callable[[StepRecord], None]] = []
        self.finish: list[Callable[[FinishedRequest], None]] = []
        self._failed: list[object] = []

    def tell_step(self, record: StepRecord) -> None:
        """A step has committed."""
        self._tell(self.step, record)

    def tell_finish(self, record: FinishedRequest) -> None:
        """A request has ended."""
        self._tell(self.finish, record)

    def _tell(self, observers: list[Callable[[Record], None]], record: Record) -> None:
        for observer in observers:
            try:
                observer(record)
            except Exception:
                if observer not in self._failed:
                    self._failed.append(observer)
                    logger.exception(
                        "observer %r failed; it's called again, but further failures of it are "
                        "not logged",
                        observer,
                    )


class StepTally:
    """What a step brought over all its requests, for its ``StepRecord``."""

    __slots__ = (
        "accepted_per_position",
        "drafted_per_position",
        "first_token_times_s",
        "inter_token_times_s",
        "now",
        "num_cached_tokens",
        "num_draft_tokens",
        "num_drafts",
        "num_new_tokens",
        "num_prompt_tokens",
    )

    def __init__(self, now: float) -> None:
        self.now = now
        self.num_drafts = self.num_draft_tokens = 0
        self.drafted_per_position: list[int] = []
        self.accepted_per_position: list[int] = []
        self.num_new_tokens = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.first_token_times_s: list[float] = []
        self.inter_token_times_s: list[float] = []

    def add_drafts(self, num_used: int, num_accepted: int) -> None:
        """One request's drafts were verified."""
        if num_used:
            self.num_drafts += 1
            self.num_draft_tokens += num_used
        _count_places(self.drafted_per_position, num_used)
        _count_places(self.accepted_per_position, num_accepted)

    def add_tokens(self, request: Request, num_tokens: int) -> None:
        """One request got tokens; they are committed."""
        times = request.token_times_s
        self.num_new_tokens += num_tokens
        if len(times) > num_tokens:
            self.inter_token_times_s.append(self.now - times[-num_tokens - 1])
        elif num_tokens:
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += request.num_cached_tokens
            self.first_token_times_s.append(self.now - request.arrival_time_s)

    def record(
        self,
        planned: PlannedStep,
        planner: Planner,
        timings_s: dict[str, float],
        num_requests_not_drafted: int,
    ) -> StepRecord:
        """The record of the step, now that it has committed."""
        plan = planned.plan
        num_decode = sum(
            grant.num_tokens + grant.num_draft_slots for grant in planned.grants if grant.is_decode
        )
        return StepRecord(
            step_id=plan.step_id,
            time_s=self.now,
            request_ids=plan.request_ids,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            num_prefill_tokens=plan.num_tokens - num_decode,
            num_decode_tokens=num_decode,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=sum(self.accepted_per_position),
            num_new_tokens=self.num_new_tokens,
            num_running=len(planner.running),
            num_waiting=len(planner.waiting),
            num_preempted=planned.num_preempted,
            num_free_blocks=planner.kv_cache.num_free_blocks,
            num_blocks=planner.kv_cache.num_blocks,
            timings_s=timings_s,
            num_drafts=self.num_drafts,
            drafted_per_position=self.drafted_per_position,
            accepted_per_position=self.accepted_per_position,
            num_requests_not_drafted=num_requests_not_drafted,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            first_token_times_s=self.first_token_times_s,
            inter_token_times_s=self.inter_token_times_s,
        )


def _count_places(counts: list[int], num_places: int) -> None:
    counts += [0] * (num_places - len(counts))
    for place in range(num_places):
        counts[place] += 1


def finished_record(request: Request, now: float) -> FinishedRequest:
    """The record of a request that has ended."""
    times = request.token_times_s
    return FinishedRequest(
        request_id=request.request_id,
        finish_reason=request.finish_reason or "abort",
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        arrival_time_s=request.arrival_time_s,
        first_token_time_s=times[0] if times else None,
        last_token_time_s=times[-1] if times else None,
        finish_time_s=now,
        first_scheduled_time_s=request.first_scheduled_time_s,
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
        max_tokens=request.sampling_params.max_tokens,
        num_choices=request.sampling_params.n,
        choice_index=request.choice_index,
        compiled_time_s=request.compiled_time_s,
    )
