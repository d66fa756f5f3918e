"""Run a workload on an engine, and turn what its requests report into figures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

from hotshoe.api import SamplingParams, StepRecord, StructuredOutputs
from hotshoe.bench.machine import ForeignLoad
from hotshoe.bench.workloads import Workload
from hotshoe.engine.request import RequestMetrics
from hotshoe.entrypoints.llm import LLM
from hotshoe.entrypoints.outputs import RequestOutput

Figures = dict[str, Any]


def measure(llm: LLM, workload: Workload, *, repetitions: int) -> list[Figures]:
    """Run it so many times, each from an empty prefix cache, after one run of it cut short.

    Returns:
        Figures per repetition; those of each part under its name if the workload has parts.
    """
    for part, prompts in _parts(workload):
        _run(llm, prompts, min(workload.max_tokens, 2), workload.constraints.get(part))
    return [_repetition(llm, workload) for _ in range(repetitions)]


def summarise(repetitions: Sequence[Mapping[str, Any]]) -> Figures:
    """The median of each figure over the repetitions."""
    summary: Figures = {}
    for key, first in repetitions[0].items():
        values = [one[key] for one in repetitions]
        if isinstance(first, Mapping):
            summary[key] = summarise(values)
        elif any(value is None for value in values):
            summary[key] = None
        else:
            summary[key] = median(values)
    return summary


def _repetition(llm: LLM, workload: Workload) -> Figures:
    llm.reset_prefix_cache()
    figures = {}
    for part, prompts in _parts(workload):
        constraint = workload.constraints.get(part)
        figures[part] = _measured_run(llm, prompts, workload.max_tokens, constraint)
    return figures if workload.parts else figures[""]


def _parts(workload: Workload) -> Iterator[tuple[str, list[list[int]]]]:
    """Name and prompts of each part; one without a name if the workload has none."""
    for part, members in (workload.parts or {"": range(len(workload.prompts))}).items():
        yield part, [workload.prompts[at] for at in members]


def _measured_run(
    llm: LLM, prompts: Sequence[list[int]], max_tokens: int, constraint: StructuredOutputs | None
) -> Figures:
    load = ForeignLoad()
    with _watched(llm) as steps:
        started = time.perf_counter()
        outputs = _run(llm, prompts, max_tokens, constraint)
        elapsed_s = time.perf_counter() - started
    share = load.share()
    return {
        **_rates(outputs, elapsed_s),
        **_latencies([_metrics(output) for output in outputs]),
        **_step_figures(steps),
        "foreign_cpu_share": None if share is None else round(share, 3),
    }


def _run(
    llm: LLM, prompts: Sequence[list[int]], max_tokens: int, constraint: StructuredOutputs | None
) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=constraint is None,
        detokenize=False,
        structured_outputs=constraint,
    )
    return llm.generate(list(prompts), params)


def _rates(outputs: Sequence[RequestOutput], elapsed_s: float) -> Figures:
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "elapsed_s": elapsed_s,
        "num_prompt_tokens": num_prompt_tokens,
        "num_cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "num_output_tokens": num_output_tokens,
        "output_tokens_per_s": num_output_tokens / elapsed_s,
        "total_tokens_per_s": (num_prompt_tokens + num_output_tokens) / elapsed_s,
        "requests_per_s": len(outputs) / elapsed_s,
    }


def _latencies(metrics: Sequence[RequestMetrics]) -> Figures:
    """Over all requests: time to the first token, time per output token, gaps between tokens.

    The time per output token is a request's mean after its first; a gap is 0 between tokens of one
    step, as drafts bring them.
    """
    firsts = [one.time_to_first_token_s or 0.0 for one in metrics]
    gaps = [gap for one in metrics for gap in one.inter_token_times_s]
    means = [
        sum(one.inter_token_times_s) / len(one.inter_token_times_s)
        for one in metrics
        if one.inter_token_times_s
    ]
    return {
        "ttft_ms": _spread(firsts),
        "tpot_ms": _spread(means),
        "inter_token_ms": _spread(gaps),
        "num_preemptions": sum(one.num_preemptions for one in metrics),
        "num_draft_tokens": sum(one.num_draft_tokens for one in metrics),
        "num_accepted_tokens": sum(one.num_accepted_tokens for one in metrics),
    }


def _step_figures(steps: Sequence[StepRecord]) -> Figures:
    """How many steps, how many requests ran at most, and where a step's time goes on average."""
    stages: Counter[str] = Counter()
    for step in steps:
        stages.update(step.timings_s)
    return {
        "num_steps": len(steps),
        "max_running": max((step.num_running for step in steps), default=0),
        "step_ms": {stage: 1e3 * total / len(steps) for stage, total in stages.items()},
    }


def _spread(seconds: Sequence[float]) -> Figures:
    """Median and 90th percentile in milliseconds."""
    if not seconds:
        return {"median": None, "p90": None}
    if len(seconds) == 1:
        return {"median": 1e3 * seconds[0], "p90": 1e3 * seconds[0]}
    p90 = quantiles(seconds, n=10, method="inclusive")[-1]
    return {"median": 1e3 * median(seconds), "p90": 1e3 * p90}


def _metrics(output: RequestOutput) -> RequestMetrics:
    metrics = output.outputs[0].metrics
    assert metrics is not None  # the request has finished
    return metrics


@contextmanager
def _watched(llm: LLM) -> Iterator[list[StepRecord]]:
    steps: list[StepRecord] = []
    llm.on_step(steps.append)
    try:
        yield steps
    finally:
        llm.engine.step_observers.remove(steps.append)
