"""How many drafts requests get, from costs that are fed in: those that bring the most tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from hotshoe.worker.draft_control import AdaptiveDraftControl, DraftControl, StepOutcome
from hotshoe.worker.draft_costs import MeasuredCosts

MAX_DRAFT_TOKENS = 8


class FedCosts:
    """Seconds by number of tokens; a draft takes ``draft_s`` a place, and a token that waited
    ``catch_up_s``.
    """

    def __init__(
        self, step: Callable[[float], float], draft_s: float = 0.0, catch_up_s: float = 0.0
    ) -> None:
        self.seconds_of = step
        self.catch_up_s = catch_up_s
        self.most_draft = draft_s * MAX_DRAFT_TOKENS
        self.draft_s = draft_s

    def base(self, num_reqs: int) -> float | None:
        return self.seconds_of(num_reqs)

    def step(self, num_reqs: int, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([self.seconds_of(float(one)) for one in num_tokens])

    def of_one(self) -> Sequence[float]:
        counts = range(MAX_DRAFT_TOKENS + 1)
        return [self.seconds_of(1 + count) + self.draft_s * count for count in counts]

    def draft(
        self, num_drafting: NDArray[np.int64], depth: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return np.where(num_drafting > 0, self.draft_s * depth, 0.0)

    def observe_step(self, num_reqs: int, num_tokens: int, seconds: float) -> None:
        pass

    def observe_draft(self, num_drafting: int, depth: int, seconds: float) -> None:
        pass

    def catch_up(self, num_tokens: int) -> float:
        return self.catch_up_s * num_tokens

    def observe_catch_up(
        self, num_drafting: int, depth: int, num_tokens: int, seconds: float
    ) -> None:
        pass


def memory_bound(num_tokens: float) -> float:
    """More tokens take hardly longer."""
    return 1.0 + 0.02 * num_tokens


def compute_bound(num_tokens: float) -> float:
    """Twice the tokens take twice as long."""
    return 0.1 * num_tokens


class Engine:
    """Requests that draft; the first drafts of each are right with its own chance."""

    def __init__(
        self,
        costs: FedCosts,
        chances: Sequence[float],
        *,
        max_batch_size: int | None = None,
    ) -> None:
        self.costs = costs
        self.chances = list(chances)
        self.random = np.random.default_rng(0)
        self.control = AdaptiveDraftControl(
            costs,
            max_num_seqs=len(chances),
            max_draft_tokens=MAX_DRAFT_TOKENS,
            max_batch_size=max_batch_size,
        )
        for row in range(len(chances)):
            self.control.start(row, f"request-{row}")
        self.truth = [0] * len(chances)  # the next token of each is one more
        self.drafts: list[list[int]] = [[] for _ in chances]
        self.time_s = 0.0
        self.num_tokens = 0

    def step(self) -> tuple[list[int], list[int]]:
        """Run a step; drafts that were verified in it, and those asked for the next."""
        verified = [len(one) for one in self.drafts]
        new = [self._kept(row) for row in range(len(self.chances))]
        seconds = self.costs.seconds_of(len(new) + sum(verified))
        self.time_s += seconds
        self.num_tokens += sum(map(len, new))
        rows = range(len(new))
        if self.control.rest(rows, new, seconds):
            assert not any(verified)
            return verified, verified
        outcome = StepOutcome(
            rows=rows,
            new_token_ids=new,
            num_drafted=verified,
            num_computed=[1 + count for count in verified],
            seconds=seconds,
        )
        asked = list(self.control.ask(outcome, [MAX_DRAFT_TOKENS] * len(new)))
        drafts = [self._draft(row, count) for row, count in enumerate(asked)]
        draft_s = self.costs.draft_s * max(asked)
        self.drafts = list(self.control.keep(drafts, draft_s))
        self.time_s += draft_s
        return verified, asked

    def run(self, num_steps: int) -> NDArray[np.float64]:
        """Mean number of verified drafts of each request."""
        counts = [self.step()[0] for _ in range(num_steps)]
        return np.array(counts[num_steps // 2 :]).mean(0)

    def _draft(self, row: int, count: int) -> list[int]:
        is_right = self.random.random(count) < self.chances[row]
        start = self.truth[row]
        return [start + at if right else -1 for at, right in enumerate(is_right)]

    def _kept(self, row: int) -> list[int]:
        start = self.truth[row]
        num_kept = 0
        for draft in self.drafts[row]:
            if draft != start + num_kept:
                break
            num_kept += 1
        self.truth[row] += num_kept + 1
        return list(range(start, self.truth[row]))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.time_s


def test_drafts_that_pay_are_verified() -> None:
    assert Engine(FedCosts(memory_bound), [0.95]).run(100)[0] > 7.0


def test_drafts_that_do_not_pay_cost_next_to_nothing() -> None:
    for costs in (FedCosts(memory_bound), FedCosts(compute_bound), FedCosts(memory_bound, 0.1)):
        engine = Engine(costs, [0.01] * 4)
        engine.run(50)
        engine.time_s = engine.num_tokens = 0
        engine.run(400)
        assert engine.tokens_per_s > 0.97 * 4 / costs.seconds_of(4)


def test_a_request_that_begins_to_repeat_itself_is_noticed() -> None:
    engine = Engine(FedCosts(memory_bound, 0.05), [0.0])
    assert engine.run(200)[0] < 0.1
    engine.chances[0] = 1.0
    assert engine.run(400)[0] > 4.0


def test_a_request_that_ceases_to_repeat_itself_is_left_alone() -> None:
    engine = Engine(FedCosts(compute_bound), [1.0])
    engine.chances[0] = 0.0
    engine.run(20)
    assert engine.run(100)[0] < 0.2


@pytest.mark.parametrize(("num_reqs", "pays"), [(1, True), (4, True), (64, False)])
def test_drafts_are_off_where_the_batch_alone_keeps_the_machine_busy(
    num_reqs: int, pays: bool
) -> None:
    costs = FedCosts(lambda num_tokens: max(1.0, 0.05 * num_tokens))
    mean = Engine(costs, [0.6] * num_reqs).run(60).mean()
    assert mean > 1.0 if pays else mean < 0.1


def test_the_request_that_copies_gets_the_drafts() -> None:
    costs = FedCosts(lambda num_tokens: 1.0 + 0.1 * num_tokens)
    means = Engine(costs, [0.1, 0.1, 0.97, 0.1, 0.1, 0.1]).run(200)
    assert means[2] > 4.0
    assert max(*means[:2], *means[3:]) < 0.5


def test_fewer_are_drafted_the_fewer_are_kept() -> None:
    costs = FedCosts(lambda num_tokens: 1.0 + 0.05 * num_tokens)
    means = [Engine(costs, [chance]).run(200)[0] for chance in (0.95, 0.7, 0.4)]
    assert means[0] > means[1] + 1.0 > means[2] + 2.0


def test_a_slow_drafter_is_asked_for_less() -> None:
    means = [Engine(FedCosts(memory_bound, one), [0.8]).run(200)[0] for one in (0.0, 0.2, 1.0)]
    assert means[0] > means[1] > means[2]
    assert means[2] < 0.1


def test_tokens_per_second_are_at_least_those_of_any_fixed_number() -> None:
    costs = FedCosts(lambda num_tokens: 1.0 + 0.06 * num_tokens, 0.02)
    for chance in (0.3, 0.6, 0.9):
        engine = Engine(costs, [chance])
        engine.run(800)
        best = max(
            sum(chance**place for place in range(count + 1))
            / (costs.seconds_of(1 + count) + 0.02 * count)
            for count in range(MAX_DRAFT_TOKENS + 1)
        )
        assert engine.tokens_per_s > 0.93 * best


def test_a_large_batch_can_be_excluded() -> None:
    assert Engine(FedCosts(memory_bound), [1.0] * 4, max_batch_size=4).run(20).min() > 4.0
    engine = Engine(FedCosts(memory_bound), [1.0] * 5, max_batch_size=4)
    assert engine.run(20).max() == 0.0
    assert engine.control.num_off == 5


def test_without_adaptation_all_that_may_be_used_is_asked_for() -> None:
    outcome = StepOutcome(
        rows=[3, 5], new_token_ids=[[1], []], num_drafted=[4, 0], num_computed=[5, 4], seconds=1.0
    )
    assert DraftControl().ask(outcome, [7, 0]) == [7, 0]
    limited = DraftControl(max_batch_size=1)
    assert limited.ask(outcome, [7, 0]) == [0, 0]
    assert limited.num_off == 1


def test_a_row_forgets_the_request_before() -> None:
    engine = Engine(FedCosts(lambda num_tokens: 1.0 + 0.3 * num_tokens), [0.0, 1.0])
    engine.run(100)
    engine.control.start(0, "another")
    engine.chances[0] = 1.0
    assert engine.run(30)[0] > 2.0


def replace_request(engine: Engine, number: int, chance: float) -> None:
    """Another request takes the row of the only one."""
    engine.control.finish([f"request-{number - 1}"])
    engine.drafts = [[]]
    engine.chances[0] = chance
    engine.control.start(0, f"request-{number}")


def speed_of_requests(engine: Engine, numbers: range, chance: float) -> float:
    """Tokens per second of several, one after the other."""
    engine.num_tokens, engine.time_s = 0, 0.0
    for number in numbers:
        replace_request(engine, number, chance)
        engine.run(60)
    return engine.tokens_per_s


def test_drafts_come_back_when_other_requests_come() -> None:
    costs = FedCosts(memory_bound, 0.05, catch_up_s=0.001)
    expected = speed_of_requests(Engine(costs, [0.0]), range(1, 31), 0.8)
    engine = Engine(costs, [0.0])
    plain = 1.0 / costs.seconds_of(1)
    assert speed_of_requests(engine, range(1, 31), 0.05) > 0.97 * plain
    speed_of_requests(engine, range(31, 41), 0.8)
    assert speed_of_requests(engine, range(41, 61), 0.8) > plain + 0.9 * (expected - plain)


def test_a_request_is_dormant_from_the_start_if_drafts_of_others_do_not_pay() -> None:
    engine = Engine(FedCosts(memory_bound, 0.1), [0.0])
    assert not any(engine.control.dormant([0]))
    for number in range(1, 9):
        replace_request(engine, number, 0.02)
        engine.run(60)
    replace_request(engine, 9, 0.9)
    assert all(engine.control.dormant([0]))
    engine.run(600)
    assert not any(engine.control.dormant([0]))


def test_what_has_been_put_off_for_a_long_prompt_is_worth_no_look() -> None:
    for catch_up_s, is_watched in ((0.0, True), (1.0, False)):
        engine = Engine(FedCosts(memory_bound, 0.1, catch_up_s), [0.0])
        for number in range(1, 9):
            replace_request(engine, number, 0.0)
            engine.run(60)
        replace_request(engine, 9, 0.0)
        prompt = StepOutcome(
            rows=range(1), new_token_ids=[[]], num_drafted=[0], num_computed=[500], seconds=1.0
        )
        engine.control.keep([[] for _ in engine.control.ask(prompt, [0])], 0.0)
        asked = [engine.step()[1][0] for _ in range(200)]
        assert any(asked) is is_watched


def test_drafts_of_a_request_that_fails_say_nothing_about_those_of_others() -> None:
    engine = Engine(FedCosts(memory_bound), [0.99, 0.99])
    for number in range(100):
        engine.run(4)
        failed = StepOutcome(
            rows=range(2),
            new_token_ids=[[], []],
            num_drafted=[MAX_DRAFT_TOKENS, 1],
            num_computed=[1 + MAX_DRAFT_TOKENS, 2],
            seconds=1.0,
        )
        engine.control.ask(failed, [0, 0])
        engine.drafts = [[], []]
        for row in (0, 1):
            engine.control.start(row, f"another-{number}-{row}")
    assert engine.step()[1] == [MAX_DRAFT_TOKENS] * 2


def test_a_preempted_request_goes_on_as_it_was() -> None:
    engine = Engine(FedCosts(lambda num_tokens: 1.0 + 0.3 * num_tokens), [0.0, 1.0])
    engine.run(100)
    for row in (0, 1):
        engine.control.start(row, f"request-{row}")
    asked = np.array([engine.step()[1] for _ in range(4)])
    assert asked[0, 1] > 2
    assert asked[0, 0] <= 4  # looked at, at most
    assert engine.run(20)[0] < 0.5


def test_a_disturbed_measurement_hardly_counts() -> None:
    costs = MeasuredCosts(8)
    for seconds in (0.010, 0.030, 0.011, *[0.010] * 8, 0.500):
        costs.observe_step(1, 1, seconds)
    assert costs.base(1) == pytest.approx(0.010, rel=0.1)


def test_costs_stay_comparable_when_the_machine_gets_slower() -> None:
    costs = MeasuredCosts(8)
    for _ in range(20):
        costs.observe_step(1, 1, 1.0)
        costs.observe_step(1, 3, 1.1)
        costs.observe_draft(1, 2, 0.1)
    for _ in range(50):  # without a step of a single token
        costs.observe_step(1, 3, 1.65)
        costs.observe_draft(1, 2, 0.15)
    base = costs.base(1)
    assert base == pytest.approx(1.5, rel=0.1)
    assert costs.step(1, np.array([3.0])) / base == pytest.approx(1.1, rel=0.05)
    assert costs.draft(np.array([1]), np.array([2])) / base == pytest.approx(0.1, rel=0.1)


def test_first_runs_of_a_number_of_tokens_do_not_make_it_look_expensive() -> None:
    costs = MeasuredCosts(8)
    for _ in range(4):
        costs.observe_step(1, 1, 1.0)
        costs.observe_step(1, 5, 1.2)
    costs.observe_step(1, 3, 3.0)
    costs.observe_step(1, 3, 4.0)
    assert costs.step(1, np.array([3.0])).tolist() == pytest.approx([1.1], rel=0.02)


def test_what_a_step_takes_is_unknown_while_its_first_runs_are_all_that_is_known() -> None:
    costs = MeasuredCosts(8)
    known = []
    for seconds in (0.02, 0.02, 0.01, 0.01):
        costs.observe_step(1, 1, seconds)
        known.append(costs.base(1))
    assert known == [None, None, None, 0.01]


def test_costs_between_those_measured_are_interpolated() -> None:
    costs = MeasuredCosts(8)
    assert costs.base(2) is None
    costs.observe_step(2, 200, 2.0)
    assert costs.base(2) is None  # a prompt says nothing about single tokens
    for _ in range(4):
        costs.observe_step(2, 2, 1.0)
    costs.observe_step(2, 10, 1.4)
    assert costs.base(2) == 1.0
    assert costs.step(2, np.array([2.0, 6.0, 10.0])).tolist() == pytest.approx([1.0, 1.2, 1.4])


def test_what_more_tokens_cost_is_known_from_other_steps() -> None:
    costs = MeasuredCosts(8)
    for _ in range(4):
        costs.observe_step(40, 40, 4.0)
    costs.observe_step(16, 80, 7.0)
    assert costs.step(40, np.array([40.0, 60.0, 80.0])).tolist() == pytest.approx([4.0, 5.5, 7.0])


def test_times_of_drafting_go_by_depth() -> None:
    costs = MeasuredCosts(8)
    costs.observe_draft(0, 0, 1.0)
    costs.observe_draft(1, 2, 3.0)
    for _ in range(16):
        costs.observe_draft(1, 4, 5.0)
    seconds = costs.draft(np.array([0, 1, 1, 1, 9]), np.array([0, 2, 3, 8, 4]))
    assert seconds.tolist() == pytest.approx([1.0, 3.0, 4.0, 9.0, 5.0])
    assert costs.most_draft == pytest.approx(9.0)
