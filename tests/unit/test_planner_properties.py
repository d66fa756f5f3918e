"""Any policy, any load: plans stay consistent, nothing leaks, and every request gets its tokens.

The simulated worker replays each plan on a model of its own and of the KV pages, and refuses what
doesn't fit; see ``hotshoe.testing.simulation``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotshoe.api import RefusalReason, RequestView, Scheduler, StepPlanner, StepRecord, serve
from hotshoe.engine.core import EngineCore
from hotshoe.engine.request import RequestStatus, RequestUpdate
from hotshoe.errors import SchedulerError, SchedulerStalledError
from hotshoe.testing.simulation import (
    Arrival,
    SimulatedEngine,
    SimulatedExecutor,
    output_of,
    request_of,
)

MAX_STEPS = 20_000
WILD_CALLS = 400
"""After so many steps the random policy calms down, so that every example ends."""


class RandomPolicy(Scheduler):
    """Every move in every order, now and then an exception; what it can run in the end, it runs."""

    def __init__(self, numbers: random.Random, *, raises: bool, rejects: bool) -> None:
        self.numbers = numbers
        self.raises = raises
        self.rejects = rejects
        self.views: dict[str, RequestView] = {}
        self.num_calls = 0
        self.core: EngineCore | None = None
        self.num_moves: dict[str, int] = {}

    def schedule(self, step: StepPlanner) -> None:
        self.num_calls += 1
        self._check_views(step)
        if self.num_calls > WILD_CALLS:
            serve(step)
            return
        mood = self.numbers.random()
        if mood < 0.1:
            step.idle("a whim", until=step.clock + 0.01)
            if mood < 0.05:
                return
        budget = step.token_budget
        for _ in range(self.numbers.randint(1, 12)):
            self._move(step)
            assert budget - step.token_budget == sum(view.granted_tokens for view in step.running)
        self._make_progress(step)

    def _check_views(self, step: StepPlanner) -> None:
        for view in (*step.running, *step.waiting):
            known = self.views.setdefault(view.request_id, view)
            assert known is view, "another view of the same request"
            assert view.granted_tokens == 0, "a grant of an earlier step"
        for view in step.finished:
            self.views.pop(view.request_id, None)

    def _move(self, step: StepPlanner) -> None:
        numbers = self.numbers
        views = [*step.running, *step.waiting]
        if not views:
            return
        view = numbers.choice(views)
        kind = numbers.random()
        if kind < 0.7:
            budget = step.token_budget
            free = step.num_free_blocks
            outcome = step.run(view, numbers.choice([None, None, 1, 3, 1000]))
            name = "granted" if outcome else outcome.reason
            if outcome:
                assert budget - step.token_budget == outcome.num_tokens == view.granted_tokens
            else:
                assert (budget, free) == (step.token_budget, step.num_free_blocks)
        elif kind < 0.97:
            name = "preempted" if step.preempt(view) else "not preempted"
        elif kind < 0.98 and self.raises:
            raise BadDay
        elif self.rejects and view in step.waiting:
            step.reject(view, "not today")
            name = "rejected"
        else:
            name = "nothing"
        self.num_moves[name] = self.num_moves.get(name, 0) + 1

    def _make_progress(self, step: StepPlanner) -> None:
        """Run somebody, whatever it takes; alone in the engine, every request can run."""
        if any(view.granted_tokens for view in step.running):
            return
        reasons = set()
        for view in (*step.running, *step.waiting):
            outcome = step.run(view)
            if outcome:
                return
            reasons.add(outcome.reason)
        assert self.core is not None
        if not reasons or self.core.in_flight:
            return  # blocks may be on their way back
        running = sorted(step.running, key=lambda view: view.is_preemptable)
        for view in running[1:]:
            step.preempt(view)
        outcomes = [step.run(view) for view in (*step.running, *step.waiting)]
        if not any(outcomes):
            left = {outcome.reason for outcome in outcomes if not outcome}
            assert left <= {RefusalReason.NOT_READY}, left


class BadDay(Exception):
    """Raised by the policy on purpose."""


def step_of(core: EngineCore) -> list[RequestUpdate]:
    try:
        return core.step()
    except SchedulerError as error:
        if isinstance(error.__cause__, BadDay):
            raise BadDay from error
        raise


def drive(
    core: EngineCore, arrivals: list[Arrival], numbers: random.Random, check: Callable[[], None]
) -> dict[str, Any]:
    """Step through all arrivals; returns the last update's reason and all tokens by request."""
    executor = core.executor
    assert isinstance(executor, SimulatedExecutor)
    coming = sorted(enumerate(arrivals), key=lambda pair: pair[1].time_s)
    leaving = [
        (arrival.aborted_at_s, index)
        for index, arrival in enumerate(arrivals)
        if arrival.aborted_at_s is not None
    ]
    leaving.sort()
    reasons: dict[str, str] = {}
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(arrivals))}
    for _ in range(MAX_STEPS):
        while coming and coming[0][1].time_s <= executor.now:
            index, arrival = coming.pop(0)
            core.add_request(request_of(index, arrival))
        while leaving and leaving[0][0] <= executor.now:
            core.abort([str(leaving.pop(0)[1])])
        if not (coming or core.has_work):
            return {"reasons": reasons, "tokens": tokens}
        before = executor.now
        updates = []
        with suppress(BadDay):
            updates = step_of(core)
        for update in updates:
            assert update.request_id not in reasons, "an update after the last"
            tokens[update.request_id] += update.new_token_ids
            if update.finish_reason is not None:
                reasons[update.request_id] = update.finish_reason
        check()
        if executor.now == before:
            executor.advance_to(before + 0.005 * numbers.random())
    raise AssertionError(f"no end after {MAX_STEPS} steps")


def check_consistency(core: EngineCore) -> None:
    """What must hold between two steps."""
    executor = core.executor
    assert isinstance(executor, SimulatedExecutor)
    rows = {row.request_id: (number, row) for number, row in executor.rows.items()}
    for request in core.requests.values():
        in_flight = sum(request in planned.requests for planned, _ in core.in_flight)
        assert request.num_in_flight == in_flight
        if request.status is RequestStatus.RUNNING:
            assert request.num_committed_tokens <= request.num_computed_tokens
            assert request.num_computed_tokens <= request.blocks.capacity
            number, row = rows[request.request_id]
            assert request.row == number
            assert row.block_ids == request.blocks.block_ids[0][: request.num_sent_blocks]
            if not in_flight:
                assert row.tokens == request.token_ids
                assert row.num_computed == request.num_computed_tokens
        elif not in_flight:
            assert request.blocks.num_blocks == 0
        if not in_flight:
            assert request.num_pending_tokens == 0
            assert request.num_committed_tokens == request.num_computed_tokens
    for planned, _ in core.in_flight:
        assert all(request.blocks.num_blocks for request in planned.requests), "freed too early"
    if not core.requests and not core.in_flight:
        assert core.kv_cache.num_free_blocks == core.kv_cache.num_blocks


def check_random_policy(seed: int, engine: SimulatedEngine, *, raises: bool, rejects: bool) -> None:
    numbers = random.Random(seed)
    longest = engine.num_blocks * engine.block_size - engine.num_lookahead_slots
    longest = max(min(longest, engine.max_model_len), 2)
    arrivals = []
    for index in range(numbers.randint(1, 15)):
        num_prompt_tokens = numbers.randint(1, max(longest * 2 // 3, 1))
        arrivals.append(
            Arrival(
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=numbers.randint(1, min(longest - num_prompt_tokens, 30)),
                time_s=numbers.random() * 0.3,
                shared_prefix=numbers.choice([None, 1, 2]),
                aborted_at_s=numbers.random() if numbers.random() < 0.2 else None,
                needs_grammar=numbers.random() < 0.1,
                ends_early=index % 2 == 0,
            )
        )
    policy = RandomPolicy(numbers, raises=raises, rejects=rejects)
    core = policy.core = engine.core(policy)
    executor = core.executor
    assert isinstance(executor, SimulatedExecutor)
    executor.failing = {str(index) for index in range(len(arrivals)) if numbers.random() < 0.1}
    steps: list[StepRecord] = []
    core.step_observers.append(steps.append)
    done = drive(core, arrivals, numbers, lambda: check_consistency(core))

    for index, arrival in enumerate(arrivals):
        reason, tokens = done["reasons"][str(index)], done["tokens"][str(index)]
        expected = output_of(index, arrival)
        if reason in ("stop", "length"):
            assert tokens == expected
        else:
            assert tokens == expected[: len(tokens)]
            is_explained = (reason == "abort" and arrival.aborted_at_s is not None) or (
                reason == "error" and (rejects or str(index) in executor.failing)
            )
            assert is_explained, reason
    assert core.kv_cache.num_free_blocks == core.kv_cache.num_blocks
    assert not executor.rows
    assert not executor.saved
    assert sum(step.num_new_tokens for step in steps) == sum(map(len, done["tokens"].values()))


ENGINES = st.builds(
    SimulatedEngine,
    num_blocks=st.integers(6, 40),
    block_size=st.sampled_from([1, 2, 4, 8]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 40),
    max_model_len=st.just(128),
    long_prefill_token_threshold=st.none() | st.integers(1, 10),
    max_preemptions_without_progress=st.integers(1, 3),
    num_lookahead_slots=st.integers(0, 3),
    enable_prefix_caching=st.booleans(),
    max_in_flight=st.integers(1, 3),
    max_draft_tokens=st.sampled_from([0, 2, 5]),
)
RANDOM_POLICIES = given(
    seed=st.integers(0, 2**32), engine=ENGINES, raises=st.booleans(), rejects=st.booleans()
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@RANDOM_POLICIES
def test_any_policy_serves_every_request_and_leaks_nothing(
    seed: int, engine: SimulatedEngine, raises: bool, rejects: bool
) -> None:
    check_random_policy(seed, engine, raises=raises, rejects=rejects)


@pytest.mark.full
@settings(max_examples=2_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@RANDOM_POLICIES
def test_any_policy_serves_every_request_and_leaks_nothing_in_2000_examples(
    seed: int, engine: SimulatedEngine, raises: bool, rejects: bool
) -> None:
    check_random_policy(seed, engine, raises=raises, rejects=rejects)


def test_random_policies_reach_every_outcome() -> None:
    moves: dict[str, int] = {}
    for seed in range(30):
        numbers = random.Random(seed)
        policy = RandomPolicy(numbers, raises=False, rejects=True)
        engine = SimulatedEngine(
            num_blocks=12, max_num_seqs=3, max_num_batched_tokens=16, max_in_flight=1 + seed % 3
        )
        arrivals = [
            Arrival(num_prompt_tokens=16, num_output_tokens=8, needs_grammar=index == 0)
            for index in range(6)
        ]
        policy.core = engine.core(policy)
        drive(policy.core, arrivals, numbers, lambda: None)
        for name, count in policy.num_moves.items():
            moves[name] = moves.get(name, 0) + count
    expected = {"granted", "preempted", "not preempted", "rejected"}
    assert expected | set(RefusalReason) - {RefusalReason.ADAPTER_SLOTS} <= set(moves)


def test_a_policy_that_runs_nobody_is_told_so() -> None:
    class Nobody(Scheduler):
        def schedule(self, step: StepPlanner) -> None:
            pass

    core = SimulatedEngine().core(Nobody())
    core.add_request(request_of(0, Arrival(num_prompt_tokens=4, num_output_tokens=4)))
    with pytest.raises(SchedulerStalledError, match="ran nothing and declared no idling"):
        core.step()
