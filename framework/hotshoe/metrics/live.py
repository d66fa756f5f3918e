"""The recent past of an engine: what the page draws, ``/load`` answers and the status line says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import quantiles
from time import monotonic
from typing import TYPE_CHECKING, Any

from hotshoe.api import StepRecord
from hotshoe.metrics.rates import Window

if TYPE_CHECKING:
    from hotshoe.metrics.engine import EngineMetrics

NUM_STEPS = 240
NUM_LATENCIES = 512
NUM_RECENT = 240
RATE_WINDOW_S = 10.0

STEP_COLUMNS = (
    "step_id",
    "time_s",
    "num_requests",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_new_tokens",
    "num_running",
    "num_waiting",
    "kv_cache_usage",
    "duration_ms",
    "num_preempted",
)
"""What is told of each step, in this order."""


class LiveView:
    """Keeps the last steps and latencies. Adding a step stores its record; the work is done when
    somebody asks.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._steps: deque[StepRecord] = deque(maxlen=NUM_STEPS)
        self._first_token_times_s: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._inter_token_times_s: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._window = Window(RATE_WINDOW_S)

    def add(self, step: StepRecord) -> None:
        """A step has committed."""
        self._steps.append(step)
        if step.first_token_times_s:
            self._first_token_times_s.extend(step.first_token_times_s)
        if step.inter_token_times_s:
            self._inter_token_times_s.extend(step.inter_token_times_s)
        self._window.add(monotonic(), step.num_prefill_tokens, step.num_new_tokens)

    def load(self) -> dict[str, Any]:
        """How busy the engine is."""
        core = self._metrics.engine.core
        num_running, num_waiting = len(core.planner.running), len(core.planner.waiting)
        prompt_rate, generation_rate = self._window.rates(monotonic())
        return {
            "server_load": num_running + num_waiting,
            "num_running": num_running,
            "num_waiting": num_waiting,
            "max_num_seqs": core.limits.max_num_seqs,
            "max_queue": self._metrics.engine.config.server.max_queue,
            "kv_cache_usage": round(core.kv_cache.usage, 4),
            "num_free_blocks": core.kv_cache.num_free_blocks,
            "num_blocks": core.kv_cache.num_blocks,
            "num_requests_not_drafted": self._metrics.num_requests_not_drafted,
            "num_stuck_compile_threads": self._metrics.num_stuck_compile_threads(),
            "prompt_tokens_per_s": round(prompt_rate, 1),
            "generation_tokens_per_s": round(generation_rate, 1),
        }

    def snapshot(self, after_step: int) -> dict[str, Any]:
        """Load, totals, plugins, recent latencies in ms, and the steps after ``after_step``; times
        are the engine's clock.
        """
        metrics = self._metrics
        cache = metrics.engine.core.kv_cache.stats
        totals = metrics.totals | {
            "prefix_cache_queries": cache.num_queried_tokens,
            "prefix_cache_hits": cache.num_hit_tokens,
            "requests": dict(metrics.finished),
        }
        return {
            "model": metrics.model_name,
            "time_s": round(metrics.engine.core.clock(), 4),
            "load": self.load(),
            "totals": totals,
            "components": metrics.engine.resolution.components(),
            "step_columns": list(STEP_COLUMNS),
            "steps": [_row(step) for step in self._steps if step.step_id > after_step],
            "time_to_first_token_ms": _summary(self._first_token_times_s),
            "inter_token_latency_ms": _summary(self._inter_token_times_s),
        }


def _row(step: StepRecord) -> list[float]:
    return [
        step.step_id,
        round(step.time_s, 4),
        len(step.request_ids),
        step.num_prefill_tokens,
        step.num_decode_tokens,
        step.num_new_tokens,
        step.num_running,
        step.num_waiting,
        round(1 - step.num_free_blocks / step.num_blocks, 4),
        round(step.timings_s.get("total", 0.0) * 1e3, 3),
        step.num_preempted,
    ]


def _summary(times_s: Iterable[float]) -> dict[str, Any]:
    """Recent values, oldest first, and their percentiles; ms."""
    values = [round(one * 1e3, 3) for one in times_s]
    if not values:
        return {"recent": [], "p50": None, "p90": None, "p99": None}
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    named = {f"p{percent}": round(cuts[percent - 1], 3) for percent in (50, 90, 99)}
    return {"recent": values[-NUM_RECENT:], **named}
