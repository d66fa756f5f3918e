"""HTTP requests by endpoint and status: counted in each API server process, summed in the core, so
that a scrape of any worker shows them all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from hotshoe.metrics.accumulators import Histogram
from hotshoe.metrics.catalog import BY_NAME

DURATION_BOUNDS = BY_NAME["http_request_duration_seconds"].bounds(0)

Key = tuple[str, str, int]
Report = Callable[..., Awaitable[Any]]


class HttpCounts:
    """What one API server process has counted since it last reported to the core."""

    def __init__(self) -> None:
        self._requests: dict[Key, int] = {}
        self._durations: dict[str, Histogram] = {}

    def observe(self, method: str, handler: str, status: int, duration_s: float) -> None:
        """Count one response.

        Args:
            method: the HTTP method.
            handler: the route's template, never the path that the client sent: paths are
                unlimited in number.
            status: the status code.
            duration_s: from the request to the end of the response.
        """
        key = (method, handler, status)
        self._requests[key] = self._requests.get(key, 0) + 1
        if handler not in self._durations:
            self._durations[handler] = Histogram(DURATION_BOUNDS)
        self._durations[handler].observe(duration_s)

    async def report(self, call: Report) -> None:
        """Tell the core what was counted since the last time.

        Args:
            call: ``AsyncLLM.call``.

        Raises:
            HotshoeError: as ``AsyncLLM.call``; the counts are kept for the next time.
        """
        requests, durations = self._requests, self._durations
        if not requests:
            return
        self._requests, self._durations = {}, {}
        report = {
            "requests": [[*key, count] for key, count in requests.items()],
            "durations": {name: [one.counts, one.sum] for name, one in durations.items()},
        }
        try:
            await call("count_http", report)
        except BaseException:
            self._take_back(requests, durations)
            raise

    def _take_back(self, requests: dict[Key, int], durations: dict[str, Histogram]) -> None:
        for key, count in requests.items():
            self._requests[key] = self._requests.get(key, 0) + count
        for handler, histogram in durations.items():
            if handler in self._durations:
                histogram.add(self._durations[handler].counts, self._durations[handler].sum)
            self._durations[handler] = histogram


class HttpTotals:
    """What all API server processes have counted."""

    def __init__(self) -> None:
        self.requests: dict[Key, int] = {}
        self.durations: dict[str, Histogram] = {}

    def add(self, report: dict[str, Any]) -> None:
        """Add the report of one process."""
        for method, handler, status, count in report["requests"]:
            key = (method, handler, status)
            self.requests[key] = self.requests.get(key, 0) + count
        for handler, (counts, total) in report["durations"].items():
            if handler not in self.durations:
                self.durations[handler] = Histogram(DURATION_BOUNDS)
            self.durations[handler].add(counts, total)
