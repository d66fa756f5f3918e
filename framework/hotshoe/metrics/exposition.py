"""``EngineMetrics`` in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from hotshoe import __version__
from hotshoe.metrics.accumulators import Histogram
from hotshoe.metrics.catalog import ALIAS_PREFIX, COMMON_LABELS, METRICS, PREFIX, Metric

if TYPE_CHECKING:
    from hotshoe.metrics.engine import EngineMetrics

Labels = tuple[str, ...]
Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily


class Exposition:
    """Renders metrics from a registry of its own, with those of the process beside them."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(metrics))
        ProcessCollector(registry=self._registry)

    def render(self) -> str:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class _EngineCollector(Collector):
    """Reads the metrics when asked; nothing is kept twice."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        server = metrics.engine.config.server
        self._prefixes = (PREFIX, ALIAS_PREFIX) if server.vllm_metric_names else (PREFIX,)

    def describe(self) -> list[Family]:
        """Nothing: registering must not read the engine."""
        return []

    def collect(self) -> Iterator[Family]:
        """One family per metric and prefix."""
        values = self._numbers()
        histograms = self._histograms()
        common = (self._metrics.model_name, "0")
        for metric in METRICS:
            prefixes = self._prefixes if metric.has_alias else (PREFIX,)
            for prefix in prefixes:
                family = _family(metric, prefix)
                if isinstance(family, HistogramMetricFamily):
                    _add_histograms(family, common, histograms[metric.name])
                else:
                    for labels, value in values[metric.name].items():
                        family.add_metric([*common, *labels], value)
                yield family

    def _numbers(self) -> dict[str, Mapping[Labels, float]]:
        metrics = self._metrics
        planner, kv_cache = metrics.engine.core.planner, metrics.engine.core.kv_cache
        cache = kv_cache.stats
        totals = metrics.totals | {
            "num_requests_running": len(planner.running),
            "num_requests_waiting": len(planner.waiting),
            "kv_cache_usage_perc": kv_cache.usage,
            "stuck_compile_threads": metrics.num_stuck_compile_threads(),
            "spec_decode_num_requests_not_drafted": metrics.num_requests_not_drafted,
            "prefix_cache_queries": cache.num_queried_tokens,
            "prefix_cache_hits": cache.num_hit_tokens,
            "prefix_cache_evictions": cache.num_evicted_blocks,
        }
        values: dict[str, Mapping[Labels, float]] = {
            name: {(): value} for name, value in totals.items()
        }
        values["request_success"] = {(reason,): n for reason, n in metrics.finished.items()}
        values["step_stage_seconds"] = {(name,): s for name, s in metrics.stage_times_s.items()}
        for name, counts in (
            ("spec_decode_num_draft_tokens_per_pos", metrics.drafted_per_position),
            ("spec_decode_num_accepted_tokens_per_pos", metrics.accepted_per_position),
        ):
            values[name] = {(str(position),): count for position, count in enumerate(counts)}
        values["spec_decode_acceptance_per_position"] = {
            (str(position),): share for position, share in enumerate(metrics.acceptance())
        }
        values["http_requests"] = {
            (method, handler, str(status)): count
            for (method, handler, status), count in metrics.http.requests.items()
        }
        return values | self._infos()

    def _infos(self) -> dict[str, Mapping[Labels, float]]:
        engine = self._metrics.engine
        kv_cache, facts = engine.core.kv_cache, engine.facts
        num_blocks = str(kv_cache.num_blocks)
        cache = (
            str(kv_cache.block_size),
            num_blocks,
            num_blocks,
            str(facts.kv_dtype).removeprefix("torch."),
            str(kv_cache.enable_prefix_caching),
        )
        components = engine.resolution.components()
        info = (
            __version__,
            str(facts.dtype).removeprefix("torch."),
            str(facts.device),
            str(facts.max_model_len),
            "; ".join(f"{section}: {component}" for section, component in components.items()),
        )
        return {"cache_config_info": {cache: 1}, "engine_info": {info: 1}}

    def _histograms(self) -> dict[str, Mapping[Labels, Histogram]]:
        metrics = self._metrics
        found: dict[str, Mapping[Labels, Histogram]] = {
            name: {(): histogram} for name, histogram in metrics.histograms.items()
        }
        found["time_per_output_token_seconds"] = found["inter_token_latency_seconds"]
        found["http_request_duration_seconds"] = {
            (handler,): histogram for handler, histogram in metrics.http.durations.items()
        }
        return found


def _family(metric: Metric, prefix: str) -> Family:
    kinds: dict[str, type[Family]] = {
        "gauge": GaugeMetricFamily,
        "counter": CounterMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    labels = [*COMMON_LABELS, *metric.labels]
    return kinds[metric.kind](prefix + metric.name, metric.help, labels=labels)


def _add_histograms(
    family: HistogramMetricFamily, common: Labels, histograms: Mapping[Labels, Histogram]
) -> None:
    for labels, histogram in histograms.items():
        family.add_metric([*common, *labels], histogram.cumulative(), histogram.sum)
