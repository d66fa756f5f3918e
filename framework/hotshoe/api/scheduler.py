"""Scheduler contract: a policy that picks among moves which the core's planner makes safe by
construction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol


class RefusalReason(StrEnum):
    """Why ``StepPlanner.run`` granted nothing. A closed set."""

    NO_BLOCKS = "no_blocks"
    """The KV pool has too few free blocks. Preempting another request may help."""
    NO_BUDGET = "no_budget"
    """The step's token budget is used up."""
    MAX_NUM_SEQS = "max_num_seqs"
    """As many requests run as may."""
    NOT_READY = "not_ready"
    """The request waits for something that comes by itself: its grammar, or the common part of its
    prompt, which a step in flight computes for another request.
    """
    IN_FLIGHT = "in_flight"
    """What it needs is not committed yet (draft verification, its last token, blocks on their way
    back, or the token of a protected request if it was itself preempted too often).
    """
    ALREADY_GRANTED = "already_granted"
    """It has its tokens for this step."""
    ADAPTER_SLOTS = "adapter_slots"
    """No slot is free for its adapter."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The request runs in this step. Truthy.

    Attributes:
        num_tokens: tokens it computes, drafts included.
        num_draft_slots: how many of them are drafts.
    """

    num_tokens: int
    num_draft_slots: int = 0

    def __bool__(self) -> Literal[True]:
        return True


@dataclass(frozen=True, slots=True)
class Refused:
    """The request doesn't run, and nothing was allocated. Falsy."""

    reason: RefusalReason

    def __bool__(self) -> Literal[False]:
        return False


class RequestView(Protocol):
    """Live, read-only view of one request; the same object from arrival to end, hashable, so a
    policy can key state on it.

    Counts include tokens in flight: they say what will be true when every submitted step has
    committed.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def arrival_index(self) -> int:
        """Counts up with every request of the engine; the order of arrival without ties."""

    @property
    def arrival_time_s(self) -> float:
        """On ``StepPlanner.clock``."""

    @property
    def priority(self) -> int:
        """Lower runs first, 0 by default."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the client sent for schedulers, such as a tenant or a deadline."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV exists, prefix hits included; 0 after a preemption."""

    @property
    def num_output_tokens(self) -> int: ...
    @property
    def max_num_tokens(self) -> int:
        """Prompt and output together never exceed this."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that a prefix hit would supply now. Looked up when first asked for, then kept
        until blocks change hands.
        """

    @property
    def num_blocks(self) -> int:
        """KV blocks it holds, over all cache groups."""

    @property
    def num_reclaimable_blocks(self) -> int:
        """Blocks that preempting it would free: those that no other request shares."""

    @property
    def num_draft_tokens_wanted(self) -> int: ...
    @property
    def granted_tokens(self) -> int:
        """Tokens granted in the step that is being planned; 0 = none."""

    @property
    def num_preemptions(self) -> int: ...
    @property
    def is_preemptable(self) -> bool:
        """False outside of ``running``, and while the core protects it because it was preempted too
        often without progress.
        """

    @property
    def first_token_time_s(self) -> float | None: ...
    @property
    def last_token_time_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class LastStep:
    """The step committed last: its tokens and how long it took from submission to commit."""

    num_tokens: int
    duration_s: float


class StepPlanner(Protocol):
    """One step being planned. Valid only during ``Scheduler.schedule``."""

    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold a row, in order of admission. A snapshot: moves don't disturb it."""

    @property
    def waiting(self) -> Sequence[RequestView]:
        """Requests that could be admitted, in order of arrival. A snapshot, made when asked for."""

    @property
    def arrived(self) -> Sequence[RequestView]:
        """Requests that came since the last call."""

    @property
    def finished(self) -> Sequence[RequestView]:
        """Requests that ended since the last call, aborted and rejected ones too."""

    @property
    def token_budget(self) -> int:
        """Tokens that can still be granted in this step."""

    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def clock(self) -> float:
        """Seconds, monotonic; virtual in a simulation."""

    @property
    def last(self) -> LastStep | None: ...

    def run(self, request: RequestView, max_tokens: int | None = None) -> Granted | Refused:
        """Grant tokens to a running or waiting request and allocate their blocks.

        Args:
            request: any live view; waiting requests are admitted by this.
            max_tokens: upper limit, drafts included; drafts are trimmed first. None = as many
                as budget and limits allow.

        Raises:
            SchedulerError: if the view is not of a live request, or ``max_tokens`` is not positive.
        """

    def preempt(self, request: RequestView) -> bool:
        """Take a running request's blocks and put it back to ``waiting``; undoes a grant of this
        step.

        Returns:
            False if it is not running or is protected, and then nothing happened. Blocks of a
            request that is in flight come back only when that step has committed.
        """

    def reject(self, request: RequestView, why: str) -> None:
        """End a waiting request with an error that its client sees."""

    def idle(self, why: str, until: float | None = None) -> None:
        """Declare that not running anything is deliberate, so that it's not taken for a stall.

        Args:
            why: for logs.
            until: time on ``clock`` at which to plan again at the latest; None = at the next
                arrival or commit.
        """

    def num_blocks_needed(self, request: RequestView, num_tokens: int) -> int:
        """New blocks that running ``num_tokens`` more tokens of the request would take."""


class Scheduler(ABC):
    """A scheduling policy. Built once per engine as ``factory(options, SchedulerContext)``."""

    @abstractmethod
    def schedule(self, step: StepPlanner) -> None:
        """Pick who runs in this step, by calling ``step.run`` and ``step.preempt``.

        Called in the engine process before every step while requests are alive. An exception fails
        the step and is raised by ``EngineCore.step``; the grants made before it are undone.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerContext:
    """Facts a scheduler may be built on."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int


Order = Callable[[RequestView], Any]
Victim = Callable[[Sequence[RequestView]], RequestView | None]


def latest(requests: Sequence[RequestView]) -> RequestView | None:
    """The usual victim: the request admitted last."""
    return requests[-1] if requests else None


def serve(step: StepPlanner, order: Order | None = None, victim: Victim = latest) -> None:
    """The loop that most policies want: run requests in order, and preempt a victim when blocks run
    out.

    Requests that already run come first in their order, then waiting ones in theirs, until one is
    refused for lack of blocks, budget or rows; later ones don't overtake it. A waiting request
    takes the place of a running one only if ``order`` puts it first, so without an ``order`` it
    never does.

    Args:
        step: the step being planned.
        order: sort key, lowest runs first; None keeps the core's order (running by admission,
            waiting by arrival), which costs nothing.
        victim: picks whom to preempt among preemptable requests, which come sorted by
            ``order``; None = nobody.
    """
    running = sorted(step.running, key=order) if order else list(step.running)
    has_preempted = are_blocks_coming = False
    while running:
        request = running.pop(0)
        while not (outcome := step.run(request)):
            if outcome.reason is RefusalReason.NO_BUDGET:
                return
            if outcome.reason is not RefusalReason.NO_BLOCKS or are_blocks_coming:
                break
            # the starving request is itself a candidate: being the victim means to wait
            candidates = [one for one in (request, *running) if one.is_preemptable]
            chosen = victim(candidates)
            if chosen is None:
                break
            num_expected, num_free = chosen.num_reclaimable_blocks, step.num_free_blocks
            if not step.preempt(chosen):
                break
            has_preempted = True
            # a victim in flight gives its blocks back later: one is enough until then
            are_blocks_coming = num_expected > 0 and step.num_free_blocks == num_free
            if chosen is request:
                break
            running.remove(chosen)
    if has_preempted or not step.token_budget:
        return
    _admit(step, order, victim)


def _admit(step: StepPlanner, order: Order | None, victim: Victim) -> None:
    waiting = sorted(step.waiting, key=order) if order else list(step.waiting)
    for request in waiting:
        outcome = step.run(request)
        while (
            not outcome
            and order is not None
            and outcome.reason in (RefusalReason.NO_BLOCKS, RefusalReason.MAX_NUM_SEQS)
        ):
            mine = order(request)
            behind = [
                one
                for one in sorted(step.running, key=order)
                if one.is_preemptable and order(one) > mine
            ]
            chosen = victim(behind)
            if chosen is None:
                break
            num_expected, num_free = chosen.num_reclaimable_blocks, step.num_free_blocks
            if not step.preempt(chosen):
                break
            outcome = step.run(request)
            if not outcome and num_expected > 0 and step.num_free_blocks == num_free:
                return  # a victim in flight gives its blocks back later
        if not outcome and outcome.reason is not RefusalReason.NOT_READY:
            return
