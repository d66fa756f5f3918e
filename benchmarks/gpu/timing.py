"""How long something takes on a device, and what share of a time a GPU is idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch

NUM_WARM_UPS = 3
NUM_CALLS = 10
FOLLOWING_US = 5.0
"""Kernels of one recorded step follow one another sooner than that."""


def seconds_per_call(
    run: Callable[[int], Any], device: str, num_repeats: int, *, is_recorded: bool = False
) -> float:
    """Median over repeats, each of several calls in a row, by the device's own clock.

    Args:
        run: called with the number of the call, so that it can take turns between inputs.
        device: torch device type.
        num_repeats: repeats.
        is_recorded: on a GPU, time a CUDA graph of the calls: what takes less time than to be
            launched from Python can't be timed otherwise.
    """
    for number in range(NUM_WARM_UPS):
        run(number)

    def calls() -> None:
        for number in range(NUM_CALLS):
            run(number)

    if device != "cuda":
        return median(_seconds(calls) for _ in range(num_repeats)) / NUM_CALLS
    timed = _graph(calls) if is_recorded else calls
    return median(_seconds_on_gpu(timed) for _ in range(num_repeats)) / NUM_CALLS


def _graph(calls: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        calls()
    graph.replay()
    return graph.replay


def _seconds(calls: Callable[[], None]) -> float:
    started = time.perf_counter()
    calls()
    return time.perf_counter() - started


def _seconds_on_gpu(calls: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    calls()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def synchronize(device: str) -> None:
    """Wait for all that was started on a device."""
    if device == "cuda":
        torch.cuda.synchronize()


def idle_share(intervals: Iterable[tuple[float, float]], longer_than_us: float) -> float | None:
    """The share of a time in which nothing runs, counting only pauses longer than some.

    Args:
        intervals: start and end of each kernel in microseconds, in any order; they may overlap.
        longer_than_us: microseconds.

    Returns:
        None without intervals.
    """
    ordered = sorted(intervals)
    if not ordered:
        return None
    first, busy_until = ordered[0]
    idle = 0.0
    for start, end in ordered:
        if start - busy_until > longer_than_us:
            idle += start - busy_until
        busy_until = max(busy_until, end)
    total = busy_until - first
    return idle / total if total > 0 else None


class KernelTimes:
    """Notes when kernels run on the GPU, between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.is_running = False
        activity = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(
            activities=[activity.CUDA if torch.cuda.is_available() else activity.CPU]
        )

    def start(self) -> None:
        """Begin; may take a second."""
        self._profile.start()
        self.is_running = True

    def stop(self) -> list[tuple[float, float]]:
        """Start and end of each kernel in microseconds; copies and fills are none."""
        synchronize("cuda" if torch.cuda.is_available() else "cpu")
        self._profile.stop()
        self.is_running = False
        return [
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not event.name.startswith("Mem")
        ]
