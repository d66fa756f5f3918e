"""What an engine counts and times, in Prometheus' words."""

from hotshoe.metrics.engine import EngineMetrics

__all__ = ["EngineMetrics"]
