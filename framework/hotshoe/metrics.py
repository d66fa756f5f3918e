"""Counters and timings of an engine, fed by its observers, in Prometheus' words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotshoe.engine.assemble import Engine


class EngineMetrics:
    """Metrics of one engine core. They live in its process, so they hold over all API servers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def render(self) -> str:
        """Everything in Prometheus' text format."""
        return ""

    def load(self) -> dict[str, Any]:
        """How busy the engine is, in a few numbers."""
        planner = self._engine.core.planner
        return {"num_running": len(planner.running), "num_waiting": len(planner.waiting)}

    def live(self) -> dict[str, Any]:
        """What the page shows, as plain data. Times are the engine's clock, in seconds.

        Returns:
            ``time_s``: now. ``num_running``, ``num_waiting``, ``num_blocks``, ``num_free_blocks``:
            now. ``steps``: the last 120, oldest first, each ``{step_id, time_s, duration_s,
            num_prefill_tokens, num_decode_tokens, num_running, num_waiting, num_free_blocks}``.
            ``ttft_s``: the last 120 times to first token, oldest first, each ``[time_s, seconds]``.
            ``inter_token_s``: the last 240 times between tokens of a request, likewise.
            ``components``: chosen plugin and its distribution by config section.
        """
        return self.load()

    def start_profile(self) -> str:
        """Start profiling the core."""
        return ""

    def stop_profile(self) -> str:
        """Stop profiling; returns where the profile was written."""
        return ""
