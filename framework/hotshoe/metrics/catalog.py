"""Every metric that is exported: name, kind, labels, meaning, buckets. The documentation and the
dashboard are tested against this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "hotshoe:"
ALIAS_PREFIX = "vllm:"

COMMON_LABELS = ("model_name", "engine")

_LATENCY_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_TIME_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_TIME_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 10.0),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric.

    Attributes:
        name: without prefix; samples of a counter end in ``_total``.
        kind: as Prometheus calls it.
        help: what it counts, for people.
        labels: besides ``COMMON_LABELS``.
        buckets: upper bounds of a histogram; ``lengths``: 1, 2, 5, 10 … up to the longest request.
        has_alias: whether dashboards know it under the ``vllm:`` prefix too.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | Literal["lengths"] = ()
    has_alias: bool = True

    def bounds(self, max_model_len: int) -> tuple[float, ...]:
        """Upper bounds of the buckets, but for the last, which is infinite."""
        if not isinstance(self.buckets, str):
            return self.buckets
        return tuple(
            digit * 10**power
            for power in range(len(str(max_model_len)))
            for digit in (1, 2, 5)
            if digit * 10**power <= max_model_len
        )


METRICS: tuple[Metric, ...] = (
    # -- now
    Metric("num_requests_running", "gauge", "Requests that hold a row of the batch."),
    Metric("num_requests_waiting", "gauge", "Requests that wait, preempted ones among them."),
    Metric("kv_cache_usage_perc", "gauge", "Share of the KV blocks in use, 0 to 1."),
    Metric(
        "cache_config_info",
        "gauge",
        "Always 1; the labels describe the KV cache.",
        ("block_size", "num_blocks", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
    ),
    Metric(
        "engine_info",
        "gauge",
        "Always 1; the labels say what was assembled.",
        ("version", "dtype", "device", "max_model_len", "components"),
        has_alias=False,
    ),
    Metric(
        "stuck_compile_threads",
        "gauge",
        "Threads that still compile a constraint that was given up.",
        has_alias=False,
    ),
    # -- tokens
    Metric(
        "prompt_tokens",
        "counter",
        "Tokens of prompts whose first output token has come, cached ones included.",
    ),
    Metric(
        "prompt_tokens_cached", "counter", "The part of prompt_tokens that the prefix cache had."
    ),
    Metric("generation_tokens", "counter", "Output tokens."),
    Metric(
        "prefix_cache_queries",
        "counter",
        "Tokens looked up in the prefix cache; a preempted request looks again.",
    ),
    Metric("prefix_cache_hits", "counter", "Tokens that the prefix cache supplied."),
    Metric(
        "prefix_cache_evictions",
        "counter",
        "Cached blocks given up for new ones.",
        has_alias=False,
    ),
    Metric("num_preemptions", "counter", "Times that a running request was sent back to wait."),
    # -- steps
    Metric(
        "iteration_tokens_total",
        "histogram",
        "Tokens computed in a step: prompts, outputs and drafts.",
        buckets=_STEP_TOKEN_BUCKETS,
    ),
    Metric(
        "step_time_seconds",
        "histogram",
        "Duration of a step in the worker.",
        buckets=_STEP_TIME_BUCKETS,
        has_alias=False,
    ),
    Metric(
        "step_stage_seconds",
        "counter",
        "Time spent in each stage of the steps.",
        ("stage",),
        has_alias=False,
    ),
    # -- latency
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "From the arrival of a request to its first token.",
        buckets=_TTFT_BUCKETS,
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "From one output of a request to the next; tokens of the same step count as one output.",
        buckets=_TOKEN_TIME_BUCKETS,
    ),
    Metric(
        "time_per_output_token_seconds",
        "histogram",
        "The same as inter_token_latency_seconds, under its older name.",
        buckets=_TOKEN_TIME_BUCKETS,
    ),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "Mean time per output token of a request, the first token left out.",
        buckets=_TOKEN_TIME_BUCKETS,
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "From the arrival of a request to its end.",
        buckets=_LATENCY_BUCKETS,
    ),
    Metric(
        "request_queue_time_seconds",
        "histogram",
        "From the arrival of a request to the first step that ran it.",
        buckets=_LATENCY_BUCKETS,
    ),
    Metric(
        "request_constraint_time_seconds",
        "histogram",
        "From the arrival of a request to its compiled or refused constraint, if it has one.",
        buckets=_TTFT_BUCKETS,
        has_alias=False,
    ),
    Metric(
        "request_prefill_time_seconds",
        "histogram",
        "From the first step that ran a request to its first token.",
        buckets=_LATENCY_BUCKETS,
    ),
    Metric(
        "request_decode_time_seconds",
        "histogram",
        "From the first token of a request to its last.",
        buckets=_LATENCY_BUCKETS,
    ),
    Metric(
        "request_inference_time_seconds",
        "histogram",
        "From the first step that ran a request to its last token.",
        buckets=_LATENCY_BUCKETS,
    ),
    # -- requests
    Metric(
        "request_success",
        "counter",
        "Requests that ended, by how: stop, length, abort or error.",
        ("finished_reason",),
    ),
    Metric("request_prompt_tokens", "histogram", "Prompt tokens of a request.", buckets="lengths"),
    Metric(
        "request_generation_tokens", "histogram", "Output tokens of a request.", buckets="lengths"
    ),
    Metric(
        "request_max_num_generation_tokens",
        "histogram",
        "Output tokens of the longest of a prompt's n choices.",
        buckets="lengths",
    ),
    Metric("request_params_max_tokens", "histogram", "max_tokens of a request.", buckets="lengths"),
    Metric(
        "request_params_n",
        "histogram",
        "Choices that a prompt asked for.",
        buckets=(1, 2, 5, 10, 20),
    ),
    Metric(
        "request_num_preemptions",
        "histogram",
        "How often a request was preempted.",
        buckets=(0, 1, 2, 5, 10),
        has_alias=False,
    ),
    # -- speculative decoding
    Metric("spec_decode_num_drafts", "counter", "Times that a request had drafts verified."),
    Metric("spec_decode_num_draft_tokens", "counter", "Draft tokens verified."),
    Metric("spec_decode_num_accepted_tokens", "counter", "Draft tokens kept."),
    Metric(
        "spec_decode_num_draft_tokens_per_pos",
        "counter",
        "Draft tokens verified, by their place in the draft.",
        ("position",),
        has_alias=False,
    ),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Draft tokens kept, by their place in the draft.",
        ("position",),
    ),
    Metric(
        "spec_decode_acceptance_per_position",
        "gauge",
        "Share of the draft tokens verified so far that was kept, by their place in the draft.",
        ("position",),
        has_alias=False,
    ),
    Metric(
        "spec_decode_accepted_length",
        "histogram",
        "Draft tokens kept of each draft that was verified.",
        buckets=(0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64),
        has_alias=False,
    ),
    Metric(
        "spec_decode_num_requests_not_drafted",
        "gauge",
        "Requests of the last step that there are no drafts for because they don't pay.",
        has_alias=False,
    ),
    # -- HTTP, over all API server processes
    Metric(
        "http_requests",
        "counter",
        "HTTP requests answered, over all API server processes.",
        ("method", "handler", "status"),
        has_alias=False,
    ),
    Metric(
        "http_request_duration_seconds",
        "histogram",
        "From an HTTP request to the end of its response, over all API server processes.",
        ("handler",),
        buckets=_LATENCY_BUCKETS,
        has_alias=False,
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}


def sample_names(metric: Metric) -> list[str]:
    """The names that its samples have, without prefix."""
    if metric.kind == "counter":
        return [f"{metric.name}_total"]
    if metric.kind == "histogram":
        return [f"{metric.name}_{part}" for part in ("bucket", "count", "sum")]
    return [metric.name]
