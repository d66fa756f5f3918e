"""The built-in schedulers: conformance, and the order that each promises."""

from __future__ import annotations

import pytest

from hotshoe.api import Component, RequestView, Scheduler, StepPlanner
from hotshoe.testing.scheduler import SchedulerConformance
from hotshoe.testing.simulation import Arrival, SimulatedEngine, Simulation, simulate
from hotshoe_schedulers import fcfs, priority
from hotshoe_schedulers.fcfs import FcfsScheduler
from hotshoe_schedulers.priority import PriorityScheduler


class TestFcfs(SchedulerConformance):
    def component(self) -> Component:
        return fcfs.hotshoe_component()


class TestPriority(SchedulerConformance):
    def component(self) -> Component:
        return priority.hotshoe_component()


def finish_order(done: Simulation) -> list[int]:
    return sorted(done.finished, key=lambda index: done.finished[index].finish_time_s)


def first_token_order(done: Simulation) -> list[int]:
    times = {index: one.first_token_time_s for index, one in done.finished.items()}
    return sorted(times, key=lambda index: (times[index], index))


def alike(count: int, **fields: object) -> list[Arrival]:
    sizes = {"num_prompt_tokens": 8, "num_output_tokens": 4}
    return [Arrival(**(sizes | fields)) for _ in range(count)]  # type: ignore[arg-type]


ONE_ROW = SimulatedEngine(max_num_seqs=1)


def test_fcfs_serves_in_order_of_arrival() -> None:
    arrivals = [
        Arrival(num_prompt_tokens=8, num_output_tokens=4, time_s=time_s, priority=-index)
        for index, time_s in enumerate([0.003, 0.001, 0.002, 0.0])
    ]
    assert finish_order(simulate(FcfsScheduler(), arrivals, ONE_ROW)) == [3, 1, 2, 0]


def test_fcfs_lets_no_short_prompt_overtake_one_that_does_not_fit() -> None:
    # while request 0 runs, request 1 has to wait for its blocks; request 2 would fit
    arrivals = [
        Arrival(num_prompt_tokens=60, num_output_tokens=30),
        Arrival(num_prompt_tokens=100, num_output_tokens=4),
        Arrival(num_prompt_tokens=4, num_output_tokens=4),
    ]
    engine = SimulatedEngine(num_blocks=30, enable_prefix_caching=False)
    assert first_token_order(simulate(FcfsScheduler(), arrivals, engine)) == [0, 1, 2]


def test_fcfs_preempts_the_request_admitted_last() -> None:
    arrivals = alike(3, num_output_tokens=40)
    engine = SimulatedEngine(num_blocks=20, enable_prefix_caching=False)
    done = simulate(FcfsScheduler(), arrivals, engine)
    assert [done.finished[index].num_preemptions > 0 for index in range(3)] == [False, True, True]
    assert finish_order(done) == [0, 1, 2]


@pytest.mark.parametrize("policy", [FcfsScheduler, PriorityScheduler])
def test_one_victim_in_flight_is_enough_until_its_blocks_are_back(policy: type[Scheduler]) -> None:
    arrivals = [Arrival(num_prompt_tokens=8, num_output_tokens=40)] * 5
    engine = SimulatedEngine(num_blocks=20, max_in_flight=2, enable_prefix_caching=False)
    done = simulate(policy(), arrivals, engine)
    assert {step.num_preempted for step in done.steps} == {0, 1}


def test_fcfs_never_preempts_for_a_request_that_waits() -> None:
    arrivals = [*alike(1, num_output_tokens=30), *alike(20, time_s=0.01, priority=-5)]
    engine = SimulatedEngine(max_num_seqs=2)
    done = simulate(FcfsScheduler(), arrivals, engine)
    assert sum(one.num_preemptions for one in done.finished.values()) == 0


def test_priority_serves_the_lowest_value_first_and_ties_by_arrival() -> None:
    arrivals = [
        Arrival(num_prompt_tokens=8, num_output_tokens=4, priority=value)
        for value in [2, 1, 0, 1, 2, -1]
    ]
    assert finish_order(simulate(PriorityScheduler(), arrivals, ONE_ROW)) == [5, 2, 1, 3, 0, 4]


def test_priority_takes_the_row_of_a_running_request_that_matters_less() -> None:
    arrivals = [
        Arrival(num_prompt_tokens=8, num_output_tokens=50, priority=1),
        Arrival(num_prompt_tokens=8, num_output_tokens=4, priority=0, time_s=0.1),
    ]
    done = simulate(PriorityScheduler(), arrivals, ONE_ROW)
    assert finish_order(done) == [1, 0]
    assert [done.finished[index].num_preemptions for index in range(2)] == [1, 0]


def test_priority_takes_the_blocks_of_a_running_request_that_matters_less() -> None:
    arrivals = [
        Arrival(num_prompt_tokens=40, num_output_tokens=50, priority=1),
        Arrival(num_prompt_tokens=80, num_output_tokens=4, priority=0, time_s=0.1),
    ]
    engine = SimulatedEngine(num_blocks=25, enable_prefix_caching=False)
    done = simulate(PriorityScheduler(), arrivals, engine)
    assert finish_order(done) == [1, 0]
    assert [done.finished[index].num_preemptions for index in range(2)] == [1, 0]


@pytest.mark.parametrize("value", [0, 1])
def test_priority_leaves_requests_alone_that_matter_as_much_or_more(value: int) -> None:
    arrivals = [
        Arrival(num_prompt_tokens=8, num_output_tokens=50, priority=0),
        Arrival(num_prompt_tokens=8, num_output_tokens=4, priority=value, time_s=0.1),
    ]
    done = simulate(PriorityScheduler(), arrivals, ONE_ROW)
    assert finish_order(done) == [0, 1]
    assert sum(one.num_preemptions for one in done.finished.values()) == 0


def test_priority_preempts_the_least_important_of_several() -> None:
    arrivals = [
        Arrival(num_prompt_tokens=8, num_output_tokens=50, priority=value) for value in [1, 3, 2]
    ] + [Arrival(num_prompt_tokens=8, num_output_tokens=4, priority=0, time_s=0.1)]
    done = simulate(PriorityScheduler(), arrivals, SimulatedEngine(max_num_seqs=3))
    assert [done.finished[index].num_preemptions for index in range(4)] == [0, 1, 0, 0]


class ForgetsNobody(Scheduler):
    """Keeps every view, and runs in reverse order."""

    def __init__(self) -> None:
        self.views: dict[RequestView, int] = {}

    def schedule(self, step: StepPlanner) -> None:
        for view in step.arrived:
            self.views[view] = 0
        for view in reversed([*step.running, *step.waiting]):
            step.run(view)


class Sleeper(Scheduler):
    def schedule(self, step: StepPlanner) -> None:
        if len(step.waiting) + len(step.running) > 3:
            for view in [*step.running, *step.waiting]:
                step.run(view)
        else:
            step.idle("three are too few")


def suite(policy: type[Scheduler]) -> SchedulerConformance:
    class Suite(SchedulerConformance):
        def scheduler(self, context: object) -> Scheduler:
            return policy()

    return Suite()


def test_suite_notices_a_policy_that_keeps_requests_for_ever() -> None:
    with pytest.raises(AssertionError, match="holds on to requests that have ended"):
        suite(ForgetsNobody).test_requests_that_have_ended_are_forgotten()


def test_suite_notices_a_policy_that_leaves_requests_unserved() -> None:
    with pytest.raises(Exception, match="three are too few"):
        suite(Sleeper).test_every_request_is_served_to_its_end(1)
