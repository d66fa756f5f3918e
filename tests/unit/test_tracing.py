"""Spans of requests that a real engine has served, as an exporter gets them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from hotshoe import LLM, SamplingParams
from hotshoe.config import EngineConfig, load_config
from hotshoe.errors import ConfigError, RequestError
from hotshoe.tracing import RequestSpan, Tracing, configure_tracing, start_request_span

TRACE_ID, CALLER_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01", "tracestate": "acme=1"}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    one = Tracing(exporter, is_batched=False)
    yield one
    one.close()


def begin(
    tracing: Tracing | None, headers: dict[str, str] | None = None, **arguments: object
) -> RequestSpan:
    settings = {"operation": "chat", "model": "tiny", "request_id": "req-1", "params": GREEDY}
    return start_request_span(tracing, headers or {}, **(settings | arguments))  # type: ignore[arg-type]


def spans_by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def config(**server: object) -> EngineConfig:
    return load_config(None, overrides={"server": server}).config


def test_a_request_has_a_span_with_its_phases_below_it(
    llm: LLM, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    before_ns = time.time_ns()
    span = begin(tracing, HEADERS, stream=True)
    output = llm.generate("hello there", GREEDY)[0]
    span.finish([output])
    after_ns = time.time_ns()
    spans = spans_by_name(exporter)
    assert set(spans) == {"chat tiny", "queue", "prefill", "decode"}
    request = spans["chat tiny"]
    assert request.kind is SpanKind.SERVER
    attributes = dict(request.attributes or {})
    first_chunk = attributes.pop("gen_ai.response.time_to_first_chunk")
    metrics = output.outputs[0].metrics
    assert metrics is not None
    assert first_chunk == metrics.time_to_first_token_s
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "hotshoe",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "hotshoe.request_id": "req-1",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
    }
    # one after the other, within their request
    edges = [before_ns, request.start_time or 0]
    for name in ("queue", "prefill", "decode"):
        phase = spans[name]
        assert phase.parent is not None
        assert phase.parent.span_id == request.context.span_id
        edges += [phase.start_time or 0, phase.end_time or 0]
    edges += [request.end_time or 0, after_ns]
    assert edges == sorted(edges)
    decode = (spans["decode"].end_time or 0) - (spans["decode"].start_time or 0)
    expected = metrics.token_times_s[-1] - metrics.token_times_s[0]
    assert decode / 1e9 == pytest.approx(expected, abs=1e-6)


def test_the_span_continues_the_callers_trace(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    begin(tracing, HEADERS).fail("client_disconnected")
    begin(tracing).fail("client_disconnected")
    begin(tracing, {"traceparent": "garbage"}).fail("client_disconnected")
    inherited, *others = exporter.get_finished_spans()
    assert inherited.parent is not None
    assert f"{inherited.context.trace_id:032x}" == TRACE_ID
    assert f"{inherited.parent.span_id:016x}" == CALLER_ID
    assert inherited.context.trace_state.get("acme") == "1"
    assert [span.parent for span in others] == [None, None]


def test_a_caller_that_is_not_sampled_is_not_traced(
    llm: LLM, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    span = begin(tracing, {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-00"})
    span.finish(llm.generate("a", GREEDY))
    assert exporter.get_finished_spans() == ()


def test_every_choice_has_its_phases(
    llm: LLM, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    params = SamplingParams(n=2, temperature=1.0, seed=2**64 - 1, max_tokens=4, ignore_eos=True)
    with begin(tracing, params=params) as span:
        span.finish(llm.generate("x", params))
    finished = exporter.get_finished_spans()
    decodes = [dict(one.attributes or {}) for one in finished if one.name == "decode"]
    assert [one["hotshoe.choice_index"] for one in decodes] == [0, 1]
    attributes = dict(spans_by_name(exporter)["chat tiny"].attributes or {})
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.usage.output_tokens"] == 8
    # it doesn't fit into an attribute
    assert "gen_ai.request.seed" not in attributes


def test_errors_are_named_without_their_words(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(RequestError), begin(tracing):
        raise RequestError("secret prompt")
    begin(tracing).fail(RequestError("secret prompt"), status=400)
    begin(tracing).fail(RuntimeError("secret prompt"), status=500)
    unexpected, refused, failed = exporter.get_finished_spans()
    assert unexpected.status.status_code is StatusCode.ERROR
    assert dict(refused.attributes or {})["error.type"] == "RequestError"
    assert dict(refused.attributes or {})["http.response.status_code"] == 400
    assert refused.status.status_code is StatusCode.UNSET
    assert failed.status.description == "RuntimeError"
    assert "secret" not in "".join(span.to_json() for span in (unexpected, refused, failed))


def test_only_the_first_end_counts(
    llm: LLM, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    output = llm.generate("a", GREEDY)[0]
    with begin(tracing) as span:
        span.fail("client_disconnected")
        span.finish([output])
    assert [one.name for one in exporter.get_finished_spans()] == ["chat tiny"]


def test_without_an_endpoint_nothing_is_imported_and_spans_do_nothing(llm: LLM) -> None:
    assert configure_tracing(config()) is None
    with begin(None, HEADERS) as span:
        span.finish(llm.generate("a", GREEDY))
        span.fail("late")
    assert begin(None) is span
    code = (
        "import sys, hotshoe.tracing as t; from hotshoe.config import EngineConfig\n"
        "t.start_request_span(t.configure_tracing(EngineConfig()), {}, operation='chat',"
        " model='m', request_id='r').fail('x')\n"
        "sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:4318", "environment"])
def test_a_missing_library_is_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    for name in [one for one in sys.modules if one.startswith("opentelemetry.exporter.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"OpenTelemetry can't be imported .*hotshoe\[otel\]"):
        configure_tracing(config(otlp_endpoint=endpoint))


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "localhost", "grpc://a:1", "http://"])
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.otlp_endpoint: got .* an http:// or https://"):
        configure_tracing(config(otlp_endpoint=endpoint))


class Collector(BaseHTTPRequestHandler):
    """Takes what an exporter sends."""

    received: list[tuple[str, bytes]] = []  # noqa: RUF012  # one server per test run

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
    Collector.received.clear()


@pytest.mark.parametrize("is_from_environment", [False, True])
def test_spans_arrive_at_a_collector(
    collector: str, monkeypatch: pytest.MonkeyPatch, is_from_environment: bool
) -> None:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        reason="hotshoe[otel] is not installed",
    )
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-llm")
    endpoint = collector
    if is_from_environment:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector)
        endpoint = "environment"
    tracing = configure_tracing(config(otlp_endpoint=endpoint))
    assert tracing is not None
    begin(tracing, HEADERS).fail("client_disconnected")
    tracing.close()
    ((path, body),) = Collector.received
    assert path == "/v1/traces"
    assert bytes.fromhex(TRACE_ID) in body
    assert b"chat tiny" in body
    assert b"my-llm" in body
