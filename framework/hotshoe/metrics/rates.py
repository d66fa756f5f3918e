"""Tokens per second over the recent past."""

from __future__ import annotations

from collections import deque


class Window:
    """Sums of two counts over a sliding window, in buckets of a tenth of it.

    Args:
        length_s: of the window.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._width_s = length_s / 10
        self._buckets: deque[list[float]] = deque(maxlen=11)

    def add(self, now: float, first: int, second: int) -> None:
        """Count at a moment; moments don't go back."""
        buckets = self._buckets
        if not buckets or now - buckets[-1][0] >= self._width_s:
            buckets.append([now, 0, 0])
        last = buckets[-1]
        last[1] += first
        last[2] += second

    def rates(self, now: float) -> tuple[float, float]:
        """Both counts per second: over the window, or since the first count if that is less."""
        recent = [one for one in list(self._buckets) if now - one[0] <= self._length_s]
        if not recent:
            return 0.0, 0.0
        # a bucket's counts lie somewhere within it
        span_s = max(now - recent[0][0], self._width_s)
        return sum(one[1] for one in recent) / span_s, sum(one[2] for one in recent) / span_s
