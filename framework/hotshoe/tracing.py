"""OpenTelemetry traces: one span per API request, with the time in the queue, in prefill and in
decode below it. Needs the extra ``hotshoe[otel]``; nothing is imported unless
``server.otlp_endpoint`` is set.

Names follow the semantic conventions for generative AI; what they lack is under ``hotshoe.``.
Prompts and outputs are never part of a span.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hotshoe import __version__
from hotshoe.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from hotshoe.api import SamplingParams
    from hotshoe.config import EngineConfig
    from hotshoe.engine.request import RequestMetrics
    from hotshoe.entrypoints.outputs import RequestOutput

FROM_ENVIRONMENT = "environment"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_TRACE_HEADERS = ("traceparent", "tracestate")
_SAMPLING_ATTRIBUTES = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)


def configure_tracing(config: EngineConfig) -> Tracing | None:
    """What ``server.otlp_endpoint`` asks for: None without it.

    Everything else is read by the OpenTelemetry SDK from its standard variables, such as
    ``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER`` and ``OTEL_EXPORTER_OTLP_HEADERS``.

    Raises:
        ConfigError: if the library is not installed, or the address is none.
    """
    endpoint = check_tracing(config)
    if endpoint is None:
        return None
    arguments = {} if endpoint == FROM_ENVIRONMENT else {"endpoint": endpoint}
    return Tracing(importlib.import_module(_EXPORTER).OTLPSpanExporter(**arguments))


def check_tracing(config: EngineConfig) -> str | None:
    """Make sure that ``configure_tracing`` will work; returns where traces go, None if nowhere.

    Raises:
        ConfigError: as ``configure_tracing``.
    """
    endpoint = config.server.otlp_endpoint
    if endpoint is None:
        return None
    target = endpoint if endpoint == FROM_ENVIRONMENT else _traces_url(endpoint)
    try:
        for module in ("opentelemetry.sdk.trace", _EXPORTER):
            importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"server.otlp_endpoint is {endpoint!r} but OpenTelemetry can't be imported ({error}); "
            "install hotshoe[otel], or set server.otlp_endpoint to none"
        ) from error
    return target


def start_request_span(
    tracing: Tracing | None,
    headers: Mapping[str, str],
    *,
    operation: str,
    model: str,
    request_id: str,
    params: SamplingParams | None = None,
    stream: bool = False,
) -> RequestSpan:
    """Begin the span of one API request, below the caller's if its headers name one.

    End it with ``finish`` or ``fail``, or use it as a context manager; the first end counts.

    Args:
        tracing: what ``configure_tracing`` returned; None: the span does nothing.
        headers: of the HTTP request; ``traceparent`` and ``tracestate`` are looked at (W3C Trace
            Context).
        operation: ``chat`` or ``text_completion``.
        model: as the client called it.
        request_id: the ``X-Request-Id`` of the exchange.
        params: how it samples.
        stream: whether the answer is streamed.
    """
    if tracing is None:
        return NO_SPAN
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "hotshoe",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "hotshoe.request_id": request_id,
        "gen_ai.request.stream": stream,
        **_sampling_attributes(params),
    }
    carrier = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
    return tracing.start(f"{operation} {model}", carrier, attributes)


class Tracing:
    """Where spans go. One per API server process.

    Args:
        exporter: sends spans away; given batches by a thread of its own.
        is_batched: False = each span is exported as it ends.
    """

    def __init__(self, exporter: SpanExporter, *, is_batched: bool = True) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider: TracerProvider = TracerProvider(resource=_resource())
        processor = BatchSpanProcessor if is_batched else SimpleSpanProcessor
        self._provider.add_span_processor(processor(exporter))
        self._tracer = self._provider.get_tracer("hotshoe", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, Any]
    ) -> RequestSpan:
        """Begin a span; ``start_request_span`` knows what to call it."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(carrier)
        span = self._tracer.start_span(
            name, context=context, kind=SpanKind.SERVER, attributes=dict(attributes)
        )
        return _RecordedSpan(self, span)

    def add_phase(
        self, parent: Span, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, Any]
    ) -> None:
        """A span below another, of a time that is over."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            attributes=dict(attributes),
            start_time=start_ns,
        )
        span.end(end_ns)

    def close(self) -> None:
        """Export what is left, and stop."""
        self._provider.shutdown()


class RequestSpan:
    """The span of a request; this one does nothing."""

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        """The request has been answered; one output per prompt, at least one."""

    def fail(self, error: BaseException | str, *, status: int | None = None) -> None:
        """The request failed, or its client left.

        Args:
            error: what happened; of an exception the type is told, not its words, which may
                quote the request.
            status: HTTP status of the answer; below 500 the error is the client's.
        """

    def __enter__(self) -> RequestSpan:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.fail(error)


NO_SPAN = RequestSpan()


class _RecordedSpan(RequestSpan):
    """A span that is exported."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        if not self._span.is_recording():
            return
        end_ns = time.time_ns()
        choices = [choice for output in outputs for choice in output.outputs]
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": sum(len(one.prompt_token_ids) for one in outputs),
                "gen_ai.usage.output_tokens": sum(len(one.token_ids) for one in choices),
                "gen_ai.usage.cache_read.input_tokens": sum(
                    one.num_cached_tokens for one in outputs
                ),
                "gen_ai.response.finish_reasons": [one.finish_reason or "" for one in choices],
            }
        )
        for index, choice in enumerate(choices):
            if choice.metrics is not None:
                own = {"hotshoe.choice_index": index} if len(choices) > 1 else {}
                self._add_phases(choice.metrics, end_ns, own)
        known = [one.metrics for one in choices if one.metrics is not None]
        seconds = [one.time_to_first_token_s for one in known if one.time_to_first_token_s]
        if seconds:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", min(seconds))
        failed = next((one for one in choices if one.finish_reason == "error"), None)
        if failed is not None:
            self.fail("engine_error")
        else:
            self._span.end(end_ns)

    def fail(self, error: BaseException | str, *, status: int | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        if not self._span.is_recording():
            return
        kind = error if isinstance(error, str) else type(error).__qualname__
        self._span.set_attribute("error.type", kind)
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        if status is None or status >= 500:
            # what a client did wrong is no error of a server's span
            self._span.set_status(Status(StatusCode.ERROR, kind))
        self._span.end()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        if self._span.is_recording():
            self._span.end()

    def _add_phases(
        self, metrics: RequestMetrics, end_ns: int, attributes: Mapping[str, Any]
    ) -> None:
        """Spans of queue, prefill and decode. The engine's clock has an origin of its own, so they
        are laid out backwards from the end.
        """
        scheduled, times = metrics.first_scheduled_time_s, metrics.token_times_s
        if scheduled is None or not times:
            return

        def moment(engine_time_s: float) -> int:
            return end_ns - round((times[-1] - engine_time_s) * 1e9)

        phases = {
            "queue": (metrics.arrival_time_s, scheduled, {}),
            "prefill": (
                scheduled,
                times[0],
                {"hotshoe.num_cached_tokens": metrics.num_cached_tokens},
            ),
            "decode": (
                times[0],
                times[-1],
                {
                    "hotshoe.num_output_tokens": len(times),
                    "hotshoe.num_preemptions": metrics.num_preemptions,
                    "hotshoe.num_draft_tokens": metrics.num_draft_tokens,
                    "hotshoe.num_accepted_tokens": metrics.num_accepted_tokens,
                },
            ),
        }
        for name, (start_s, end_s, own) in phases.items():
            self._tracing.add_phase(
                self._span, name, moment(start_s), moment(end_s), {**own, **attributes}
            )


def _sampling_attributes(params: SamplingParams | None) -> dict[str, Any]:
    if params is None:
        return {}
    found = {
        f"gen_ai.request.{name}": value
        for name in _SAMPLING_ATTRIBUTES
        # a value beyond 64 bits with sign would make the exporter drop its whole batch
        if (value := getattr(params, name)) is not None and value < 2**63
    }
    if not params.top_k:
        del found["gen_ai.request.top_k"]
    if params.n > 1:
        found["gen_ai.request.choice.count"] = params.n
    return found


def _traces_url(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"server.otlp_endpoint: got {endpoint!r}, allowed: an http:// or https:// address, "
            f"{FROM_ENVIRONMENT!r}, or none"
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _resource() -> Any:
    """What describes this process; called hotshoe unless the environment names it."""
    from opentelemetry.sdk.resources import Resource

    found = Resource.create({"service.version": __version__})
    name = str(found.attributes.get("service.name", ""))
    if name and not name.startswith("unknown_service"):
        return found
    return found.merge(Resource({"service.name": "hotshoe"}))
