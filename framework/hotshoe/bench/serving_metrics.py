"""Figures of a load test: rates, latencies, and how many requests met their objectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hotshoe.bench.load import RequestRecord

PERCENTILES = (50, 90, 95, 99)

LATENCIES = ("ttft", "tpot", "itl", "e2e")
"""Time to the first token, time per output token after it, time between tokens, time to the end."""

OBJECTIVES = ("ttft", "tpot", "e2e")
"""Latencies of a request that an objective may bound."""


def summarise(
    records: Sequence[RequestRecord], objectives_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Figures over all requests; latencies and token rates are those of requests that succeeded.

    Args:
        objectives_ms: most milliseconds by latency, one of ``OBJECTIVES``.
    """
    succeeded = [record for record in records if record.error is None]
    duration_s = _duration_s(records)
    num_prompt_tokens = sum(record.num_prompt_tokens or 0 for record in succeeded)
    num_output_tokens = sum(record.num_output_tokens for record in succeeded)
    summary: dict[str, Any] = {
        "duration_s": duration_s,
        "num_requests": len(records),
        "num_succeeded": len(succeeded),
        "num_failed": len(records) - len(succeeded),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "finish_reasons": dict(Counter(str(record.finish_reason) for record in succeeded)),
        "num_prompt_tokens": num_prompt_tokens,
        "num_cached_tokens": sum(record.num_cached_tokens or 0 for record in succeeded),
        "num_output_tokens": num_output_tokens,
        "requests_per_s": _rate(len(succeeded), duration_s),
        "output_tokens_per_s": _rate(num_output_tokens, duration_s),
        "total_tokens_per_s": _rate(num_prompt_tokens + num_output_tokens, duration_s),
        "max_concurrency": _most_at_once(records),
        "max_send_delay_s": max((one.sent_s - one.planned_s for one in records), default=0.0),
    }
    for name, values in _latencies(succeeded).items():
        summary[f"{name}_ms"] = spread([1e3 * value for value in values])
    if objectives_ms:
        summary["goodput"] = _goodput(records, objectives_ms, duration_s)
    return summary


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and percentiles; all None without values."""
    names = ["mean", "median", *(f"p{percent}" for percent in PERCENTILES)]
    if not values:
        return dict.fromkeys(names)
    ordered = sorted(values)
    shares = [0.5, *(percent / 100 for percent in PERCENTILES)]
    return dict(
        zip(names, [fmean(ordered), *(_quantile(ordered, share) for share in shares)], strict=True)
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest values, in proportion."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def meets(record: RequestRecord, objectives_ms: Mapping[str, float]) -> bool:
    """Whether a request succeeded within its objectives. One that has no such latency meets it."""
    if record.error is not None:
        return False
    found = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
    return all(
        (value := found[name]) is None or 1e3 * value <= limit
        for name, limit in objectives_ms.items()
    )


def _goodput(
    records: Sequence[RequestRecord], objectives_ms: Mapping[str, float], duration_s: float
) -> dict[str, Any]:
    num_good = sum(meets(record, objectives_ms) for record in records)
    return {
        "objectives_ms": dict(objectives_ms),
        "num_good": num_good,
        "share": num_good / len(records) if records else 0.0,
        "requests_per_s": _rate(num_good, duration_s),
    }


def _latencies(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Seconds by name; gaps of all requests together."""
    return {
        "ttft": [record.ttft_s for record in records if record.ttft_s is not None],
        "tpot": [record.tpot_s for record in records if record.tpot_s is not None],
        "itl": [gap for record in records for gap in record.gaps_s],
        "e2e": [record.e2e_s for record in records],
    }


def _duration_s(records: Sequence[RequestRecord]) -> float:
    sent = [record for record in records if record.error != "skipped"]
    if not sent:
        return 0.0
    return max(record.end_s for record in sent) - min(record.sent_s for record in sent)


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _most_at_once(records: Sequence[RequestRecord]) -> int:
    sent = [record for record in records if record.error != "skipped"]
    changes = [(record.sent_s, 1) for record in sent] + [(record.end_s, -1) for record in sent]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
