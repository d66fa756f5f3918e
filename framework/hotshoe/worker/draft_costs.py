"""What steps and drafts cost, from those that were run."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_NUM_KEPT = 16
_NUM_NEEDED = 4  # the first runs of a shape take longer
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


class _Recent:
    """The lower quartile of the last values: what disturbs a measurement makes it longer, and the
    first runs of a shape take longer than those that follow.
    """

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=_NUM_KEPT)

    def add(self, value: float) -> float:
        values = self.values
        values.append(value)
        return sorted(values)[len(values) // 4]


class _Curve:
    """Seconds by number of tokens, linear between the numbers that were seen."""

    def __init__(self) -> None:
        self._recent: list[_Recent] = []
        self.num_tokens: list[int] = []
        self._places: NDArray[np.float64] = np.zeros(0)
        self._seconds: NDArray[np.float64] = np.zeros(0)

    def add(self, num_tokens: int, seconds: float) -> None:
        at = bisect_left(self.num_tokens, num_tokens)
        if at == len(self.num_tokens) or self.num_tokens[at] != num_tokens:
            self.num_tokens.insert(at, num_tokens)
            self._recent.insert(at, _Recent())
            self._places = np.insert(self._places, at, num_tokens)
            self._seconds = np.insert(self._seconds, at, 0.0)
        self._seconds[at] = self._recent[at].add(seconds)

    @property
    def first(self) -> float:
        """Seconds of the fewest tokens that were seen."""
        return float(self._seconds[0])

    @property
    def num_first(self) -> int:
        """How often these were seen lately."""
        return len(self._recent[0].values)

    def at(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Constant beyond the ends."""
        return np.interp(num_tokens, self._places, self._seconds)


class MeasuredCosts:
    """Costs by number of requests and tokens, as measured lately.

    Args:
        max_draft_tokens: most drafts of a request.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._curves: dict[int, _Curve] = {}
        self._all = _Curve()
        self._drafts: dict[tuple[int, int], _Recent] = {}
        self._draft_s: dict[int, dict[int, float]] = {}
        self._depths = np.arange(max_draft_tokens + 1)
        self._table = np.zeros((1, max_draft_tokens + 1))
        self._num_until_table = 0
        self._catch_up = _Recent()
        self._catch_up_s = 0.0  # for a token

    def observe_step(self, num_reqs: int, num_tokens: int, seconds: float) -> None:
        key, num_tokens = _rounded(num_reqs, _NUM_EXACT_REQS), _rounded(num_tokens, _NUM_EXACT)
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = _Curve()
        curve.add(num_tokens, seconds)
        if num_tokens > _NUM_EXACT:
            self._all.add(num_tokens, seconds)

    def base(self, num_reqs: int) -> float | None:
        curve = self._curves.get(_rounded(num_reqs, _NUM_EXACT_REQS))
        if curve is None or curve.num_tokens[0] > num_reqs or curve.num_first < _NUM_NEEDED:
            return None
        return curve.first

    def step(self, num_reqs: int, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        curve = self._curves[_rounded(num_reqs, _NUM_EXACT_REQS)]
        seconds = curve.at(num_tokens)
        last = curve.num_tokens[-1]
        if num_tokens[-1] > last and self._all.num_tokens:
            # steps with other numbers of requests tell what more tokens cost
            of_all = self._all.at(np.array([last, *num_tokens]))
            seconds += np.maximum(of_all[1:] - of_all[0], 0.0) * (num_tokens > last)
        return seconds

    @property
    def most_draft(self) -> float:
        return float(self._table[-1, -1])

    def observe_draft(self, num_drafting: int, depth: int, seconds: float) -> None:
        key = num_drafting.bit_length(), depth
        recent = self._drafts.get(key)
        if recent is None:
            recent = self._drafts[key] = _Recent()
            self._num_until_table = 0
        self._draft_s.setdefault(key[0], {})[depth] = recent.add(seconds)
        if self._num_until_table == 0:
            self._fill_table()
            self._num_until_table = _NUM_BETWEEN_TABLES
        self._num_until_table -= 1

    def draft(
        self, num_drafting: NDArray[np.int64], depth: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        sizes = np.frexp(num_drafting)[1]  # as bit_length
        return self._table[np.minimum(sizes, len(self._table) - 1), depth]

    def catch_up(self, num_tokens: int) -> float:
        return num_tokens * self._catch_up_s

    def observe_catch_up(
        self, num_drafting: int, depth: int, num_tokens: int, seconds: float
    ) -> None:
        drafting = self.draft(np.array([num_drafting]), np.array([depth]))
        left = max(seconds - float(drafting[0]), 0.0)
        self._catch_up_s = self._catch_up.add(left / num_tokens)

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
