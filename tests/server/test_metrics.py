"""Metrics of a real engine on a tiny model, against the requests that it ran."""

from __future__ import annotations

import asyncio
import pstats
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hotshoe import SamplingParams
from hotshoe.api import StepRecord, StructuredOutputs
from hotshoe.config import load_config
from hotshoe.engine.assemble import Engine, build_engine
from hotshoe.engine.request import EngineRequest, RequestMetrics
from hotshoe.errors import RequestError
from hotshoe.metrics import EngineMetrics
from hotshoe.metrics.catalog import METRICS, sample_names
from hotshoe.metrics.http import HttpCounts
from hotshoe.metrics.status import StatusLine

NGRAM = {"name": "ngram", "options": {"min_ngram": 1}, "adaptive": False}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
BuildEngine = Callable[..., tuple[Engine, EngineMetrics]]


@pytest.fixture
def build(tiny_path: Path) -> Iterator[BuildEngine]:
    """Builds engines on the tiny model, with metrics."""
    engines: list[Engine] = []

    def build_one(**overrides: Any) -> tuple[Engine, EngineMetrics]:
        settings = {"max_model_len": 256, "max_num_seqs": 8, "cache": {"num_blocks": 64}}
        resolved = load_config(
            None, overrides={"model": str(tiny_path), "dtype": "float32", **settings, **overrides}
        )
        engines.append(build_engine(resolved.config))
        return engines[-1], EngineMetrics(engines[-1])

    yield build_one
    for engine in engines:
        engine.core.close()


numbers = count()


def add(
    engine: Engine, prompt: Sequence[int], params: SamplingParams | None = None, **fields: Any
) -> str:
    request_id = fields.pop("request_id", None) or f"r{next(numbers)}"
    params = params or SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    request = EngineRequest(
        request_id=request_id, prompt_token_ids=list(prompt), sampling_params=params, **fields
    )
    engine.core.add_request(request)
    return request_id


def drain(engine: Engine) -> dict[str, RequestMetrics]:
    """Run to the end; what each request reported of itself."""
    found = {}
    while engine.core.has_work:
        for update in engine.core.step():
            if update.metrics is not None:
                found[update.request_id] = update.metrics
    return found


def samples_of(metrics: EngineMetrics) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(metrics.render()):
        for sample in family.samples:
            labels = tuple(sorted(item for item in sample.labels.items() if item[0] not in COMMON))
            key = (sample.name, labels)
            assert key not in samples
            samples[key] = sample.value
    return samples


COMMON = ("model_name", "engine")


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_every_metric_of_the_catalog_is_exported_before_anything_ran(build: BuildEngine) -> None:
    _, metrics = build()
    families = {one.name: one for one in text_string_to_metric_families(metrics.render())}
    for metric in METRICS:
        family = families[f"hotshoe:{metric.name}"]
        assert family.type == metric.kind
        assert family.documentation == metric.help
    assert not [name for name in families if name.startswith("vllm:")]


def test_counters_and_lengths_are_those_of_the_requests(build: BuildEngine) -> None:
    engine, metrics = build(served_model_name=["alpha", "beta"])
    add(engine, range(40), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    add(engine, range(100, 107), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    drain(engine)
    found = samples_of(metrics)
    assert value(found, "hotshoe:prompt_tokens_total") == 47
    assert value(found, "hotshoe:generation_tokens_total") == 14
    assert value(found, "hotshoe:request_success_total", finished_reason="length") == 2
    assert value(found, "hotshoe:request_prompt_tokens_sum") == 47
    assert value(found, "hotshoe:request_prompt_tokens_bucket", le="10.0") == 1
    assert value(found, "hotshoe:request_prompt_tokens_bucket", le="50.0") == 2
    assert value(found, "hotshoe:request_generation_tokens_sum") == 14
    assert value(found, "hotshoe:request_params_max_tokens_sum") == 14
    assert value(found, "hotshoe:request_params_n_sum") == 2
    # every prompt token, and every output token but the last of each
    assert value(found, "hotshoe:iteration_tokens_total_sum") == 47 + 14 - 2
    assert value(found, "hotshoe:num_requests_running") == 0
    assert value(found, "hotshoe:kv_cache_usage_perc") == 0
    assert 'hotshoe:prompt_tokens_total{engine="0",model_name="alpha"} 47.0' in metrics.render()


def test_times_are_those_that_the_requests_report(build: BuildEngine) -> None:
    engine, metrics = build()
    for start in (0, 60, 120):
        add(engine, range(start, start + 20))
    reported = drain(engine)
    found = samples_of(metrics)
    sums: dict[str, list[float]] = {
        "time_to_first_token": [one.time_to_first_token_s or 0 for one in reported.values()],
        "inter_token_latency": [t for one in reported.values() for t in one.inter_token_times_s],
        "request_queue_time": [one.queue_time_s or 0 for one in reported.values()],
        "request_prefill_time": [one.prefill_time_s or 0 for one in reported.values()],
        "request_decode_time": [
            one.token_times_s[-1] - one.token_times_s[0] for one in reported.values()
        ],
    }
    for name, values in sums.items():
        assert value(found, f"hotshoe:{name}_seconds_count") == len(values)
        assert value(found, f"hotshoe:{name}_seconds_sum") == pytest.approx(sum(values))
    decode, inference = (
        value(found, f"hotshoe:request_{name}_time_seconds_sum") for name in ("decode", "inference")
    )
    assert inference == pytest.approx(decode + sum(sums["request_prefill_time"]))
    assert value(found, "hotshoe:request_time_per_output_token_seconds_sum") == pytest.approx(
        decode / 3
    )
    e2e = value(found, "hotshoe:e2e_request_latency_seconds_sum")
    assert e2e >= inference + sum(sums["request_queue_time"])
    older = "hotshoe:time_per_output_token_seconds_count"
    assert value(found, older) == value(found, "hotshoe:inter_token_latency_seconds_count") == 9


def test_requests_tell_how_long_their_constraints_took(build: BuildEngine) -> None:
    engine, metrics = build()
    add(engine, range(5))
    for pattern in ("[ab]", "("):
        constraint = StructuredOutputs(regex=pattern)
        add(engine, range(5), SamplingParams(structured_outputs=constraint))
    drain(engine)
    found = samples_of(metrics)
    assert value(found, "hotshoe:request_constraint_time_seconds_count") == 2
    assert value(found, "hotshoe:request_constraint_time_seconds_sum") > 0
    assert value(found, "hotshoe:request_success_total", finished_reason="error") == 1


def test_gauges_show_who_runs_and_who_waits(build: BuildEngine) -> None:
    engine, metrics = build(max_num_seqs=2)
    for start in range(3):
        add(engine, range(start * 40, start * 40 + 33))
    engine.core.step()
    found = samples_of(metrics)
    assert value(found, "hotshoe:num_requests_running") == 2
    assert value(found, "hotshoe:num_requests_waiting") == 1
    num_used = engine.core.kv_cache.num_blocks - engine.core.kv_cache.num_free_blocks
    assert value(found, "hotshoe:kv_cache_usage_perc") == pytest.approx(num_used / 64)
    load = metrics.load()
    assert (load["num_running"], load["num_waiting"], load["server_load"]) == (2, 1, 3)
    assert load["num_free_blocks"] == engine.core.kv_cache.num_free_blocks
    assert load["prompt_tokens_per_s"] > 0
    drain(engine)
    assert metrics.load()["server_load"] == 0


def test_prefix_cache_hits_are_counted(build: BuildEngine) -> None:
    engine, metrics = build()
    add(engine, range(64))
    drain(engine)
    add(engine, [*range(64), 7])
    drain(engine)
    found = samples_of(metrics)
    assert value(found, "hotshoe:prefix_cache_queries_total") == 64 + 65
    assert value(found, "hotshoe:prefix_cache_hits_total") == 64
    assert value(found, "hotshoe:prompt_tokens_total") == 64 + 65
    assert value(found, "hotshoe:prompt_tokens_cached_total") == 64


def test_preemptions_and_aborts_are_counted(build: BuildEngine) -> None:
    engine, metrics = build(cache={"num_blocks": 16})
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for start in range(3):
        add(engine, range(start * 60, start * 60 + 50), params)
    reported = drain(engine)
    num_preempted = sum(one.num_preemptions for one in reported.values())
    assert num_preempted > 0
    aborted = add(engine, range(10))
    engine.core.abort([aborted])
    stopped = add(engine, range(10))
    engine.core.step()
    engine.core.abort([stopped], finish_reason="stop")
    drain(engine)
    found = samples_of(metrics)
    assert value(found, "hotshoe:num_preemptions_total") == num_preempted
    assert value(found, "hotshoe:request_num_preemptions_sum") == num_preempted
    for reason, expected in (("length", 3), ("abort", 1), ("stop", 1), ("error", 0)):
        name = "hotshoe:request_success_total"
        assert value(found, name, finished_reason=reason) == expected
    # one never ran, so it has an end but no time in the queue
    assert value(found, "hotshoe:e2e_request_latency_seconds_count") == 5
    assert value(found, "hotshoe:request_queue_time_seconds_count") == 4


def test_choices_of_one_prompt_count_once_for_n_and_with_their_longest(build: BuildEngine) -> None:
    engine, metrics = build()
    for index, max_tokens in enumerate((3, 8, 5)):
        params = SamplingParams(n=3, temperature=0, max_tokens=max_tokens, ignore_eos=True)
        add(engine, range(10), params, choice_index=index, request_id=f"prompt/{index}")
    drain(engine)
    found = samples_of(metrics)
    assert value(found, "hotshoe:request_params_n_count") == 1
    assert value(found, "hotshoe:request_params_n_sum") == 3
    assert value(found, "hotshoe:request_generation_tokens_sum") == 16
    assert value(found, "hotshoe:request_max_num_generation_tokens_count") == 1
    assert value(found, "hotshoe:request_max_num_generation_tokens_sum") == 8


def test_drafts_are_counted_by_position(build: BuildEngine) -> None:
    engine, metrics = build(spec_decode=NGRAM)
    records: list[StepRecord] = []
    engine.core.step_observers.append(records.append)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    add(engine, [5, 6, 7, 8] * 8, params)
    add(engine, [15, 16, 17] * 8, params)
    reported = drain(engine)
    found = samples_of(metrics)
    num_drafted = sum(one.num_draft_tokens for one in reported.values())
    num_accepted = sum(one.num_accepted_tokens for one in reported.values())
    assert num_drafted > 0
    drafted = value(found, "hotshoe:spec_decode_num_draft_tokens_total")
    accepted = value(found, "hotshoe:spec_decode_num_accepted_tokens_total")
    assert drafted == num_drafted == sum(one.num_draft_tokens for one in records)
    assert accepted == num_accepted
    num_drafts = value(found, "hotshoe:spec_decode_num_drafts_total")
    assert num_drafts == sum(one.num_drafts for one in records) <= num_drafted
    by_position = []
    for kind, total in (("draft", drafted), ("accepted", accepted)):
        name = f"hotshoe:spec_decode_num_{kind}_tokens_per_pos_total"
        found_at = {
            dict(labels)["position"]: n for (key, labels), n in found.items() if key == name
        }
        counts = [found_at[str(position)] for position in range(len(found_at))]
        assert sum(counts) == total
        assert counts == sorted(counts, reverse=True)
        by_position.append(counts)
    assert by_position[0][0] == num_drafts
    assert all(kept <= all_of_them for all_of_them, kept in zip(*by_position, strict=False))
    for position, (all_of_them, kept) in enumerate(zip(*by_position, strict=False)):
        share = value(found, "hotshoe:spec_decode_acceptance_per_position", position=str(position))
        assert share == pytest.approx(kept / all_of_them)
    assert value(found, "hotshoe:spec_decode_accepted_length_sum") == accepted
    assert value(found, "hotshoe:spec_decode_accepted_length_count") == num_drafts
    none_kept = value(found, "hotshoe:spec_decode_accepted_length_bucket", le="0.0")
    assert none_kept == num_drafts - by_position[1][0]
    assert value(found, "hotshoe:generation_tokens_total") == 120


def test_requests_without_drafts_because_they_do_not_pay_are_shown(build: BuildEngine) -> None:
    engine, metrics = build(spec_decode=NGRAM | {"max_batch_size": 2})
    for index in range(3):
        params = SamplingParams(temperature=0, max_tokens=9 + 9 * index, ignore_eos=True)
        add(engine, [index, 6, 7, 8] * 8, params)
    engine.core.step()
    name = "hotshoe:spec_decode_num_requests_not_drafted"
    assert value(samples_of(metrics), name) == metrics.load()["num_requests_not_drafted"] == 3
    assert "; 3 not drafted" in str(StatusLine(metrics).tick())
    drain(engine)
    assert value(samples_of(metrics), name) == metrics.load()["num_requests_not_drafted"] == 0


def test_dashboards_for_vllm_find_the_same_values_under_their_names(build: BuildEngine) -> None:
    engine, metrics = build(server={"vllm_metric_names": True})
    add(engine, range(30))
    drain(engine)
    found = samples_of(metrics)
    for metric in METRICS:
        if not metric.has_alias:
            assert not [key for key in found if key[0].startswith(f"vllm:{metric.name}")]
            continue
        for name in sample_names(metric):
            own = {labels: one for (key, labels), one in found.items() if key == f"hotshoe:{name}"}
            alias = {labels: one for (key, labels), one in found.items() if key == f"vllm:{name}"}
            assert alias == own
    assert value(found, "vllm:generation_tokens_total") == 4
    assert value(found, "vllm:request_success_total", finished_reason="length") == 1


def test_info_metrics_describe_cache_and_assembly(build: BuildEngine) -> None:
    _, metrics = build()
    infos = {name: dict(labels) for name, labels in samples_of(metrics) if name.endswith("_info")}
    cache = infos["hotshoe:cache_config_info"]
    assert (cache["block_size"], cache["num_gpu_blocks"], cache["cache_dtype"]) == (
        "16",
        "64",
        "float32",
    )
    assert "scheduler: fcfs" in infos["hotshoe:engine_info"]["components"]


def test_the_process_tells_its_memory_and_time(build: BuildEngine) -> None:
    _, metrics = build()
    found = samples_of(metrics)
    assert value(found, "process_resident_memory_bytes") > 1e7
    assert value(found, "process_cpu_seconds_total") > 0


def test_the_live_view_tells_steps_latencies_and_plugins(build: BuildEngine) -> None:
    engine, metrics = build()
    add(engine, range(20))
    add(engine, range(100, 130))
    drain(engine)
    live = metrics.live()
    steps = [dict(zip(live["step_columns"], row, strict=True)) for row in live["steps"]]
    assert steps[0]["num_prefill_tokens"] == 50
    assert steps[0]["num_requests"] == 2
    assert [step["num_decode_tokens"] for step in steps[1:]] == [2, 2, 2]
    assert sum(step["num_new_tokens"] for step in steps) == 8
    assert steps[1]["kv_cache_usage"] > 0
    assert live["totals"]["generation_tokens"] == 8
    assert live["totals"]["requests"]["length"] == 2
    assert len(live["time_to_first_token_ms"]["recent"]) == 2
    latencies = live["inter_token_latency_ms"]
    assert len(latencies["recent"]) == 6
    assert 0 < latencies["p50"] <= latencies["p99"] <= max(latencies["recent"])
    assert live["components"]["scheduler"].startswith("fcfs")
    newer = metrics.live(after_step=steps[1]["step_id"])["steps"]
    assert [row[0] for row in newer] == [step["step_id"] for step in steps[2:]]


def test_the_live_view_keeps_a_bounded_past(build: BuildEngine) -> None:
    engine, metrics = build()
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for _ in range(2):
        add(engine, range(10), params)
        drain(engine)
    live = metrics.live()
    assert len(live["steps"]) == 240
    assert len(live["inter_token_latency_ms"]["recent"]) == 240


def test_an_idle_engine_answers_too(build: BuildEngine) -> None:
    _, metrics = build()
    assert metrics.live()["time_to_first_token_ms"]["p50"] is None
    assert metrics.load()["generation_tokens_per_s"] == 0


@pytest.mark.parametrize("kind", ["torch", "cprofile"])
def test_a_profile_of_the_steps_is_written(build: BuildEngine, tmp_path: Path, kind: str) -> None:
    engine, metrics = build(server={"profile_dir": str(tmp_path / "profiles")})
    expected = metrics.start_profile(kind)
    with pytest.raises(RequestError, match="a profile is being taken already"):
        metrics.start_profile(kind)
    add(engine, range(20))
    drain(engine)
    path = Path(metrics.stop_profile())
    assert str(path) == expected
    assert path.is_relative_to(tmp_path / "profiles")
    if kind == "torch":
        assert "aten::" in path.read_text()
    else:
        functions = {key[2] for key in pstats.Stats(str(path)).stats}  # type: ignore[attr-defined]
        assert "step" in functions
    with pytest.raises(RequestError, match="no profile is being taken; start one first"):
        metrics.stop_profile()


def test_an_unknown_kind_of_profile_is_refused(build: BuildEngine) -> None:
    _, metrics = build()
    with pytest.raises(RequestError, match="no kind of profile 'perf'; allowed: torch, cprofile"):
        metrics.start_profile("perf")


def test_http_requests_of_all_processes_add_up(build: BuildEngine) -> None:
    _, metrics = build()

    async def call(method: str, report: dict[str, Any]) -> None:
        assert method == "count_http"
        # as it comes out of the socket
        metrics.count_http(msgspec.msgpack.decode(msgspec.msgpack.encode(report)))

    async def two_processes() -> None:
        for durations in ((0.02, 0.3), (4.0,)):
            counts = HttpCounts()
            for duration in durations:
                counts.observe("POST", "/v1/completions", 200, duration)
            counts.observe("POST", "/v1/completions", 429, 0.001)
            await counts.report(call)
            await counts.report(call)  # nothing new: nothing is counted twice

    asyncio.run(two_processes())
    found = samples_of(metrics)
    name, labels = "hotshoe:http_requests_total", {"method": "POST", "handler": "/v1/completions"}
    assert value(found, name, **labels, status="200") == 3
    assert value(found, name, **labels, status="429") == 2
    name = "hotshoe:http_request_duration_seconds"
    assert value(found, f"{name}_count", handler="/v1/completions") == 5
    assert value(found, f"{name}_sum", handler="/v1/completions") == pytest.approx(4.322)
    assert value(found, f"{name}_bucket", handler="/v1/completions", le="0.3") == 4


def test_http_counts_survive_a_report_that_fails(build: BuildEngine) -> None:
    _, metrics = build()

    async def failing(method: str, report: dict[str, Any]) -> None:
        counts.observe("GET", "/health", 200, 0.5)  # meanwhile
        raise RequestError("no answer")

    async def working(method: str, report: dict[str, Any]) -> None:
        metrics.count_http(report)

    counts = HttpCounts()
    counts.observe("GET", "/health", 200, 0.25)
    with pytest.raises(RequestError):
        asyncio.run(counts.report(failing))
    asyncio.run(counts.report(working))
    found = samples_of(metrics)
    labels = {"method": "GET", "handler": "/health", "status": "200"}
    assert value(found, "hotshoe:http_requests_total", **labels) == 2
    duration = "hotshoe:http_request_duration_seconds_sum"
    assert value(found, duration, handler="/health") == 0.75


def test_the_status_line_tells_what_happened_and_then_keeps_silent(
    build: BuildEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine, metrics = build(spec_decode=NGRAM)
    status = StatusLine(metrics)
    assert status.tick() is None
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    add(engine, [5, 6, 7, 8] * 8, params)
    engine.core.step()
    with caplog.at_level("INFO", logger="hotshoe"):
        line = status.tick()
    assert line == caplog.messages[-1]
    assert line.startswith("1 running, 0 waiting; KV cache ")
    assert re.search(
        r"prompts [1-9][\d.]* tokens/s, outputs [\d.]+ tokens/s; prefix hits 0.0%", line
    )
    drain(engine)
    line = status.tick()
    assert line is not None
    assert re.search(r"0 running.*prompts 0.0 tokens/s.*drafts accepted [\d.]+%", line)
    assert status.tick() == (
        "0 running, 0 waiting; KV cache 0.0%; prompts 0.0 tokens/s, outputs 0.0 tokens/s"
    )
    assert status.tick() is None


def test_the_status_line_is_written_every_interval(
    build: BuildEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine, metrics = build()
    status = StatusLine(metrics)
    with caplog.at_level("INFO", logger="hotshoe"):
        status.start(0.005)
        add(engine, range(10))
        drain(engine)
        deadline = time.monotonic() + 30
        idle = r"0 running, 0 waiting; .*prompts 0\.0 tokens/s, outputs 0\.0"
        while not re.search(idle, caplog.text):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        status.stop()
    lines = [text for name, _, text in caplog.record_tuples if name == "hotshoe.metrics.status"]
    assert any("outputs 0.0 tokens/s" not in line for line in lines)
