"""Acceptance rules: which drafts ``TokenSampler`` keeps, and how tokens are distributed then."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotshoe.api import NewRequest, Sampler, SamplerContext, SamplingParams
from hotshoe.testing.distributions import Filter, assert_follows, filtered_probabilities
from hotshoe.testing.no_syncs import PretendGpu
from hotshoe.worker.draft_control import AdaptiveDraftControl, StepOutcome
from hotshoe.worker.sampling import (
    AcceptanceRule,
    Leviathan,
    SamplingStep,
    TokenSampler,
    Typical,
)
from hotshoe_native.options import NativeOptions
from hotshoe_samplers import cpu
from unit.sampling_harness import CPU, standard_sampler
from unit.test_draft_control import FedCosts, compute_bound

VOCAB_SIZE = 16
NUM_DRAFTS = 3
NUMBERS = np.random.default_rng(11)
LOGITS = (NUMBERS.normal(size=VOCAB_SIZE) * 1.5).astype(np.float32)
DRAFTER = (LOGITS + 0.7 * NUMBERS.normal(size=VOCAB_SIZE)).astype(np.float32)
TYPICAL = Typical(epsilon=0.09, delta=0.3)
FILTERED = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.02)
EACH_TEMPERATURE = pytest.mark.parametrize("temperature", [0.7, 1.0])


@dataclass
class Round:
    """One step: drafts, and the tokens that came of them, by request."""

    drafts: list[list[int]]
    new: list[list[int]]

    @property
    def num_accepted(self) -> int:
        return sum(len(tokens) - 1 for tokens in self.new)


def cpu_sampler() -> Sampler:
    context = SamplerContext(device=CPU, vocab_size=VOCAB_SIZE)
    return cpu.build(NativeOptions(num_threads=1), context)


class Requests:
    """Requests whose target has the same logits at every position.

    Args:
        params: of each.
        rule: None = the default.
        numbers: of the requests, which seeds go by; None = 0 and on.
        gpu: that is pretended.
        sampler: None = ``standard``.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        rule: AcceptanceRule | None,
        numbers: Sequence[int] | None = None,
        gpu: PretendGpu | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.gpu = gpu
        self.rows = list(range(len(params)))
        self.tokens: list[list[int]] = [[] for _ in params]
        with gpu or nullcontext():
            self.sampler = TokenSampler(
                sampler=sampler or standard_sampler(),
                max_num_seqs=len(params),
                vocab_size=VOCAB_SIZE,
                device=gpu.device if gpu else CPU,
                streams=gpu.streams if gpu else None,
                acceptance=rule,
            )
            for row, one in enumerate(params):
                seed = numbers[row] if numbers else row
                self.sampler.add_row(row, NewRequest(f"r{row}", row, [0], one, seed, 0, 0, ()))

    def drawn(self, drafter: NDArray[np.float32] = DRAFTER) -> list[list[int]]:
        """Drafts from a drafter's distribution."""
        draws = self.sampler.draft_draws(self.rows, self._num_tokens())
        requests = np.repeat(self.rows, NUM_DRAFTS).tolist()
        places = list(range(NUM_DRAFTS)) * len(self.rows)
        logits = self._put(torch.from_numpy(np.tile(drafter, (len(requests), 1))))
        if draws is None:  # greedy, or a rule that judges the most likely tokens
            return [[int(drafter.argmax())] * NUM_DRAFTS for _ in self.rows]
        with self.gpu or nullcontext():
            drafts = draws.draw(logits, requests, places)
        return drafts.as_subclass(Tensor).view(-1, NUM_DRAFTS).tolist()

    def verify(
        self, drafts: list[list[int]], logits: NDArray[np.float32] = LOGITS
    ) -> list[list[int]]:
        """New tokens of each request."""
        num_rows = sum(len(one) + 1 for one in drafts)
        step = SamplingStep(
            rows=self.rows,
            request_ids=[f"r{row}" for row in self.rows],
            draft_token_ids=drafts,
            logits=self._put(torch.from_numpy(np.tile(logits, (num_rows, 1)))),
            token_ids=np.zeros((len(self.rows), 1), np.int32),
            num_tokens=self._num_tokens(),
            num_prompt_tokens=np.ones(len(self.rows), np.int64),
        )
        with self.gpu or nullcontext():
            new = self.sampler.sample(step).token_ids
        for tokens, more in zip(self.tokens, new, strict=True):
            tokens += more
        return new

    def run(self, num_rounds: int) -> list[Round]:
        rounds = []
        for _ in range(num_rounds):
            drafts = self.drawn()
            rounds.append(Round(drafts, self.verify(drafts)))
        return rounds

    def _num_tokens(self) -> NDArray[np.int64]:
        return np.array([1 + len(tokens) for tokens in self.tokens])

    def _put(self, tensor: Tensor) -> Tensor:
        return self.gpu.put(tensor) if self.gpu else tensor


def expected(params: SamplingParams, logits: NDArray[np.float32] = LOGITS) -> NDArray[np.float64]:
    chosen = Filter(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
    )
    edited = logits.astype(np.float64)
    for token_id, bias in (params.logit_bias or {}).items():
        edited[token_id] += bias
    if params.allowed_token_ids is not None:
        forbidden = np.setdiff1d(np.arange(VOCAB_SIZE), params.allowed_token_ids)
        edited[forbidden] = -np.inf
    return filtered_probabilities(edited.astype(np.float32), chosen)


def check_distribution(params: SamplingParams, num_tokens: int) -> list[Round]:
    """Single tokens, and pairs of neighbours, of many requests."""
    num_reqs = 250
    requests = Requests([params] * num_reqs, Leviathan())
    rounds: list[Round] = []
    while sum(map(len, requests.tokens)) < num_tokens:
        rounds += requests.run(1)
    probabilities = expected(params)
    assert_follows([token for tokens in requests.tokens for token in tokens], probabilities)
    pairs = [
        first * VOCAB_SIZE + second
        for tokens in requests.tokens
        for first, second in zip(tokens[::2], tokens[1::2], strict=False)
    ]
    assert_follows(pairs, np.outer(probabilities, probabilities).ravel())
    return rounds


KINDS = {
    "plain": SamplingParams(temperature=1.0),
    "cooler": SamplingParams(temperature=0.7),
    "filtered": FILTERED,
    "edited": SamplingParams(
        temperature=1.0, logit_bias={3: 2.0}, allowed_token_ids=tuple(range(12))
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_thousand_tokens_follow_the_target_with_rejection_sampling(kind: str) -> None:
    rounds = check_distribution(KINDS[kind], 100_000)
    assert sum(one.num_accepted for one in rounds) > 20_000


@EACH_TEMPERATURE
def test_rejection_sampling_keeps_as_many_first_drafts_as_the_distributions_share(
    temperature: float,
) -> None:
    params = SamplingParams(temperature=temperature)
    rounds = Requests([params] * 200, Leviathan()).run(30)
    shared = np.minimum(expected(params), expected(params, DRAFTER)).sum()
    kept = np.mean([len(tokens) > 1 for one in rounds for tokens in one.new])
    assert abs(kept - shared) < 4 * np.sqrt(shared * (1 - shared) / 6000)


@pytest.mark.parametrize("rule", [Leviathan(), TYPICAL])
def test_tokens_depend_on_the_seed_and_not_on_requests_beside_it(rule: AcceptanceRule) -> None:
    params = [FILTERED, SamplingParams(temperature=0), SamplingParams(temperature=1.3)]
    together, again = (Requests(params, rule) for _ in range(2))
    together.run(20)
    again.run(20)
    assert together.tokens == again.tokens
    for row in (0, 2):
        alone = Requests([params[row]], rule, [row])
        alone.run(20)
        assert alone.tokens[0] == together.tokens[row]
    others = Requests(params, rule, [7, 8, 9])
    others.run(20)
    assert others.tokens[0] != together.tokens[0]


@pytest.mark.parametrize("rule", [None, Leviathan(), TYPICAL])
def test_greedy_requests_get_the_most_likely_token(rule: AcceptanceRule | None) -> None:
    requests = Requests([SamplingParams(temperature=0), SamplingParams()], rule)
    requests.run(10)
    likely = int(LOGITS.argmax())
    second = int(LOGITS.argsort()[-2])
    assert set(requests.tokens[0]) == {likely}
    assert requests.verify([[likely, second, likely], []])[0] == [likely, likely]


@pytest.mark.parametrize("has_drawn_others", [False, True])
def test_rejection_sampling_leaves_drafts_that_were_not_drawn_to_the_seed(
    has_drawn_others: bool,
) -> None:
    rejecting, plain = (Requests([FILTERED] * 4, rule) for rule in (Leviathan(), None))
    likely = LOGITS.argsort()[::-1].tolist()
    for number in range(30):
        drafts = [[likely[(number + row + place) % 4] for place in range(3)] for row in range(4)]
        if has_drawn_others:  # and others took their places, as those of a grammar do
            for one, drawn in zip(drafts, rejecting.drawn(), strict=True):
                while any(map(int.__eq__, one, drawn)):
                    one[:] = [(token + 1) % VOCAB_SIZE for token in one]
        assert rejecting.verify(drafts) == plain.verify(drafts)
    assert max(map(len, plain.tokens)) > 30


def test_drafts_of_a_request_that_has_left_its_row_are_not_those_of_the_next_one() -> None:
    requests, plain = (Requests([FILTERED], rule) for rule in (Leviathan(), None))
    drafts = requests.drawn()
    request = NewRequest("r0", 0, [0], FILTERED, 0, 0, 0, ())
    requests.sampler.remove_row(0)
    requests.sampler.add_row(0, request)
    assert requests.verify(drafts) == plain.verify(drafts)


@pytest.mark.parametrize("params", [SamplingParams(), FILTERED])
@pytest.mark.parametrize("name", ["standard", "cpu"])
def test_what_drafts_were_drawn_from_outlives_the_logits_of_the_drafter(
    name: str, params: SamplingParams
) -> None:
    """As passes that are recorded write them to the same place each time."""
    told = []
    for is_overwritten in (False, True):
        sampler = standard_sampler() if name == "standard" else cpu_sampler()
        requests = Requests([params] * 50, Leviathan(), sampler=sampler)
        draws = requests.sampler.draft_draws(requests.rows, np.ones(50, np.int64))
        assert draws is not None
        logits = torch.from_numpy(np.tile(DRAFTER, (50, 1)))
        drafts = draws.draw(logits, requests.rows, [0] * 50).tolist()
        if is_overwritten:
            logits.fill_(0.5)
        told.append((drafts, requests.verify([[one] for one in drafts])))
    assert told[0] == told[1]


def reference_typical(
    probabilities: NDArray[np.float64], draft: int, epsilon: float, delta: float
) -> bool:
    """By the formula, one token after the other."""
    entropy = -sum(p * np.log(p) for p in probabilities.tolist() if p > 0)
    return bool(probabilities[draft] > min(epsilon, delta * np.exp(-entropy)))


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.3, 0.9), (1.0, 1.0), (0.01, 0.1)])
def test_typical_acceptance_is_the_formula_and_what_the_seed_draws(
    params: SamplingParams, epsilon: float, delta: float
) -> None:
    numbers = np.random.default_rng(3)
    rows = range(40)
    seen = set()
    for scale in (0.3, 1.0, 3.0):
        logits = (numbers.normal(size=VOCAB_SIZE) * scale).astype(np.float32)
        judged = Requests([params] * len(rows), Typical(epsilon=epsilon, delta=delta))
        plain = Requests([params] * len(rows), None)
        drafts = [[token] for token in numbers.integers(0, VOCAB_SIZE, len(rows)).tolist()]
        new = judged.verify(drafts, logits)
        drawn = plain.verify([[] for _ in rows], logits)
        probabilities = expected(params, logits)
        for [draft], tokens, [token] in zip(drafts, new, drawn, strict=True):
            is_typical = reference_typical(probabilities, draft, epsilon, delta)
            assert tokens[0] == (draft if is_typical else token)
            assert (len(tokens) == 2) == (is_typical or draft == token)
            seen.add(is_typical)
    assert seen == {True, False}


@pytest.mark.parametrize("rule", [Leviathan(), TYPICAL])
def test_forbidden_tokens_are_not_kept(rule: AcceptanceRule) -> None:
    params = SamplingParams(allowed_token_ids=(1, 2, 3))
    requests = Requests([params] * 20, rule)
    requests.run(20)
    assert {token for tokens in requests.tokens for token in tokens} == {1, 2, 3}


@pytest.mark.parametrize("rule", [Leviathan(), TYPICAL])
def test_a_gpu_is_not_waited_for_and_gives_the_tokens_of_the_cpu(rule: AcceptanceRule) -> None:
    params: list[Any] = [FILTERED, SamplingParams(temperature=0), SamplingParams()]
    here, there = Requests(params, rule), Requests(params, rule, gpu=PretendGpu())
    assert here.run(12) == there.run(12)
    assert max(map(len, here.tokens)) > 15


@pytest.mark.parametrize("can_compare", [True, False])
def test_drafts_that_are_not_verified_are_judged_only_where_comparing_tells(
    can_compare: bool,
) -> None:
    control = AdaptiveDraftControl(
        FedCosts(compute_bound), max_num_seqs=1, max_draft_tokens=4, can_compare=can_compare
    )
    control.start(0, "r0")
    num_drafted = num_watched = 0
    for _ in range(300):
        seconds = compute_bound(1 + num_drafted)
        if not num_drafted and control.rest([0], [[7]], seconds):
            continue
        outcome = StepOutcome(
            rows=[0],
            new_token_ids=[[7]],
            num_drafted=[num_drafted],
            num_computed=[1 + num_drafted],
            seconds=seconds,
        )
        [asked] = control.ask(outcome, [4])
        [kept] = control.keep([[1] * asked], 0.0)
        num_watched += bool(asked) and not kept
        num_drafted = len(kept)
    assert (num_watched > 0) is can_compare
