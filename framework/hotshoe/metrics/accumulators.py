"""Counting on the step loop: a histogram that takes a batch of observations in microseconds.

``prometheus_client``'s own take a lock per observation, which would be most of the cost of
observing a step. These are written by the step loop alone and read between steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Histogram:
    """Counts by bucket and a sum.

    Args:
        bounds: upper bounds, inclusive and ascending; one more bucket takes what lies above.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count values; runs of equal ones, as a step brings them, are cheap."""
        counts, bounds = self.counts, self.bounds
        last = None
        index = 0
        for value in values:
            if value != last:
                index = bisect_left(bounds, value)
                last = value
            counts[index] += 1
            self.sum += value

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add what another histogram with the same bounds has counted.

        Raises:
            ValueError: if the number of buckets differs.
        """
        if len(counts) != len(self.counts):
            raise ValueError(f"got {len(counts)} buckets, have {len(self.counts)}")
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, counts, strict=True)]
        self.sum += total

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Upper bound and how many values lie at or below it, as Prometheus wants them."""
        labels = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(labels, accumulate(self.counts), strict=True))
