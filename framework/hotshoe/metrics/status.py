"""The status line: what the engine is doing, in the log, every few seconds."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotshoe.metrics.engine import EngineMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Cumulative counts at a moment."""

    time_s: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_preemptions: int


class StatusLine:
    """Says once per interval what has happened in it; keeps silent while the engine idles.

    Args:
        metrics: what it reads. Reading numbers needs no lock.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._last = self._read()
        self._was_busy = False
        self._stopped = threading.Event()

    def start(self, interval_s: float) -> None:
        """Write lines from a thread of its own; 0 = never."""
        if interval_s > 0:
            thread = threading.Thread(
                target=self._run, args=(interval_s,), name="hotshoe-status", daemon=True
            )
            thread.start()

    def stop(self) -> None:
        """Write no more lines."""
        self._stopped.set()

    def _run(self, interval_s: float) -> None:
        while not self._stopped.wait(interval_s):
            self.tick()

    def tick(self) -> str | None:
        """End an interval: log and return its line; None if there is nothing to say."""
        before, now = self._last, self._read()
        self._last = now
        planner = self._metrics.engine.core.planner
        num_running, num_waiting = len(planner.running), len(planner.waiting)
        is_busy = bool(num_running or num_waiting) or _has_worked(before, now)
        if not is_busy and not self._was_busy:
            return None
        self._was_busy = is_busy
        line = self._line(before, now, num_running, num_waiting)
        logger.info("%s", line)
        return line

    def _line(self, before: _Reading, now: _Reading, num_running: int, num_waiting: int) -> str:
        seconds = max(now.time_s - before.time_s, 1e-9)
        prompt = (now.num_prompt_tokens - before.num_prompt_tokens) / seconds
        generation = (now.num_generation_tokens - before.num_generation_tokens) / seconds
        parts = [
            f"{num_running} running, {num_waiting} waiting",
            f"KV cache {self._metrics.engine.core.kv_cache.usage:.1%}",
            f"prompts {prompt:.1f} tokens/s, outputs {generation:.1f} tokens/s",
        ]
        if queried := now.num_queried_tokens - before.num_queried_tokens:
            parts.append(
                f"prefix hits {(now.num_hit_tokens - before.num_hit_tokens) / queried:.1%}"
            )
        if drafted := now.num_draft_tokens - before.num_draft_tokens:
            accepted = now.num_accepted_tokens - before.num_accepted_tokens
            parts.append(f"drafts accepted {accepted / drafted:.1%}")
        if num_off := self._metrics.num_requests_not_drafted:
            parts.append(f"{num_off} not drafted")
        if preempted := now.num_preemptions - before.num_preemptions:
            parts.append(f"{preempted} preemptions")
        return "; ".join(parts)

    def _read(self) -> _Reading:
        metrics = self._metrics
        totals, cache = metrics.totals, metrics.engine.core.kv_cache.stats
        return _Reading(
            time_s=monotonic(),
            num_prompt_tokens=metrics.num_computed_prompt_tokens,
            num_generation_tokens=totals["generation_tokens"],
            num_queried_tokens=cache.num_queried_tokens,
            num_hit_tokens=cache.num_hit_tokens,
            num_draft_tokens=totals["spec_decode_num_draft_tokens"],
            num_accepted_tokens=totals["spec_decode_num_accepted_tokens"],
            num_preemptions=totals["num_preemptions"],
        )


def _has_worked(before: _Reading, now: _Reading) -> bool:
    return (before.num_prompt_tokens, before.num_generation_tokens) != (
        now.num_prompt_tokens,
        now.num_generation_tokens,
    )
