"""Traces of a real server, at a collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from hotshoe.entrypoints.cli.main import main
from server.command import start_server

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


class Collector(BaseHTTPRequestHandler):
    """Takes what an exporter sends."""

    received: list[bytes] = []  # noqa: RUF012  # one collector per test run

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["Content-Length"])))
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


@pytest.mark.slow
def test_requests_of_every_endpoint_arrive_in_the_callers_trace(
    roomy_path: Path, collector: str
) -> None:
    pytest.importorskip("google.protobuf", reason="hotshoe[otel] is not installed")
    messages = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
        reason="hotshoe[otel] is not installed",
    )
    flags = ("--max-model-len", "8192", "--server.served-model-name", "tiny")
    conversation = [{"role": "user", "content": "hello"}]
    bodies = {
        "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 4, "ignore_eos": True},
        "/v1/chat/completions": {"messages": conversation, "max_tokens": 4, "stream": True},
        "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    }
    with start_server(str(roomy_path), *flags, "--server.otlp-endpoint", collector) as server:
        headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01", "x-request-id": "mine"}
        with httpx.Client(base_url=server.url, timeout=60, headers=headers) as http:
            for path, body in bodies.items():
                assert http.post(path, json=body).status_code == 200
            endless = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=endless) as response:
                next(response.iter_lines())
    spans = [
        span
        for one in Collector.received
        for resource in messages.ExportTraceServiceRequest.FromString(one).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    requests = [span for span in spans if span.name.endswith(" tiny")]
    assert sorted(span.name for span in requests) == [
        *("chat tiny", "chat tiny", "text_completion tiny", "text_completion tiny")
    ]
    attributes = [{one.key: one.value for one in span.attributes} for span in requests]
    assert {one["hotshoe.request_id"].string_value for one in attributes} == {"mine"}
    assert [one["error.type"].string_value for one in attributes if "error.type" in one] == [
        "aborted"
    ]
    # two prompts have two decodes
    assert [span.name for span in spans].count("decode") == 4


def test_tracing_that_can_not_work_stops_the_start(
    tiny_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--server.port", "0", "--server.otlp-endpoint", "collector:4318"]
    assert main(["serve", str(tiny_path), *flags]) == 2
    assert "server.otlp_endpoint: got 'collector:4318', allowed: an http://" in (
        capsys.readouterr().err
    )
