"""How many drafts each request gets: as many as may be, or as many as pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hotshoe.worker.draft_costs import DraftCosts

# B=num_reqs K=max_draft_tokens N=B*K

_MIN_GAIN = 1.03  # over no drafts; what isn't measured, such as choosing, has to be earned too
_PROBE_SHARE = 0.01  # of the time
_MAX_PROBE_STEPS = 3.0  # steps' time that can be saved up for probes
_NUM_PROBED = 2
_MIN_PROBE_GAIN = 1.02  # if drafts cost nothing
_MAX_CHOICES_WITH_DRAFTS = 32
_MEMORY = 0.98  # of what a request's last drafts showed, after one more
_SHARED_MEMORY = 0.99
_FIRST_GUESS = 0.7
_GUESS_WEIGHT = 10.0  # in verified drafts
_GUESS_OF_OWN = 2.0  # drafts kept, as many as expected
_MOST = 0.98
_MIN_OFFERED = 0.05
_MAX_WEIGHT = 1e6
_NUM_HELD = 4  # steps that a choice is for: choosing takes time as well
_CHEAP = 0.01  # of a step: what doesn't matter
_MAX_REST_STEPS = 64
_NUM_UNTIL_DORMANT = 16  # choices without drafts
_MAX_ENTRIES = 32  # per request, that a drafter keeps up with at each step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What is known when drafts are asked for.

    Attributes:
        rows: of the batch, one for each request of the step.
        new_token_ids: that they got; none while a prompt is being computed.
        num_drafted: drafts of each that were verified.
        num_computed: tokens of each that were computed, refused drafts among them.
        seconds: that it took, drafting left out.
    """

    rows: Sequence[int]
    new_token_ids: Sequence[Sequence[int]]
    num_drafted: Sequence[int]
    num_computed: Sequence[int]
    seconds: float


class DraftControl:
    """Asks for as many drafts as may be used.

    Args:
        max_batch_size: most requests in a step for which there are drafts; None = any number.
    """

    def __init__(self, max_batch_size: int | None = None) -> None:
        self._max_batch_size = max_batch_size
        self.num_off = 0
        """Requests of the last step that might have used drafts, but got none."""

    def start(self, row: int, request_id: str) -> None:
        """A request takes a row, for the first time or after it was preempted."""

    def finish(self, request_ids: Sequence[str]) -> None:
        """Requests have ended; what was known of them is forgotten."""

    def rest(
        self, rows: Sequence[int], new_token_ids: Sequence[Sequence[int]], seconds: float
    ) -> bool:
        """Whether nothing is to be asked for after a step without drafts, said without thinking
        about it. Else ``ask``.

        Args:
            rows: as in ``StepOutcome``, as are the others.
        """
        return False

    def ask(self, outcome: StepOutcome, room: Sequence[int]) -> Sequence[int]:
        """How many drafts to ask for.

        Args:
            outcome: of the step that just ran.
            room: the most that each request can use.
        """
        self.num_off = 0
        if self._max_batch_size is None or len(outcome.rows) <= self._max_batch_size:
            return room
        self.num_off = sum(one > 0 for one in room)
        return [0] * len(room)

    def dormant(self, rows: Sequence[int]) -> Sequence[bool]:
        """``ProposeInput.is_dormant`` for the requests on some rows."""
        return ()

    def keep(self, drafts: Sequence[list[int]], seconds: float) -> Sequence[list[int]]:
        """The drafts that are to be verified.

        Args:
            drafts: per request, what came of asking.
            seconds: that it took.
        """
        return drafts


class AdaptiveDraftControl(DraftControl):
    """Asks for the drafts that bring the most tokens per second.

    After each step it has an estimate of the next draft's acceptance for every request and place in
    a draft, and of the time of a step by number of requests and tokens. The product of the
    acceptances up to a place is what a draft there adds to the expected number of tokens. Drafts of
    all requests are put in order of that, and the beginning of this list with the most expected
    tokens per second is asked for: a draft that is likely to be kept displaces one that isn't, and
    with many requests, where every further token takes time, few or none are left.

    A request that gets no drafts is watched: some are asked for all the same, aren't verified, and
    are compared with the tokens that come. Drafts that look as if they failed to pay by little are
    verified now and then, to see what they cost. While nothing is drafted all this takes 1% of the
    time at most: between two looks the control rests.

    A request is dormant while it gets no drafts and isn't likely to. One that is new is so from the
    start if drafts of the others don't pay.

    Measured times decide, so two runs may differ in the number of drafts. They don't differ in
    tokens as long as a draft is kept only if it is the token that is drawn without it; by other
    rules of acceptance they do.

    Args:
        costs: of steps and of drafting.
        max_num_seqs: rows of the batch.
        max_draft_tokens: most drafts per request and step.
        max_batch_size: as in ``DraftControl``.
        can_compare: whether drafts are kept about as often as they equal the tokens that come
            without them. If not, no request is watched.
    """

    def __init__(
        self,
        costs: DraftCosts,
        *,
        max_num_seqs: int,
        max_draft_tokens: int,
        max_batch_size: int | None = None,
        can_compare: bool = True,
    ) -> None:
        super().__init__(max_batch_size)
        self._costs = costs
        self._can_compare = can_compare
        self._max_draft_tokens = max_draft_tokens
        self._places = np.arange(max_draft_tokens)
        self._shared = _Acceptance(max_draft_tokens, _SHARED_MEMORY)
        self._requests: dict[str, _Request] = {}
        self._on_rows: dict[int, _Request] = {}
        # expected tokens from a draft at each place, but for rows that are stale
        self._reach = np.zeros((max_num_seqs, max_draft_tokens))
        self._stale: set[int] = set()
        self._offered = np.ones(max_num_seqs)  # share of the drafts asked for that came
        self._watched: dict[int, tuple[list[int], list[int]]] = {}
        self._saved_s = 0.0
        self._num_choices_with_drafts = 0
        self._is_changed = True
        self._num_held = 0
        self._num_resting = 0
        self._is_kept_as_before = False
        self._chosen_room: Sequence[int] = ()
        self._own_time_s = 0.0
        self._look_s = 0.0  # what the next look will take
        self._step_time_s = 0.0
        self._rows: Sequence[int] = ()
        self._asked: Sequence[int] = ()
        self._used: Sequence[int] = ()
        self._num_entries = 0

    def start(self, row: int, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            request = _Request(_Acceptance(self._max_draft_tokens, _MEMORY))
            request.is_dormant = not self._pays_for_all()
            self._requests[request_id] = request
        request.num_waiting = 0
        self._on_rows[row] = request
        self._stale.add(row)
        self._offered[row] = request.offered
        self._watched.pop(row, None)
        self._is_changed = True

    def finish(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def dormant(self, rows: Sequence[int]) -> Sequence[bool]:
        return [self._on_rows[row].is_dormant for row in rows]

    def rest(
        self, rows: Sequence[int], new_token_ids: Sequence[Sequence[int]], seconds: float
    ) -> bool:
        if self._num_resting <= 0 or self._is_changed or rows != self._rows:
            return False
        for row, token_ids in zip(rows, new_token_ids, strict=True):
            if not token_ids:
                return False
            self._on_rows[row].num_waiting += 1
        if self._watched and self._compare_all(rows, new_token_ids):
            self._num_resting = 0
        self._num_resting -= 1
        self._saved_s += _PROBE_SHARE * seconds
        return True

    def ask(self, outcome: StepOutcome, room: Sequence[int]) -> Sequence[int]:
        started = perf_counter()
        room = super().ask(outcome, room)
        self._is_kept_as_before = self._is_held(outcome, room)
        if self._is_kept_as_before:
            return self._asked
        self._rows = outcome.rows
        self._chosen_room = room
        self._used = self._asked = [0] * len(room)
        self._step_time_s = outcome.seconds
        most_s = _MAX_PROBE_STEPS * outcome.seconds
        self._saved_s = min(self._saved_s + _PROBE_SHARE * outcome.seconds, most_s)
        self._learn(outcome)
        places = [place for place, one in enumerate(room) if one]
        if places:
            self._choose([self._rows[place] for place in places], places, room)
        num_off = sum(not self._used[place] for place in places)
        self.num_off += num_off
        if num_off and self._can_compare:
            self._watch(room)
        self._note(outcome)
        self._own_time_s = perf_counter() - started
        return self._asked

    def _is_held(self, outcome: StepOutcome, room: Sequence[int]) -> bool:
        """Whether to go on as before: all requests draft, and they are the same."""
        if self._num_held == 0 or room != self._chosen_room or outcome.rows != self._rows:
            self._num_held = _NUM_HELD - 1
            return False
        self._num_held -= 1
        if self._is_changed or not all(self._used):
            return False
        self._learn(outcome)
        return True

    # -- what came of the last drafts ---------------------------------------------------------

    def _learn(self, outcome: StepOutcome) -> None:
        num_reqs, num_tokens = len(outcome.rows), sum(outcome.num_computed)
        self._costs.observe_step(num_reqs, num_tokens, outcome.seconds)
        if num_tokens <= num_reqs:
            self._num_choices_with_drafts = 0
        else:
            for row, num_drafted, token_ids in zip(
                outcome.rows, outcome.num_drafted, outcome.new_token_ids, strict=True
            ):
                if num_drafted and token_ids:  # none if it failed, which tells nothing of drafts
                    self._watched.pop(row, None)
                    self._count(row, num_drafted, len(token_ids) - 1)
        if self._watched:
            self._compare_all(outcome.rows, outcome.new_token_ids)

    def _compare_all(self, rows: Sequence[int], new_token_ids: Sequence[Sequence[int]]) -> bool:
        """Compare drafts of watched requests with what came; whether some have turned out right."""
        were_right = False
        for row, token_ids in zip(rows, new_token_ids, strict=True):
            if row in self._watched and token_ids:
                were_right |= self._compare(row, token_ids)
        return were_right

    def _compare(self, row: int, token_ids: Sequence[int]) -> bool:
        drafts, seen = self._watched[row]
        seen += token_ids
        num_kept = 0
        for draft, token_id in zip(drafts, seen, strict=False):
            if draft != token_id:
                break
            num_kept += 1
        if num_kept < min(len(drafts), len(seen)) or len(seen) >= len(drafts):
            del self._watched[row]
            self._count(row, len(drafts), num_kept)
            return num_kept > 0
        return False

    def _count(self, row: int, num_drafts: int, num_kept: int) -> None:
        own = self._on_rows[row].acceptance
        own.add(num_drafts, num_kept)
        self._shared.add(num_drafts, num_kept)
        self._stale.add(row)

    def _note(self, outcome: StepOutcome) -> None:
        """What each request's drafts and tokens are up to now."""
        self._num_entries = 0
        for row, used, asked, num_computed, num_drafted, token_ids in zip(
            self._rows,
            self._used,
            self._asked,
            outcome.num_computed,
            outcome.num_drafted,
            outcome.new_token_ids,
            strict=True,
        ):
            request = self._on_rows[row]
            request.num_waiting += num_computed - max(num_drafted + 1 - len(token_ids), 0)
            if used:
                request.num_off = 0
                request.is_dormant = False
            elif token_ids:
                request.num_off += 1
                request.is_dormant |= request.num_off >= _NUM_UNTIL_DORMANT
            if asked or not request.is_dormant:
                self._num_entries += request.num_waiting
                request.num_waiting = 0

    # -- how many drafts next -------------------------------------------------------------------

    def _choose(self, rows: list[int], places: list[int], room: Sequence[int]) -> None:
        """Use the drafts of these rows that are worth their time."""
        num_reqs = len(rows)
        base = self._costs.base(num_reqs)
        self._is_changed = base is None
        if base is None:
            return
        if num_reqs == 1:
            self._choose_for_one(rows[0], places[0], room)
            return
        draft_s = None
        if self._costs.most_draft > _CHEAP * base:
            draft_s = self._costs.draft
            nobody = np.zeros(1, np.int64)
            base += float(draft_s(nobody, nobody)[0])
        request, gains, place = self._ordered(rows, [room[at] for at in places])
        share = self._offered[rows][request]
        num_tokens, gains = share.cumsum() + num_reqs, gains * share
        depth, num_drafting = np.maximum.accumulate(place + 1), (place == 0).cumsum()
        tokens = np.add.accumulate(gains) + num_reqs
        seconds = self._costs.step(num_reqs, num_tokens)
        if draft_s is not None:
            seconds = seconds + draft_s(num_drafting, depth)
        best = int((tokens / seconds).argmax())
        if self._is_worthwhile(num_reqs, base, float(tokens[best]), float(seconds[best])):
            self._num_choices_with_drafts += 1
            used = [0] * len(room)
            for index in request[: best + 1].tolist():
                used[places[index]] += 1
            self._used = self._asked = used

    def _choose_for_one(self, row: int, place: int, room: Sequence[int]) -> None:
        """As ``_choose`` for a single request, where time spent on choosing shows: without arrays,
        which take longer than the few numbers in them.
        """
        seconds = self._costs.of_one()
        chances = self._shared.chances_of(self._on_rows[row].acceptance)
        tokens = reach = 1.0
        best, best_rate, best_tokens = 1, 0.0, 0.0
        for num_drafts, chance in enumerate(chances[: room[place]], 1):
            reach *= chance
            tokens += reach
            rate = tokens / seconds[num_drafts]
            if rate > best_rate:
                best, best_rate, best_tokens = num_drafts, rate, tokens
        if self._is_worthwhile(1, seconds[0], best_tokens, seconds[best]):
            self._num_choices_with_drafts += 1
            used = [0] * len(room)
            used[place] = best
            self._used = self._asked = used

    def _gains_of(self, row: int, most: int) -> NDArray[np.float64]:
        """Expected tokens from a draft of one request at each place."""
        chances = self._shared.chances_of(self._on_rows[row].acceptance)
        return np.array(list(accumulate(chances[:most], mul)))

    def _ordered(
        self, rows: Sequence[int], mosts: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """All drafts that may be used, the likeliest first: whose they are as an index of ``rows``,
        expected tokens, and place.
        """
        for row in self._stale.intersection(rows):
            self._reach[row] = self._gains_of(row, self._max_draft_tokens)
        self._stale.difference_update(rows)
        reach = self._reach[rows].T.ravel()  # of equal ones, earlier places come first
        num_drafts = len(reach)
        if min(mosts) < self._max_draft_tokens:
            reach[(self._places[:, None] >= np.array(mosts)).ravel()] = 0.0
            num_drafts = sum(mosts)
        order = np.argsort(-reach, kind="stable")[:num_drafts]
        place, request = np.divmod(order, len(rows))
        return request, reach[order], place

    def _is_worthwhile(self, num_reqs: int, base_s: float, tokens: float, seconds: float) -> bool:
        rate = num_reqs / base_s
        if tokens / seconds < rate * _MIN_GAIN:
            num_waiting = sum(self._on_rows[row].num_waiting for row in self._rows)
            loss_s = seconds - tokens / rate + self._costs.catch_up(num_waiting)
            if loss_s > self._saved_s or tokens < _MIN_PROBE_GAIN * num_reqs:
                return False
            self._saved_s -= loss_s
            self._num_held = 0
            return True
        # now and then, see what a step costs without
        return self._num_choices_with_drafts < _MAX_CHOICES_WITH_DRAFTS

    def _pays_for_all(self) -> bool:
        """Whether drafts pay for a request of which nothing is known; True if that isn't known."""
        num_reqs = max(len(self._rows), 1)
        base = self._costs.base(num_reqs)
        if base is None:
            return True
        places = self._places + 1
        tokens = num_reqs * (1.0 + np.cumprod(self._shared.chances()))
        num_tokens = (num_reqs * (places + 1)).astype(np.float64)
        seconds = self._costs.step(num_reqs, num_tokens)
        seconds = seconds + self._costs.draft(np.full(len(places), num_reqs), places)
        return bool((tokens / seconds).max() >= _MIN_GAIN * num_reqs / base)

    def _watch(self, room: Sequence[int]) -> None:
        """Ask for drafts that aren't to be used, where that is affordable."""
        requests = [self._on_rows[row] for row in self._rows]
        found = [
            place
            for place, (row, used, most) in enumerate(
                zip(self._rows, self._used, room, strict=True)
            )
            if most and not used and row not in self._watched
        ]
        found.sort(key=lambda place: requests[place].num_waiting)
        self._look_s = 0.0
        for chosen in (found, found[:1]):
            asked = list(self._used)
            for place in chosen:
                asked[place] = min(room[place], _NUM_PROBED)
            seconds = self._watching_s(asked, sum(requests[one].num_waiting for one in chosen))
            if chosen and seconds <= max(self._saved_s, 0.0):
                if any(self._used):
                    self._saved_s -= seconds
                self._asked = asked
                return
            self._look_s = seconds

    def _watching_s(self, asked: Sequence[int], num_waiting: int) -> float:
        """What more drafts than those that are used take."""
        if self._costs.most_draft <= 0.0:
            return 0.0
        drafting = self._costs.draft(
            np.array([sum(map(bool, one)) for one in (self._used, asked)]),
            np.array([max(self._used), max(asked)]),
        )
        more_s = float(drafting[1] - drafting[0])
        return max(more_s, 0.0) + self._costs.catch_up(num_waiting)

    def keep(self, drafts: Sequence[list[int]], seconds: float) -> Sequence[list[int]]:
        if self._is_kept_as_before:
            return drafts
        started = perf_counter()
        asked = self._asked
        depth, num_drafting = max(asked, default=0), sum(map(bool, asked))
        if self._num_entries > _MAX_ENTRIES * len(asked):
            self._costs.observe_catch_up(num_drafting, depth, self._num_entries, seconds)
        else:
            self._costs.observe_draft(num_drafting, depth, seconds)
        if depth:
            drafts = self._kept(drafts)
        self._num_resting = 0
        if any(self._chosen_room) and not any(self._used):
            self._rest_after(seconds + self._own_time_s + perf_counter() - started)
        return drafts

    def _rest_after(self, seconds: float) -> None:
        """Nothing is used, but it took time to find that out: until there's time to look again."""
        least_s = -_MAX_PROBE_STEPS * self._step_time_s
        self._saved_s = max(self._saved_s - seconds, least_s)
        missing_s = seconds + self._look_s - self._saved_s
        num_steps = max(int(missing_s / (_PROBE_SHARE * self._step_time_s)), _NUM_HELD)
        self._num_resting = min(num_steps, _MAX_REST_STEPS)

    def _kept(self, drafts: Sequence[list[int]]) -> Sequence[list[int]]:
        kept = []
        for row, one, num_asked, num_used in zip(
            self._rows, drafts, self._asked, self._used, strict=True
        ):
            if num_asked:
                share = max(len(one) / num_asked, _MIN_OFFERED)
                request = self._on_rows[row]
                request.offered = request.offered * _MEMORY + share * (1.0 - _MEMORY)
                self._offered[row] = request.offered
                if one and not num_used:
                    self._watched[row] = one, []
            kept.append(one if num_used else [])
        return kept


@dataclass(slots=True)
class _Request:
    """What is known of a request.

    Attributes:
        offered: share of the drafts asked for that came.
        num_waiting: tokens computed since the drafter was last to keep up with them.
        num_off: choices without drafts since the last with some.
    """

    acceptance: _Acceptance
    offered: float = 1.0
    num_waiting: int = 0
    num_off: int = 0
    is_dormant: bool = False


class _Acceptance:
    """By place in a draft: how many tokens were verified there because all before were kept, and
    how many of them were kept, too.

    Args:
        max_draft_tokens: number of places.
        memory: what a draft counts for after one more.
    """

    __slots__ = ("_growth", "_weight", "kept", "verified")

    def __init__(self, max_draft_tokens: int, memory: float) -> None:
        # later drafts count more, which is the same as that earlier ones count less
        self._growth = 1.0 / memory
        self._weight = 1.0
        self.verified = [0.0] * max_draft_tokens
        self.kept = [0.0] * max_draft_tokens

    def add(self, num_drafts: int, num_kept: int) -> None:
        """Of some drafts, the first were kept."""
        weight = self._weight = self._weight * self._growth
        for place in range(num_kept):
            self.verified[place] += weight
            self.kept[place] += weight
        if num_kept < num_drafts:
            self.verified[num_kept] += weight
        if weight > _MAX_WEIGHT:
            self.verified = [count / weight for count in self.verified]
            self.kept = [count / weight for count in self.kept]
            self._weight = 1.0

    def chances(self) -> list[float]:
        """That a draft is kept if those before it are, by place."""
        weight = self._weight
        guess = _FIRST_GUESS * weight
        return [
            (kept + guess) / (verified + weight)
            for kept, verified in zip(self.kept, self.verified, strict=True)
        ]

    def chances_of(self, own: _Acceptance) -> list[float]:
        """The same for one request. Where it has shown little, it is taken to be as much better or
        worse than others as it is elsewhere.
        """
        shared = self.chances()
        weight = own._weight
        expected = sum(map(mul, own.verified, shared))
        guess = _GUESS_OF_OWN * weight
        factor = (sum(own.kept) + guess) / (expected + guess)
        weight *= _GUESS_WEIGHT
        return [
            (kept + weight * min(factor * chance, _MOST)) / (verified + weight)
            for kept, verified, chance in zip(own.kept, own.verified, shared, strict=True)
        ]
