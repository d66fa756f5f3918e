"""The planner's moves: what each grants, refuses and undoes, and what a policy may not do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from hotshoe.api import (
    Granted,
    RefusalReason,
    Refused,
    RequestView,
    Scheduler,
    StepPlan,
    StepPlanner,
    serve,
)
from hotshoe.api.executor import PendingResult
from hotshoe.engine.core import EngineCore
from hotshoe.engine.request import RequestUpdate
from hotshoe.errors import (
    EngineDeadError,
    KVCacheError,
    RequestError,
    SchedulerError,
    SchedulerStalledError,
)
from hotshoe.kv_cache import KVCacheManager
from hotshoe.testing.simulation import (
    Arrival,
    OldestFirst,
    SimulatedEngine,
    SimulatedExecutor,
    output_of,
    request_of,
    simulate,
)

Moves = Callable[[StepPlanner], object]


class Scripted(Scheduler):
    """One function per step, then ``serve``."""

    def __init__(self, *script: Moves) -> None:
        self.script = list(script)
        self.said: list[Any] = []

    def schedule(self, step: StepPlanner) -> None:
        if self.script:
            self.said.append(self.script.pop(0)(step))
        else:
            serve(step)


class Recording(SimulatedExecutor):
    """Keeps the plans."""

    def __init__(self, engine: SimulatedEngine) -> None:
        super().__init__(engine)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> PendingResult:
        self.plans.append(plan)
        return super().submit(plan)


class Bench:
    """An engine core with the given requests, all arrived, on a recording worker."""

    def __init__(
        self, scheduler: Scheduler, *sizes: tuple[int, int], drafts: int = 0, **engine: Any
    ) -> None:
        fields: dict[str, Any] = {"enable_prefix_caching": False, "max_draft_tokens": drafts}
        self.engine = SimulatedEngine(**(fields | engine))
        self.executor = Recording(self.engine)
        self.core: EngineCore = self.engine.core(scheduler, self.executor)
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, RequestUpdate] = {}
        self.arrivals = [
            Arrival(num_prompt_tokens=prompt, num_output_tokens=output) for prompt, output in sizes
        ]
        for index, arrival in enumerate(self.arrivals):
            self.core.add_request(request_of(index, arrival))

    def step(self) -> list[RequestUpdate]:
        updates = self.core.step()
        for update in updates:
            self.outputs.setdefault(update.request_id, []).extend(update.new_token_ids)
            if update.finish_reason is not None:
                self.ended[update.request_id] = update
        return updates

    def finish(self) -> None:
        """Serve what is left, and check that every survivor got its tokens and all blocks are
        back.
        """
        for _ in range(1000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.requests
        assert self.core.kv_cache.num_free_blocks == self.core.kv_cache.num_blocks
        assert not self.executor.rows
        assert not self.executor.saved
        for index, arrival in enumerate(self.arrivals):
            if self.ended[str(index)].finish_reason in ("stop", "length"):
                assert self.outputs[str(index)] == output_of(index, arrival)

    def tokens_of_steps(self, request_id: str) -> list[int]:
        return [
            tokens
            for plan in self.executor.plans
            for one, tokens in zip(plan.request_ids, plan.num_scheduled_tokens, strict=True)
            if one == request_id
        ]


def run_all(step: StepPlanner) -> list[Granted | Refused]:
    return [step.run(view) for view in (*step.running, *step.waiting)]


def reasons(outcomes: Sequence[Granted | Refused]) -> list[object]:
    return [one.num_tokens if isinstance(one, Granted) else one.reason for one in outcomes]


# what is granted


def test_long_prompt_is_computed_in_chunks_of_the_budget_then_token_by_token() -> None:
    bench = Bench(Scripted(), (25, 3), max_num_batched_tokens=10)
    bench.finish()
    assert bench.tokens_of_steps("0") == [10, 10, 5, 1, 1]


def test_threshold_limits_the_chunks_of_one_prompt() -> None:
    bench = Bench(Scripted(), (25, 2), long_prefill_token_threshold=8)
    bench.finish()
    assert bench.tokens_of_steps("0") == [8, 8, 8, 1, 1]


def test_prompts_and_single_tokens_share_a_step() -> None:
    bench = Bench(Scripted(), (4, 4), (25, 2), max_num_batched_tokens=10)
    bench.finish()
    assert bench.executor.plans[1].request_ids == ["0", "1"]
    assert bench.executor.plans[1].num_scheduled_tokens == [1, 9]


def test_max_tokens_limits_a_grant() -> None:
    scheduler = Scripted(lambda step: step.run(step.waiting[0], 3))
    bench = Bench(scheduler, (25, 1))
    bench.finish()
    assert scheduler.said == [Granted(3)]
    assert bench.tokens_of_steps("0") == [3, 22]


class AlwaysDrafts(Recording):
    """Offers as many drafts as there may be."""

    def _execute(self, plan: StepPlan) -> Any:
        result = super()._execute(plan)
        for row in self.rows.values():
            row.drafts = self._engine.max_draft_tokens
        result.num_draft_tokens_wanted[:] = [self._engine.max_draft_tokens] * len(plan.rows)
        return result


def drafting(moves: Moves, **engine: Any) -> tuple[Scripted, Bench]:
    """A request whose next step, which ``moves`` plans, would verify 4 drafts."""
    scheduler = Scripted(run_all, moves)
    bench = Bench(scheduler, drafts=4, **engine)
    bench.executor = AlwaysDrafts(bench.engine)
    bench.core = bench.engine.core(scheduler, bench.executor)
    bench.arrivals = [Arrival(num_prompt_tokens=8, num_output_tokens=30)]
    bench.core.add_request(request_of(0, bench.arrivals[0]))
    bench.step()
    bench.step()
    return scheduler, bench


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [(None, Granted(5, 4)), (9, Granted(5, 4)), (3, Granted(3, 2)), (1, Granted(1, 0))],
)
def test_max_tokens_trims_drafts_first(max_tokens: int | None, expected: Granted) -> None:
    scheduler, bench = drafting(lambda step: step.run(step.running[0], max_tokens))
    assert scheduler.said[1] == expected
    bench.finish()


def test_budget_trims_drafts_first() -> None:
    _, bench = drafting(lambda step: step.run(step.running[0]), max_num_batched_tokens=4)
    bench.finish()
    assert all(plan.num_tokens <= 4 for plan in bench.executor.plans)
    assert [3] in [plan.num_draft_slots for plan in bench.executor.plans]


def test_drafts_are_left_out_when_there_are_blocks_for_the_token_alone() -> None:
    # 10 blocks of 4 tokens: 8 + 30 - 1 computed tokens fit, as many drafts behind don't always
    _, bench = drafting(run_all, num_blocks=10)
    bench.finish()
    assert bench.ended["0"].metrics is not None
    assert bench.ended["0"].metrics.num_preemptions == 0


def test_drafts_never_reach_past_the_length_limit() -> None:
    _, bench = drafting(run_all)
    bench.finish()
    assert bench.outputs["0"] == output_of(0, bench.arrivals[0])
    trimmed = [slots for plan in bench.executor.plans for slots in plan.num_draft_slots if slots]
    assert trimmed[0] == 4
    assert trimmed[-1] < 4


def test_drafts_accepted_behind_a_stop_token_do_not_count_as_the_requests_own() -> None:
    # block size 1: every accepted token fills a block, which is offered to others at once
    engine = SimulatedEngine(block_size=1, max_draft_tokens=5)
    arrivals = [
        Arrival(num_prompt_tokens=5, num_output_tokens=60, ends_early=True) for _ in range(30)
    ]
    done = simulate(Scripted(), arrivals, engine)
    for index, arrival in enumerate(arrivals):
        assert done.token_ids[index] == output_of(index, arrival)


# what is refused, and why


def test_request_has_its_tokens_only_once_a_step() -> None:
    scheduler = Scripted(lambda step: [step.run(step.waiting[0], 2), run_all(step)[0]])
    bench = Bench(scheduler, (8, 2))
    bench.finish()
    assert reasons(scheduler.said[0]) == [2, RefusalReason.ALREADY_GRANTED]


def test_running_and_waiting_requests_are_refused_without_budget() -> None:
    scheduler = Scripted(run_all, run_all)
    bench = Bench(scheduler, (8, 2), (8, 2), max_num_batched_tokens=8)
    bench.step()
    bench.step()
    assert reasons(scheduler.said[0]) == [8, RefusalReason.NO_BUDGET]
    assert reasons(scheduler.said[1]) == [1, 7]
    bench.finish()


def test_request_is_refused_when_all_rows_are_taken() -> None:
    scheduler = Scripted(run_all)
    bench = Bench(scheduler, (4, 2), (4, 2), max_num_seqs=1)
    bench.finish()
    assert reasons(scheduler.said[0]) == [4, RefusalReason.MAX_NUM_SEQS]


def test_request_is_admitted_only_if_its_whole_prompt_fits() -> None:
    scheduler = Scripted(lambda step: [step.run(step.waiting[0]), step.run(step.waiting[0], 1)])
    bench = Bench(scheduler, (20, 2), (30, 2), num_blocks=9)
    bench.finish()
    assert reasons(scheduler.said[0]) == [20, RefusalReason.NO_BLOCKS]


def test_refusal_for_lack_of_blocks_changes_nothing() -> None:
    def moves(step: StepPlanner) -> tuple[object, int, int]:
        step.run(step.waiting[0])
        before = step.num_free_blocks, step.token_budget
        refused = step.run(step.waiting[0])
        assert (step.num_free_blocks, step.token_budget) == before
        assert len(step.waiting) == 1
        return refused

    scheduler = Scripted(moves)
    Bench(scheduler, (20, 2), (30, 2), num_blocks=9).finish()
    assert scheduler.said == [Refused(RefusalReason.NO_BLOCKS)]


def test_running_request_is_refused_when_its_next_token_needs_a_block() -> None:
    scheduler = Scripted(run_all, run_all, lambda step: step.idle("look", step.clock))
    bench = Bench(scheduler, (8, 3), (8, 3), num_blocks=5)
    bench.step()
    bench.step()
    assert reasons(scheduler.said[1]) == [1, RefusalReason.NO_BLOCKS]
    bench.finish()


def test_request_is_not_ready_before_its_grammar_is_compiled() -> None:
    scheduler = Scripted(lambda step: reasons(run_all(step)))
    bench = Bench(scheduler)
    arrival = Arrival(num_prompt_tokens=4, num_output_tokens=2, needs_grammar=True)
    bench.core.add_request(request_of(0, arrival))
    bench.arrivals = [arrival]
    assert bench.step() == []
    assert scheduler.said == [[RefusalReason.NOT_READY]]
    bench.executor.advance_to(1.0)
    bench.finish()


def test_grammar_that_is_refused_while_a_step_is_planned_never_runs() -> None:
    refusal: Future[None] = Future()

    class Compiling(SimulatedExecutor):
        def call(self, method: str, *args: Any) -> Future[Any]:
            return refusal

    def refuse_and_run(step: StepPlanner) -> list[object]:
        refusal.set_exception(RequestError("no such grammar", field="structured_outputs"))
        return reasons(run_all(step))

    scheduler = Scripted(refuse_and_run)
    bench = Bench(scheduler)
    bench.executor = Compiling(bench.engine)  # type: ignore[assignment]  # records no plans
    bench.core = bench.engine.core(scheduler, bench.executor)
    arrival = Arrival(num_prompt_tokens=4, num_output_tokens=2, needs_grammar=True)
    bench.core.add_request(request_of(0, arrival))
    assert bench.core.step() == []
    assert scheduler.said == [[RefusalReason.NOT_READY]]
    (update,) = bench.core.step()
    assert (update.error, update.error_field) == ("no such grammar", "structured_outputs")


def test_request_whose_drafts_are_unverified_is_in_flight() -> None:
    scheduler = Scripted()
    bench = Bench(scheduler, drafts=4, max_in_flight=2)
    bench.executor = AlwaysDrafts(bench.engine)
    bench.core = bench.engine.core(scheduler, bench.executor)
    bench.arrivals = [Arrival(num_prompt_tokens=8, num_output_tokens=30)]
    bench.core.add_request(request_of(0, bench.arrivals[0]))
    seen: list[object] = []
    scheduler.script = [lambda step: seen.append(run_all(step)) for _ in range(12)]
    bench.finish()
    outcomes = [one for outcome in seen for one in outcome]  # type: ignore[attr-defined]
    assert Refused(RefusalReason.IN_FLIGHT) in outcomes
    assert any(isinstance(one, Granted) and one.num_draft_slots for one in outcomes)


def test_request_with_its_last_token_in_flight_is_not_run_again() -> None:
    scheduler = Scripted(run_all, run_all)
    bench = Bench(scheduler, (8, 1), max_in_flight=2)
    bench.step()
    assert reasons(scheduler.said[1]) == [RefusalReason.IN_FLIGHT]
    bench.finish()
    assert bench.tokens_of_steps("0") == [8]


# preemption


def test_preempted_request_is_recomputed_and_continues() -> None:
    scheduler = Scripted(
        run_all, run_all, lambda step: (step.preempt(step.running[0]), step.num_free_blocks)
    )
    bench = Bench(scheduler, (8, 6), num_blocks=10)
    bench.finish()
    assert scheduler.said[2] == (True, 10)
    assert bench.tokens_of_steps("0") == [8, 1, 10, 1, 1, 1]
    assert bench.ended["0"].metrics is not None
    assert bench.ended["0"].metrics.num_preemptions == 1


def test_preempting_undoes_the_grant_of_a_request_that_was_running() -> None:
    def moves(step: StepPlanner) -> tuple[int, int, int]:
        view = step.running[0]
        step.run(view)
        step.preempt(view)
        return step.token_budget, view.num_computed_tokens, view.granted_tokens

    scheduler = Scripted(run_all, moves)
    bench = Bench(scheduler, (8, 4), max_num_batched_tokens=16)
    bench.step()
    bench.step()
    assert scheduler.said[1] == (16, 0, 0)
    assert bench.executor.plans[1].preempted_request_ids == ("0",)
    assert bench.executor.plans[1].request_ids == []
    bench.finish()


def test_preempting_a_request_admitted_in_this_step_leaves_no_trace() -> None:
    def moves(step: StepPlanner) -> tuple[bool, int, int, int]:
        view = step.waiting[0]
        step.run(view)
        done = step.preempt(view)
        step.run(step.waiting[1])
        return done, view.num_preemptions, view.num_blocks, len(step.waiting)

    scheduler = Scripted(moves)
    bench = Bench(scheduler, (8, 4), (8, 4))
    bench.step()
    assert scheduler.said == [(True, 0, 0, 1)]
    assert bench.executor.plans[0].request_ids == ["1"]
    assert bench.executor.plans[0].preempted_request_ids == ()
    bench.finish()


def test_request_can_be_preempted_and_resumed_in_one_step() -> None:
    def moves(step: StepPlanner) -> object:
        view = step.running[0]
        step.preempt(view)
        return step.run(view)

    scheduler = Scripted(run_all, moves)
    bench = Bench(scheduler, (8, 4))
    bench.finish()
    assert scheduler.said[1] == Granted(9)
    assert bench.executor.plans[1].preempted_request_ids == ("0",)
    assert [one.request_id for one in bench.executor.plans[1].resumed_requests] == ["0"]


def test_waiting_request_can_not_be_preempted() -> None:
    scheduler = Scripted(lambda step: (step.preempt(step.waiting[0]), run_all(step)))
    bench = Bench(scheduler, (8, 4))
    bench.finish()
    assert scheduler.said[0][0] is False


def test_blocks_of_a_request_in_flight_come_back_when_its_step_has_committed() -> None:
    free: list[int] = []

    def preempt(step: StepPlanner) -> None:
        step.preempt(step.running[0])
        free.append(step.num_free_blocks)
        assert reasons(run_all(step)) == [RefusalReason.IN_FLIGHT]

    def look(step: StepPlanner) -> None:
        free.append(step.num_free_blocks)
        serve(step)

    bench = Bench(Scripted(run_all, preempt, look), (8, 4), num_blocks=10, max_in_flight=2)
    bench.finish()
    assert free == [8, 10]


def test_blocks_of_an_aborted_request_in_flight_come_back_when_its_step_has_committed() -> None:
    bench = Bench(Scripted(), (8, 9), num_blocks=10, max_in_flight=2)
    bench.step()
    assert len(bench.core.in_flight) == 1
    bench.core.abort(["0"])
    held = 10 - bench.core.kv_cache.num_free_blocks
    assert held > 0
    bench.finish()
    assert bench.ended["0"].finish_reason == "abort"


# progress


class LeastAttained(Scheduler):
    """Prefers who has computed least, and takes blocks from who has computed most: without the
    core's protection, two requests take each other's blocks for ever.
    """

    num_calls = 0

    def schedule(self, step: StepPlanner) -> None:
        self.num_calls += 1
        assert self.num_calls < 2000, "this is a livelock"
        everybody = [*step.running, *step.waiting]
        for view in sorted(everybody, key=lambda view: view.num_computed_tokens):
            while not (outcome := step.run(view)):
                others = [one for one in step.running if one.is_preemptable and one is not view]
                victim = max(others, key=lambda one: one.num_computed_tokens, default=None)
                if outcome.reason is not RefusalReason.NO_BLOCKS or victim is None:
                    break
                if victim.granted_tokens or not step.preempt(victim):
                    break


LIVELOCK = {"num_blocks": 12, "max_num_batched_tokens": 8, "enable_prefix_caching": False}


@pytest.mark.parametrize("num_requests", [2, 3, 5])
def test_policy_that_would_livelock_makes_progress(num_requests: int) -> None:
    arrivals = [Arrival(num_prompt_tokens=40, num_output_tokens=4)] * num_requests
    done = simulate(LeastAttained(), arrivals, SimulatedEngine(**LIVELOCK))  # type: ignore[arg-type]
    assert len(done.finished) == num_requests
    assert max(one.num_preemptions for one in done.finished.values()) >= 3


def test_policy_that_would_livelock_does_so_without_protection() -> None:
    bench = Bench(
        LeastAttained(), (40, 4), (40, 4), max_preemptions_without_progress=10**6, **LIVELOCK
    )
    for _ in range(500):
        bench.step()
    assert bench.outputs == {}


def test_protected_request_that_waits_keeps_no_other_from_being_safe() -> None:
    class Unfair(Scheduler):
        """Lets requests 1 and 2 take each other's place, once 0 has been preempted too often."""

        num_calls = 0

        def schedule(self, step: StepPlanner) -> None:
            self.num_calls += 1
            assert self.num_calls < 2000, "this is a livelock"
            by_id = {view.request_id: view for view in (*step.running, *step.waiting)}
            first = by_id.get("0")
            if first is not None and first.num_preemptions < 3:
                for view in step.running:
                    step.preempt(view)
                if first.num_preemptions < 3:
                    step.run(first, 1)
                return
            one, two = by_id.get("1"), by_id.get("2")
            if one is None or two is None:
                serve(step)
                return
            coming, going = (one, two) if self.num_calls % 2 else (two, one)
            for view in (going, first):
                if view is not None:
                    step.preempt(view)
            if not step.run(coming, 8):
                step.run(going)

    arrivals = [Arrival(num_prompt_tokens=40, num_output_tokens=2)] * 3
    engine = SimulatedEngine(num_blocks=12, max_num_seqs=1, enable_prefix_caching=False)
    assert len(simulate(Unfair(), arrivals, engine).finished) == 3


def test_stall_is_diagnosed() -> None:
    bench = Bench(Scripted(run_all, lambda step: None, lambda step: None), (8, 4), (8, 4))
    bench.step()
    with pytest.raises(SchedulerStalledError) as caught:
        bench.step()
    assert str(caught.value) == (
        "scheduler Scripted ran nothing and declared no idling, though 2 requests are running and "
        "0 are ready to run; 252 of 256 KV blocks are free; the first request, '0', needs 1; "
        "call step.run() for somebody, or step.idle() to wait on purpose"
    )
    with pytest.raises(SchedulerStalledError):
        bench.step()
    bench.finish()


def test_idling_on_purpose_is_no_stall() -> None:
    scheduler = Scripted(lambda step: step.idle("waiting for a fuller batch", step.clock + 5))
    bench = Bench(scheduler, (8, 4))
    assert bench.step() == []
    assert bench.core.planner.idle_reason == "waiting for a fuller batch"
    assert bench.core.planner.idle_until == 5.0
    bench.finish()


@pytest.mark.parametrize("until", ["soon", float("nan"), [1.0]])
def test_idling_until_what_is_no_time_is_refused(until: Any) -> None:
    bench = Bench(Scripted(lambda step: step.idle("waiting", until)), (8, 4))
    with pytest.raises(SchedulerError, match=r"until must be a time on step\.clock in seconds"):
        bench.step()
    bench.core.wait()
    bench.finish()


def test_doing_nothing_while_a_step_is_in_flight_is_no_stall() -> None:
    bench = Bench(Scripted(run_all, lambda step: None), (8, 4), max_in_flight=2)
    bench.step()
    bench.finish()


def test_engine_whose_requests_all_wait_for_grammars_does_not_stall() -> None:
    bench = Bench(Scripted())
    arrival = Arrival(num_prompt_tokens=4, num_output_tokens=2, needs_grammar=True)
    bench.core.add_request(request_of(0, arrival))
    assert bench.step() == []
    bench.core.abort(["0"])
    bench.finish()


# refusing requests


def test_rejected_request_ends_with_the_policys_words() -> None:
    scheduler = Scripted(lambda step: (step.reject(step.waiting[0], "over quota"), run_all(step)))
    bench = Bench(scheduler, (8, 4), (8, 4))
    bench.finish()
    assert bench.ended["0"].finish_reason == "error"
    assert bench.ended["0"].error == "rejected by the scheduler: over quota"
    assert bench.ended["1"].finish_reason == "length"


def test_running_request_can_not_be_rejected() -> None:
    bench = Bench(Scripted(run_all, lambda step: step.reject(step.running[0], "late")), (8, 4))
    bench.step()
    with pytest.raises(SchedulerError, match="only waiting requests can be rejected, this one is"):
        bench.step()
    bench.finish()


def test_rejection_stands_if_the_policy_raises_afterwards() -> None:
    def moves(step: StepPlanner) -> None:
        step.reject(step.waiting[0], "over quota")
        raise ZeroDivisionError

    bench = Bench(Scripted(moves), (8, 4), (8, 4))
    with pytest.raises(SchedulerError, match="raised ZeroDivisionError"):
        bench.step()
    bench.core.abort(["0"])
    bench.finish()
    assert bench.ended["0"].error == "rejected by the scheduler: over quota"


@pytest.mark.parametrize(
    ("sizes", "engine", "message"),
    [
        ((512, 1), {}, "prompt has 512 tokens but max_model_len is 512"),
        ((500, 13), {}, r"prompt of 500 tokens \+ max_tokens 13 = 513 exceeds max_model_len 512"),
        ((30, 11), {"num_blocks": 10}, "may need 41 tokens of KV cache, 0 of them for drafts"),
        (
            (30, 10),
            {"num_blocks": 10, "num_lookahead_slots": 2},
            "may need 42 tokens of KV cache, 2 of them for drafts, but only 40 exist",
        ),
    ],
)
def test_request_that_can_never_fit_is_refused_when_it_arrives(
    sizes: tuple[int, int], engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        Bench(Scripted(), sizes, **engine)


def test_request_that_just_fits_is_served() -> None:
    Bench(Scripted(), (30, 10), num_blocks=10).finish()
    Bench(Scripted(), (30, 8), num_blocks=10, num_lookahead_slots=2).finish()
    Bench(Scripted(), (511, 1)).finish()


# what a policy may not do


def test_policy_that_raises_has_its_grants_undone_and_the_engine_goes_on() -> None:
    free: list[int] = []

    def moves(step: StepPlanner) -> None:
        run_all(step)
        free.append(step.num_free_blocks)
        raise KeyError("tenant")

    bench = Bench(Scripted(moves), (8, 4), (8, 4), num_blocks=10)
    with pytest.raises(SchedulerError, match=r"scheduler Scripted raised KeyError\('tenant'\)"):
        bench.step()
    assert free == [6]
    assert bench.core.kv_cache.num_free_blocks == 10
    assert bench.executor.plans == []
    bench.core.scheduler = Scripted()
    bench.finish()


def test_policy_that_raises_on_running_requests_has_its_grants_undone() -> None:
    def moves(step: StepPlanner) -> None:
        run_all(step)
        raise KeyError("tenant")

    bench = Bench(
        Scripted(run_all, moves, run_all, moves), (7, 9), (30, 3), max_num_batched_tokens=16
    )
    for _ in range(4):
        try:
            bench.step()
        except SchedulerError:
            continue
    bench.finish()
    assert bench.tokens_of_steps("0") == [7] + [1] * 8


def test_policy_that_raised_hears_again_of_arrivals_and_ends() -> None:
    heard: list[tuple[list[str], list[str]]] = []

    def hear(step: StepPlanner) -> None:
        heard.append(
            (
                [view.request_id for view in step.arrived],
                [view.request_id for view in step.finished],
            )
        )

    def moves(step: StepPlanner) -> None:
        hear(step)
        raise KeyError("tenant")

    bench = Bench(Scripted(moves, hear), (8, 4), (8, 4))
    bench.core.abort(["1"])
    with pytest.raises(SchedulerError):
        bench.step()
    with pytest.raises(SchedulerStalledError):
        bench.step()
    assert heard == [(["0", "1"], ["1"])] * 2
    bench.finish()


def test_interrupt_within_a_policy_undoes_its_grants() -> None:
    def moves(step: StepPlanner) -> None:
        run_all(step)
        raise KeyboardInterrupt

    bench = Bench(Scripted(moves), (8, 4))
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    bench.finish()


def test_broken_eviction_policy_is_blamed_and_not_the_scheduler() -> None:
    class Forgetful(OldestFirst):
        is_well = False

        def pop(self) -> int:
            if not self.is_well:
                raise IndexError("nothing there")
            return super().pop()

    eviction = Forgetful()
    bench = Bench(Scripted())
    bench.core.kv_cache = bench.core.planner.kv_cache = KVCacheManager(
        num_blocks=10, block_size=4, eviction=eviction
    )
    bench.arrivals = [Arrival(num_prompt_tokens=8, num_output_tokens=4)]
    bench.core.add_request(request_of(0, bench.arrivals[0]))
    with pytest.raises(KVCacheError, match=r"eviction policy .*Forgetful failed in pop"):
        bench.step()
    eviction.is_well = True
    bench.finish()


def test_eviction_policy_that_fails_when_blocks_come_back_is_reported_by_the_next_step() -> None:
    class Grumbling(OldestFirst):
        num_complaints = 0

        def add(self, block_id: int, is_cached: bool) -> None:
            super().add(block_id, is_cached)
            if is_cached and not self.num_complaints:
                self.num_complaints += 1
                raise ValueError("not another one")

    bench = Bench(Scripted())
    bench.core.kv_cache = bench.core.planner.kv_cache = KVCacheManager(
        num_blocks=30, block_size=4, eviction=Grumbling()
    )
    bench.arrivals = [Arrival(num_prompt_tokens=8, num_output_tokens=n) for n in (1, 3, 1)]
    for index, arrival in enumerate(bench.arrivals):
        bench.core.add_request(request_of(index, arrival))
    bench.step()
    assert set(bench.ended) == {"0", "2"}
    with pytest.raises(KVCacheError, match=r"Grumbling failed in add: it raised ValueError"):
        bench.step()
    bench.finish()


@pytest.mark.parametrize("max_tokens", [0, -1, 2.5, "3", True])
def test_max_tokens_must_be_a_positive_int(max_tokens: Any) -> None:
    bench = Bench(Scripted(lambda step: step.run(step.waiting[0], max_tokens)), (8, 4))
    with pytest.raises(SchedulerError, match="max_tokens must be an int of at least 1"):
        bench.step()
    bench.finish()


def test_finished_request_can_not_be_run() -> None:
    kept: list[RequestView] = []
    scheduler = Scripted(lambda step: kept.append(step.waiting[0]), lambda step: step.run(kept[0]))
    bench = Bench(scheduler, (8, 4), (8, 4))
    with pytest.raises(SchedulerStalledError):
        bench.step()
    bench.core.abort(["0"])
    with pytest.raises(SchedulerError, match="request '0' has ended"):
        bench.step()
    bench.finish()


def test_request_of_another_engine_can_not_be_run() -> None:
    kept: list[RequestView] = []
    other = Bench(Scripted(lambda step: kept.extend(step.waiting)), (8, 4))
    with pytest.raises(SchedulerStalledError):
        other.step()
    bench = Bench(Scripted(lambda step: step.run(kept[0])), (8, 4))
    with pytest.raises(SchedulerError, match="request '0' is one of another engine"):
        bench.step()
    bench.finish()
    other.finish()


@pytest.mark.parametrize("view", [None, "0", object()])
def test_moves_take_request_views_only(view: Any) -> None:
    for move in (
        lambda step: step.run(view),
        lambda step: step.preempt(view),
        lambda step: step.reject(view, "why"),
        lambda step: step.num_blocks_needed(view, 1),
    ):
        bench = Bench(Scripted(move), (8, 4))
        with pytest.raises(SchedulerError, match="expected a request view, got"):
            bench.step()
        bench.finish()


def test_endless_repetition_of_a_refused_move_is_cut_off() -> None:
    def moves(step: StepPlanner) -> None:
        run_all(step)
        while not step.run(step.waiting[0]):
            pass

    bench = Bench(Scripted(moves), (8, 4), (8, 4), max_num_seqs=1)
    with pytest.raises(SchedulerError, match="seems to repeat a move that is refused"):
        bench.step()
    bench.finish()


def test_step_can_not_be_used_after_schedule_has_returned() -> None:
    kept: list[StepPlanner] = []
    bench = Bench(Scripted(lambda step: (kept.append(step), run_all(step))), (8, 4))
    view = next(iter(bench.core.requests.values())).view
    bench.step()
    for move in (
        lambda: kept[0].run(view),
        lambda: kept[0].preempt(view),
        lambda: kept[0].reject(view, "why"),
        lambda: kept[0].idle("why"),
        lambda: kept[0].num_blocks_needed(view, 1),
    ):
        with pytest.raises(SchedulerError, match=r"used after schedule\(\) had returned"):
            move()
    bench.finish()


# what a policy sees


def test_views_count_tokens_in_flight() -> None:
    seen: list[tuple[int, int]] = []

    def moves(step: StepPlanner) -> None:
        view = (*step.running, *step.waiting)[0]
        seen.append((view.num_computed_tokens, view.num_output_tokens))
        run_all(step)

    bench = Bench(Scripted(*[moves] * 4), (8, 9), max_in_flight=2)
    bench.step()
    bench.step()
    assert seen[:3] == [(0, 0), (8, 1), (9, 2)]
    bench.finish()


def test_last_step_and_clock_are_those_of_the_engine() -> None:
    seen: list[Any] = []

    def moves(step: StepPlanner) -> None:
        seen.append((step.clock, step.last and step.last.num_tokens))
        run_all(step)

    bench = Bench(Scripted(moves, moves), (8, 9))
    bench.step()
    bench.step()
    assert seen == [(0.0, None), (pytest.approx(0.0108), 8)]
    bench.finish()


def test_num_blocks_needed_says_what_a_run_takes() -> None:
    def moves(step: StepPlanner) -> tuple[int, int]:
        needed = step.num_blocks_needed(step.waiting[0], 9)
        before = step.num_free_blocks
        step.run(step.waiting[0])
        return needed, before - step.num_free_blocks

    scheduler = Scripted(moves)
    Bench(scheduler, (9, 4)).finish()
    assert scheduler.said == [(3, 3)]


def test_rows_are_used_again() -> None:
    bench = Bench(Scripted(), *[(4, 2)] * 10, max_num_seqs=2)
    bench.finish()
    assert {row for plan in bench.executor.plans for row in plan.rows} == {0, 1}


def test_executor_that_does_not_take_a_step_is_dead() -> None:
    class Broken(Recording):
        def submit(self, plan: StepPlan) -> PendingResult:
            raise OSError("the pipe is broken")

    bench = Bench(Scripted())
    bench.core = bench.engine.core(Scripted(), Broken(bench.engine))
    bench.core.add_request(request_of(0, Arrival(num_prompt_tokens=8, num_output_tokens=4)))
    with pytest.raises(EngineDeadError, match=r"Broken didn't take step 0: OSError\('the pipe"):
        bench.core.step()


def test_id_of_an_ended_request_can_be_used_at_once() -> None:
    bench = Bench(Scripted(), (8, 9), (8, 9), max_in_flight=2)
    bench.step()
    for _ in range(5):
        bench.core.abort(["0"])
        bench.core.add_request(request_of(0, bench.arrivals[0]))
        bench.outputs["0"] = []
        for update in bench.core.take_updates():
            assert update.finish_reason == "abort"
        bench.step()
    bench.finish()
