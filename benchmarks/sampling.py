"""What it costs to turn the logits of a step into tokens: native, in torch, and by sorting.

The logits are the model's own, after a few tokens of different requests; or normal ones with
``--flat``, a distribution as wide as they come. Compared are the sampler ``cpu``, the sampler
``standard``, and what ``standard`` is defined by: sort the vocabulary, cumulate, filter, draw. They
take turns, so that a slow moment of the machine hits all. Median milliseconds per call as JSON on
standard output, by batch size and parameters.

    python benchmarks/sampling.py [--flat] [--num-threads 2] [--repeats 20] [--cpu-time]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hotshoe import LLM, SamplingParams
from hotshoe.api import (
    Candidates,
    Component,
    SampleInput,
    Sampler,
    SamplerContext,
    gumbel_max,
)
from hotshoe.testing.distributions import Filter
from hotshoe.testing.sampler import sample_input
from hotshoe_samplers import cpu, standard

BATCH_SIZES = (1, 8, 32)
VOCAB_SIZE = 49152
PARAMETERS = {
    "greedy": Filter(temperature=0),
    "plain": Filter(temperature=0.8),
    "top_k_50": Filter(temperature=0.8, top_k=50),
    "top_p_0.95": Filter(temperature=0.8, top_p=0.95),
    "min_p_0.05": Filter(temperature=0.8, min_p=0.05),
    "wide_top_p": Filter(temperature=1.5, top_p=0.99),
    "top_k_50_top_p_0.9": Filter(temperature=0.8, top_k=50, top_p=0.9),
}


class Recorder(Sampler):
    """Keeps the logits that it is asked to sample from."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def candidates(self, inputs: SampleInput) -> Candidates:
        """The plain distribution."""
        self.logits.append(inputs.logits.clone())
        return Candidates((inputs.logits / inputs.temperature[:, None]).softmax(-1))


def model_logits(num_rows: int) -> Tensor:
    """``[num_rows, V]`` float32 of the embedded model, in the midst of as many requests."""
    recorder = Recorder()
    prompts = [f"Tell me what happened in the year {1800 + 7 * row}." for row in range(num_rows)]
    with LLM(max_model_len=256, max_num_seqs=num_rows, sampler=recorder) as llm:
        llm.generate(prompts, SamplingParams(temperature=0.8, max_tokens=4, seed=1))
    return next(one for one in reversed(recorder.logits) if len(one) == num_rows)


def drawing(component: Component, num_threads: int | None = None) -> Callable[[SampleInput], None]:
    """A step of a sampler, as the core asks for it."""
    options = component.options.model_validate(
        {} if num_threads is None else {"num_threads": num_threads}
    )
    context = SamplerContext(device=torch.device("cpu"), vocab_size=VOCAB_SIZE)
    sampler = component.factory(options, context)
    assert isinstance(sampler, Sampler)
    return lambda inputs: _step(sampler, inputs)


def _step(sampler: Sampler, inputs: SampleInput) -> None:
    sampler.most_likely(inputs.logits)
    if not inputs.is_all_greedy:
        sampler.draw(inputs, _uniforms(inputs))


def sorting(inputs: SampleInput) -> None:
    """The definition of ``standard``, which sorts the vocabulary."""
    context = SamplerContext(device=torch.device("cpu"), vocab_size=VOCAB_SIZE)
    sampler = standard.build(standard.hotshoe_component().options(), context)
    gumbel_max(sampler.candidates(inputs), _uniforms(inputs))


def _uniforms(inputs: SampleInput) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).random(len(inputs.logits)))


def measure(
    ways: dict[str, Callable[[SampleInput], None]],
    logits: Tensor,
    chosen: Filter,
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Median milliseconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            inputs = sample_input(logits, [chosen] * len(logits))
            started = clock()
            way(inputs)
            times[name].append((clock() - started) * 1e3)
    return {name: round(statistics.median(found[1:]), 3) for name, found in times.items()}


def main() -> None:
    """Measure every batch size and parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flat", action="store_true", help="normal logits, not the model's")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="CPU time of the calling thread, for one thread on a busy machine",
    )
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.num_threads != 1:
        parser.error("--cpu-time counts one thread only; add --num-threads 1")
    torch.set_num_threads(arguments.num_threads)
    if arguments.flat:
        logits = torch.randn(
            max(BATCH_SIZES), VOCAB_SIZE, generator=torch.Generator().manual_seed(0)
        )
    else:
        logits = model_logits(max(BATCH_SIZES))
    ways = {
        "cpu": drawing(cpu.hotshoe_component(), arguments.num_threads),
        "standard": drawing(standard.hotshoe_component()),
        "sorting": sorting,
    }
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    results: dict[str, object] = {
        "unit": "ms of CPU time" if arguments.cpu_time else "ms",
        "num_threads": arguments.num_threads,
        "logits": "normal" if arguments.flat else "embedded model",
    }
    with torch.inference_mode():
        for size in BATCH_SIZES:
            results[f"batch_{size}"] = {
                name: measure(ways, logits[:size], chosen, arguments.repeats, clock)
                for name, chosen in PARAMETERS.items()
            }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
