"""The conformance suite of the scheduler contract. Subclass it, name your component, and run it
with pytest.

    class TestMyScheduler(SchedulerConformance):
        def component(self) -> Component:
            return my_package.hotshoe_component()

It drives the policy through the real planner and KV cache, over a make-believe worker and in
virtual time: see ``hotshoe.testing.simulation``, which is also there to try a policy out.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest

from hotshoe.api import Component, RequestView, Scheduler, SchedulerContext, StepPlanner
from hotshoe.engine.request import LiveRequestView
from hotshoe.testing.simulation import (
    Arrival,
    SimulatedEngine,
    Simulation,
    output_of,
    simulate,
)

PATIENCE_S = 10_000.0
"""Virtual seconds after which a policy counts as asleep; a run takes a hundred at most."""

IN_FLIGHT = pytest.mark.parametrize("max_in_flight", [1, 2, 3])


class SchedulerConformance:
    """What every policy must get right, whatever its order. About two seconds.

    Fairness is the policy's own business; that every request is served in the end isn't.

    Attributes:
        options: under ``scheduler.options``.
        metadata: what requests carry for the policy, in turns.
    """

    options: ClassVar[dict[str, Any]] = {}
    metadata: ClassVar[Sequence[dict[str, Any]]] = (
        {},
        {"tenant": "a", "deadline_s": 3.5},
        {"tenant": "b", "tier": 2, "unknown to everybody": [1, {"x": None}]},
    )

    def component(self) -> Component:
        """The component under test."""
        raise NotImplementedError("a conformance suite has to name its component")

    def scheduler(self, context: SchedulerContext) -> Scheduler:
        """A fresh policy."""
        component = self.component()
        return cast(Scheduler, component.factory(component.options(**self.options), context))

    def arrivals(self, count: int, *, seed: int = 0, duration_s: float = 1.0) -> list[Arrival]:
        """Requests of mixed lengths, priorities and metadata."""
        numbers = random.Random(seed)
        return [
            Arrival(
                num_prompt_tokens=numbers.choice([1, 3, 4, 17, 60, 150]),
                num_output_tokens=numbers.choice([1, 2, 9, 40]),
                time_s=numbers.random() * duration_s,
                priority=numbers.randint(-2, 2),
                metadata=self.metadata[index % len(self.metadata)],
                shared_prefix=numbers.choice([None, 1, 2]),
                ends_early=index % 3 == 0,
            )
            for index in range(count)
        ]

    def run(self, arrivals: Sequence[Arrival], engine: SimulatedEngine) -> Simulation:
        """Simulate, and check what must hold of every run."""
        done = simulate(self.scheduler(engine.scheduler_context), arrivals, engine)
        assert done.duration_s < PATIENCE_S
        assert len(done.finished) == len(arrivals), "a request was never finished"
        assert done.num_free_blocks == engine.num_blocks, "blocks leaked"
        for index, arrival in enumerate(arrivals):
            reason = done.finished[index].finish_reason
            expected = output_of(index, arrival)
            if arrival.aborted_at_s is None:
                assert reason in ("stop", "length"), f"request {index} ended with {reason!r}"
                assert done.token_ids[index] == expected
            else:
                assert done.token_ids[index] == expected[: len(done.token_ids[index])]
        for step in done.steps:
            assert sum(step.num_scheduled_tokens) <= engine.max_num_batched_tokens
            assert len(step.request_ids) <= engine.max_num_seqs
        return done

    def test_component_states_the_contract_it_was_written_for(self) -> None:
        assert self.component().contract == "scheduler/0"

    @IN_FLIGHT
    def test_every_request_is_served_to_its_end(self, max_in_flight: int) -> None:
        self.run(self.arrivals(60), SimulatedEngine(max_in_flight=max_in_flight))

    @IN_FLIGHT
    def test_nobody_starves_when_blocks_are_so_few_that_requests_must_give_way(
        self, max_in_flight: int
    ) -> None:
        # 50 blocks hold 200 tokens: the longest request and hardly anything beside it
        engine = SimulatedEngine(num_blocks=50, max_in_flight=max_in_flight)
        self.run(self.arrivals(60), engine)

    def test_requests_that_all_grow_beyond_the_pool_are_served_one_after_another(self) -> None:
        arrivals = [Arrival(num_prompt_tokens=8, num_output_tokens=56) for _ in range(8)]
        self.run(arrivals, SimulatedEngine(num_blocks=17, enable_prefix_caching=False))

    def test_a_single_row_is_enough(self) -> None:
        self.run(self.arrivals(20), SimulatedEngine(max_num_seqs=1))

    def test_prompts_longer_than_the_budget_are_served_in_chunks(self) -> None:
        done = self.run(self.arrivals(20), SimulatedEngine(max_num_batched_tokens=16))
        assert max(step.num_running for step in done.steps) >= 1

    def test_a_budget_of_one_token_is_enough(self) -> None:
        self.run(self.arrivals(5), SimulatedEngine(max_num_batched_tokens=1))

    def test_a_threshold_for_long_prompts_is_no_obstacle(self) -> None:
        self.run(self.arrivals(20), SimulatedEngine(long_prefill_token_threshold=7))

    @IN_FLIGHT
    def test_drafts_disturb_nothing(self, max_in_flight: int) -> None:
        engine = SimulatedEngine(
            max_draft_tokens=5, max_in_flight=max_in_flight, num_blocks=60, num_lookahead_slots=2
        )
        done = self.run(self.arrivals(40), engine)
        assert sum(step.num_accepted_tokens for step in done.steps) > 0

    @IN_FLIGHT
    def test_requests_may_go_away_at_any_time(self, max_in_flight: int) -> None:
        numbers = random.Random(3)
        arrivals = [
            replace(arrival, aborted_at_s=arrival.time_s + numbers.random())
            if numbers.random() < 0.5
            else arrival
            for arrival in self.arrivals(60)
        ]
        done = self.run(arrivals, SimulatedEngine(num_blocks=60, max_in_flight=max_in_flight))
        assert any(one.finish_reason == "abort" for one in done.finished.values())

    def test_a_request_that_is_not_ready_holds_nobody_up(self) -> None:
        engine = SimulatedEngine(grammar_time_s=500.0)
        waiting = Arrival(num_prompt_tokens=4, num_output_tokens=2, needs_grammar=True)
        done = self.run([waiting, *self.arrivals(20)], engine)
        others = [done.finished[index].finish_time_s for index in range(1, 21)]
        assert max(others) < done.finished[0].finish_time_s

    def test_a_thousand_waiting_requests_are_served(self) -> None:
        arrivals = [
            Arrival(num_prompt_tokens=8, num_output_tokens=2, priority=index % 5)
            for index in range(1000)
        ]
        engine = SimulatedEngine(max_num_seqs=64, max_num_batched_tokens=512)
        done = self.run(arrivals, engine)
        assert max(step.num_waiting for step in done.steps) >= 900

    def test_an_engine_that_ran_empty_serves_again(self) -> None:
        engine = SimulatedEngine()
        late = [replace(arrival, time_s=arrival.time_s + 100) for arrival in self.arrivals(10)]
        self.run([*self.arrivals(10, seed=1), *late], engine)

    def test_requests_that_have_ended_are_forgotten(self) -> None:
        engine = SimulatedEngine()
        policy = _KeepsCount(self.scheduler(engine.scheduler_context))
        simulate(policy, self.arrivals(30), engine)
        gc.collect()
        alive = [one for one in gc.get_objects() if type(one) is LiveRequestView]
        kept = [one for one in alive if id(one) in policy.seen]
        assert not kept, "the policy holds on to requests that have ended: see StepPlanner.finished"


class _KeepsCount(Scheduler):
    """Notes which views a policy was shown, without holding them."""

    def __init__(self, inner: Scheduler) -> None:
        self.seen: set[int] = set()
        self._inner = inner

    def schedule(self, step: StepPlanner) -> None:
        views: list[RequestView] = [*step.running, *step.waiting, *step.arrived]
        self.seen.update(map(id, views))
        self._inner.schedule(step)
