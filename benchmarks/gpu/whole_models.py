"""Parts of the measurement that run models of random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from costs import ModelCosts
from job import MAX_NUM_BATCHED_TOKENS, Job, random_prompts
from sizes import Sizes
from timing import FOLLOWING_US, KernelTimes, idle_share

from hotshoe import LLM, SamplingParams
from hotshoe.api import StepRecord


def decode(job: Job, model: str) -> None:
    """Decode steps of several batches, a long prompt, and how idle the GPU is between the steps."""
    sizes = job.sizes
    costs = ModelCosts.of(sizes.models[model])
    batches = [
        (batch, context + num_tokens(sizes, batch, context)) for batch, context in sizes.decode
    ]
    recorded = {"record_batch_sizes": [batch for batch, _ in sizes.decode]}
    with job.llm(
        model, [*batches, (1, sizes.prefill_tokens + 2)], **_with(sizes, "kernels", recorded)
    ) as llm:
        figures = [_decode(job, llm, costs, batch, context) for batch, context in sizes.decode]
        _prefill(job, llm, costs)
        # last, because it may fail, and a profiler slows down what follows
        for known, (batch, context) in zip(figures, sizes.decode, strict=True):
            _idle(job, llm, batch, context, known)


def _decode(
    job: Job, llm: LLM, costs: ModelCosts, batch: int, context: int
) -> dict[str, float | None]:
    sizes = job.sizes
    step_s = median(decode_steps(llm, sizes, batch, context))
    # on average, over requests and steps
    num_seen = batch * (context + num_tokens(sizes, batch, context) // 2)
    num_params = costs.layer_params + costs.head_params
    num_bytes = job.dtype.itemsize * (num_params + costs.kv_params_per_token * num_seen)
    figures = {
        "step_ms": 1e3 * step_s,
        "output_tokens_per_s": batch / step_s,
        "share_of_bandwidth": job.bandwidth_share(num_bytes, step_s),
    }
    job.tell(f"batch {batch}, context {context}", figures)
    return figures


def _idle(job: Job, llm: LLM, batch: int, context: int, known: Mapping[str, float | None]) -> None:
    """Tell the figures of a batch once more, with how idle the GPU is."""
    intervals = kernel_times(llm, job.sizes, batch, context)
    job.tell(
        f"batch {batch}, context {context}",
        {
            **known,
            "idle_between_steps": idle_share(intervals, FOLLOWING_US),
            "idle_with_all_pauses": idle_share(intervals, 0.0),
        },
    )


def _prefill(job: Job, llm: LLM, costs: ModelCosts) -> None:
    length = job.sizes.prefill_tokens
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    times = []
    for number in range(5):
        prompt = random_prompts(job.sizes, f"prefill {number}", 1, length)
        started = time.perf_counter()
        llm.generate(prompt, params)
        times.append(time.perf_counter() - started)
    seconds = min(times[1:])
    num_pairs = length * (length + 1) / 2
    num_operations = 2 * (length * costs.layer_params + costs.head_params)
    num_operations += 4 * num_pairs * costs.attention_width
    job.tell(
        "prefill",
        {
            "num_tokens": length,
            "ms": 1e3 * seconds,
            "tokens_per_s": length / seconds,
            "share_of_matrix_rate": job.matrix_share(num_operations, seconds),
        },
    )


def switches(job: Job) -> None:
    """Decode steps with parts turned off that take away the time between kernels."""
    model, batches = job.sizes.switched
    sizes = job.sizes
    variants: dict[str, dict[str, Any]] = {
        "as it is": _with(sizes, "kernels", {"record_batch_sizes": list(batches)}),
        "no graphs": _with(sizes, "kernels", {"record": False}),
        "no overlap": {"executor": {"name": "uniproc", "options": {"max_in_flight": 1}}},
        "neither": {
            **_with(sizes, "kernels", {"record": False}),
            "executor": {"name": "uniproc", "options": {"max_in_flight": 1}},
        },
    }
    for name, changes in variants.items():
        context = 16
        lengths = [(batch, context + num_tokens(sizes, batch, context)) for batch in batches]
        with job.llm(model, lengths, **changes) as llm:
            for batch in batches:
                step_s = median(decode_steps(llm, sizes, batch, context))
                job.tell(f"{name}, batch {batch}", {"step_ms": 1e3 * step_s})


def _with(sizes: Sizes, section: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config section with changes to what the sizes say of it."""
    name = sizes.components.get(section)
    return {section: {**({"name": name} if name else {}), **changes}}


def num_tokens(sizes: Sizes, batch: int, context: int) -> int:
    """Output tokens of each request so that there are ``num_steps`` in which all decode: the first
    ones decode while the prompts of the last are computed.
    """
    return sizes.num_steps + batch * context // MAX_NUM_BATCHED_TOKENS + 3


def decode_steps(llm: LLM, sizes: Sizes, batch: int, context: int) -> list[float]:
    """Seconds from each step to the next in which all requests decode."""
    commits: list[tuple[bool, float]] = []

    def observe(record: StepRecord) -> None:
        is_full = record.num_decode_tokens == batch and not record.num_prefill_tokens
        commits.append((is_full, time.perf_counter()))

    _generate(llm, sizes, batch, context, observe)
    periods = [
        after - before
        for (was_full, before), (is_full, after) in pairwise(commits)
        if was_full and is_full
    ]
    if not periods:
        raise RuntimeError(f"no two steps had all {batch} requests with contexts of {context}")
    return periods


def kernel_times(llm: LLM, sizes: Sizes, batch: int, context: int) -> list[tuple[float, float]]:
    """When kernels ran during steps in which all requests decode."""
    num_steps = 0
    times = KernelTimes()
    found: list[tuple[float, float]] = []

    def observe(record: StepRecord) -> None:
        nonlocal num_steps, found
        if record.num_decode_tokens == batch and not record.num_prefill_tokens:
            num_steps += 1
            if num_steps == 2:
                times.start()
            elif num_steps == sizes.num_steps - 1:
                found = times.stop()

    try:
        _generate(llm, sizes, batch, context, observe)
    finally:
        if times.is_running:
            found = times.stop()
    return found[len(found) // 8 :]  # the first ones come while the profiler starts


def _generate(
    llm: LLM, sizes: Sizes, batch: int, context: int, observe: Callable[[StepRecord], None]
) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens(sizes, batch, context),
        ignore_eos=True,
        detokenize=False,
    )
    llm.on_step(observe)
    try:
        llm.generate(random_prompts(sizes, f"{batch}/{context}", batch, context), params)
    finally:
        llm.engine.step_observers.remove(observe)
