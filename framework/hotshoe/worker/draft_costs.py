"""What steps and drafts cost, from those that were run."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_NUM_COLD = 2  # runs of a shape before it's recorded: they take longer than those that follow
_NUM_NEEDED = 4
_MAX_SURPRISE = 0.2  # of what was expected: a single disturbance counts for no more
_PACE_RATE = 0.4  # the machine may get slower or faster from one step to the next
_LEAST_RATE = 0.03
_LEAST_DRAFT_RATE = 0.1
_NUM_EXACT = 32  # up to so many tokens each count has a cost of its own: kernels work in tiles
_NUM_EXACT_REQS = 4
_NUM_BETWEEN_TABLES = 16


class DraftCosts(Protocol):
    """Seconds that steps and drafts take, as far as known."""

    def base(self, num_reqs: int) -> float | None:
        """Of a step with a token of each request; None while that isn't known."""

    def step(self, num_reqs: int, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of steps with these numbers of tokens over all requests, ascending. Called where ``base``
        is known.
        """

    def of_one(self) -> Sequence[float]:
        """Of a step of one request and of drafting for it, by number of drafts from 0 on. Called
        where ``base`` is known.
        """

    @property
    def most_draft(self) -> float:
        """Of drafting, at most."""

    def draft(
        self, num_drafting: NDArray[np.int64], depth: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Of drafting.

        Args:
            num_drafting: requests that may use drafts.
            depth: most drafts of one of them.
        """

    def catch_up(self, num_tokens: int) -> float:
        """Of computing what a drafter has put off for so many tokens."""

    def observe_step(self, num_reqs: int, num_tokens: int, seconds: float) -> None:
        """A step was run; drafting isn't part of its time."""

    def observe_draft(self, num_drafting: int, depth: int, seconds: float) -> None:
        """A proposer has proposed."""

    def observe_catch_up(
        self, num_drafting: int, depth: int, num_tokens: int, seconds: float
    ) -> None:
        """It had more tokens to compute for that than usual."""


class _Estimate:
    """What something takes at the machine's usual pace."""

    __slots__ = ("num_seen", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_seen = 0

    def add(self, seconds: float, least_rate: float) -> float:
        """Take in a value; the first ones by the least of them. Returns by how much it's more than
        was expected, as a share of that.
        """
        self.num_seen = num_seen = self.num_seen + 1
        if num_seen <= _NUM_COLD + 1:
            self.seconds = seconds if num_seen == 1 else min(seconds, self.seconds)
            return 0.0
        if self.seconds <= 0.0:
            self.seconds = seconds
            return 0.0
        surprise = seconds / self.seconds - 1.0
        surprise = min(max(surprise, -_MAX_SURPRISE), _MAX_SURPRISE)
        self.seconds *= 1.0 + surprise * max(1.0 / num_seen, least_rate)
        return surprise


class _Curve:
    """Seconds by number of tokens, linear between the numbers that are known, and never more for
    fewer tokens. A number is known once it has run more often than what takes longer at first;
    before that it counts beyond the known ones only.
    """

    def __init__(self) -> None:
        self._estimates: dict[int, _Estimate] = {}
        self._known: list[int] = []
        self._places: NDArray[np.float64] = np.zeros(0)
        self._seconds: NDArray[np.float64] = np.zeros(0)
        self._is_stale = False

    def add(self, num_tokens: int, seconds: float) -> float:
        """As ``_Estimate.add``."""
        estimate = self._estimates.get(num_tokens)
        if estimate is None:
            estimate = self._estimates[num_tokens] = _Estimate()
        surprise = estimate.add(seconds, _LEAST_RATE)
        if estimate.num_seen == _NUM_COLD + 1:
            insort(self._known, num_tokens)
        self._is_stale = True
        return surprise

    def first(self, num_tokens: int) -> float | None:
        """Seconds of a step of these few tokens; None while that isn't known."""
        estimate = self._estimates.get(num_tokens)
        if estimate is None or estimate.num_seen < _NUM_NEEDED:
            return None
        return estimate.seconds

    @property
    def last(self) -> int:
        """Most tokens that were seen."""
        return max(self._estimates, default=0)

    def at(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Constant beyond the ends."""
        if self._is_stale:
            self._is_stale = False
            most = self._known[-1] if self._known else 0
            places = self._known + sorted(one for one in self._estimates if one > most)
            seconds = np.array([self._estimates[one].seconds for one in places])
            self._seconds = np.minimum.accumulate(seconds[::-1])[::-1]
            self._places = np.array(places, np.float64)
        return np.interp(num_tokens, self._places, self._seconds)


class MeasuredCosts:
    """Costs by number of requests and tokens, as measured.

    A machine that others use too gets slower and faster, by far more than drafts cost, and contexts
    grow. So what is kept of each kind of step is what it takes at a common pace, and every step
    shows the pace: kinds that haven't run for a while stay comparable to those that do.

    Args:
        max_draft_tokens: most drafts of a request.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._pace = 1.0
        self._curves: dict[int, _Curve] = {}
        self._all = _Curve()
        self._drafts: dict[tuple[int, int], _Estimate] = {}
        self._draft_s: dict[int, dict[int, float]] = {}
        self._depths = np.arange(max_draft_tokens + 1)
        self._table = np.zeros((1, max_draft_tokens + 1))
        self._num_until_table = 0
        self._catch_up_s: float | None = None  # for a token
        self._of_one: list[float] = []
        self._num_until_of_one = 0

    def observe_step(self, num_reqs: int, num_tokens: int, seconds: float) -> None:
        key, num_tokens = _rounded(num_reqs, _NUM_EXACT_REQS), _rounded(num_tokens, _NUM_EXACT)
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = _Curve()
        seconds /= self._pace
        surprise = curve.add(num_tokens, seconds)
        if surprise == 0.0:  # among the first
            self._num_until_of_one = 0
        if num_tokens > _NUM_EXACT:
            self._all.add(num_tokens, seconds)
        else:
            self._pace *= 1.0 + _PACE_RATE * surprise

    def base(self, num_reqs: int) -> float | None:
        curve = self._curves.get(_rounded(num_reqs, _NUM_EXACT_REQS))
        first = None if curve is None else curve.first(_rounded(num_reqs, _NUM_EXACT))
        return None if first is None else first * self._pace

    def step(self, num_reqs: int, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        curve = self._curves[_rounded(num_reqs, _NUM_EXACT_REQS)]
        seconds = curve.at(num_tokens)
        last = curve.last
        if num_tokens[-1] > last and self._all.last:
            # steps with other numbers of requests tell what more tokens cost
            of_all = self._all.at(np.array([last, *num_tokens]))
            seconds += np.maximum(of_all[1:] - of_all[0], 0.0) * (num_tokens > last)
        return seconds * self._pace

    def of_one(self) -> Sequence[float]:
        if self._num_until_of_one == 0:
            self._num_until_of_one = _NUM_BETWEEN_TABLES
            depths = self._depths
            seconds = self.step(1, (depths + 1).astype(np.float64))
            seconds += self.draft(np.minimum(depths, 1), depths)
            self._of_one = (seconds / self._pace).tolist()
        self._num_until_of_one -= 1
        pace = self._pace
        return [pace * one for one in self._of_one]

    @property
    def most_draft(self) -> float:
        return float(self._table[-1, -1]) * self._pace

    def observe_draft(self, num_drafting: int, depth: int, seconds: float) -> None:
        key = num_drafting.bit_length(), depth
        estimate = self._drafts.get(key)
        if estimate is None:
            estimate = self._drafts[key] = _Estimate()
            self._num_until_table = 0
        estimate.add(seconds / self._pace, _LEAST_DRAFT_RATE)
        self._draft_s.setdefault(key[0], {})[depth] = estimate.seconds
        if self._num_until_table == 0 or estimate.num_seen <= _NUM_COLD + 1:
            self._fill_table()
            self._num_until_table = _NUM_BETWEEN_TABLES
            self._num_until_of_one = 0
        self._num_until_table -= 1

    def draft(
        self, num_drafting: NDArray[np.int64], depth: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        sizes = np.frexp(num_drafting)[1]  # as bit_length
        return self._table[np.minimum(sizes, len(self._table) - 1), depth] * self._pace

    def catch_up(self, num_tokens: int) -> float:
        return num_tokens * (self._catch_up_s or 0.0) * self._pace

    def observe_catch_up(
        self, num_drafting: int, depth: int, num_tokens: int, seconds: float
    ) -> None:
        drafting = self.draft(np.array([num_drafting]), np.array([depth]))
        left = max(seconds - float(drafting[0]), 0.0)
        seconds, before = left / num_tokens / self._pace, self._catch_up_s
        self._catch_up_s = (
            seconds if before is None else before + _LEAST_DRAFT_RATE * (seconds - before)
        )

    def _fill_table(self) -> None:
        """Rows by bit length of the number of requests, columns by depth; what wasn't measured is
        as with the next smaller number that was, and linear in the depth.
        """
        known = self._draft_s
        idle = known.get(0, {}).get(0, 0.0)
        row = np.full(len(self._depths), idle)
        rows = []
        for size in range(max(known) + 1):
            if size and size in known:
                depths = sorted(known[size])
                seconds = [known[size][depth] for depth in depths]
                row = np.interp(self._depths, [0, *depths], [min(idle, seconds[0]), *seconds])
                deepest = depths[-1]
                slope = max(seconds[-1] - idle, 0.0) / deepest
                row[deepest:] += slope * (self._depths[deepest:] - deepest)
            rows.append(row)
        self._table = np.stack(rows)


def _rounded(number: int, num_exact: int) -> int:
    """Down to three significant bits above ``num_exact``."""
    if number <= num_exact:
        return number
    step = 1 << (number.bit_length() - 3)
    return number // step * step
