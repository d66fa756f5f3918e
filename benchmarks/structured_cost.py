"""What a constraint adds to a token, in CPU time of the one thread that does everything.

    OMP_NUM_THREADS=1 python benchmarks/structured_cost.py --output FILE.json

Each run has the same prompts, free and constrained, in batches of 1 and 16, greedy and drawn, with
compiled constraints and their masks kept from the runs before; the figure is the thread's mean time
per token of each request, the smallest of several repeats. Time of one thread says how much work
there is, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from hotshoe import LLM, SamplingParams
from hotshoe.api import StructuredOutputs
from hotshoe.bench.machine import describe_machine, describe_versions
from hotshoe.bench.workloads import PATTERN, SCHEMA

CONSTRAINTS: dict[str, dict[str, Any]] = {
    "free": {},
    "json": {"json": json.dumps(SCHEMA)},
    "json_object": {"json_object": True},
    "regex": {"regex": PATTERN},
}


METHOD = (
    "CPU time of the engine's one thread per token of each request, mean of a run, smallest of the "
    "repeats; constraints and the masks of runs before are kept"
)
PEOPLE = ("a fisher", "a queen", "a baker", "a pilot", "a nurse", "a poet", "a thief", "a judge")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--backends", nargs="+", default=["xgrammar", "llguidance"])
    parser.add_argument(
        "--no-jump-forward", action="store_true", help="don't draft tokens that constraints force"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    first, *others = arguments.backends
    figures: dict[str, dict[str, float]] = {}
    guided_decoding: dict[str, Any] = {"name": first, "others": others}
    if arguments.no_jump_forward:
        guided_decoding["jump_forward"] = False
    with LLM(quantization="gguf", guided_decoding=guided_decoding) as llm:
        for temperature, batch_size in ((0.0, 1), (0.0, 16), (1.0, 1), (1.0, 16)):
            wanted = _params(arguments.backends, temperature, arguments.max_tokens)
            # in turns, so that what else the machine does meets all of them
            runs = [
                {name: _token_ms(llm, batch_size, params) for name, params in wanted.items()}
                for _ in range(arguments.repetitions + 1)
            ][1:]
            free = min(run["free"]["token_thread_ms"] for run in runs)
            for name in wanted:
                found = {key: min(run[name][key] for run in runs) for key in runs[0][name]}
                found["percent_more"] = round(100 * (found["token_thread_ms"] / free - 1), 1)
                label = f"{name} x {batch_size}{', drawn' if temperature else ''}"
                figures[label] = found
                print(label, found, flush=True)
    if arguments.output:
        record = {
            "command": "OMP_NUM_THREADS=1 python benchmarks/structured_cost.py "
            f"--repetitions {arguments.repetitions} --max-tokens {arguments.max_tokens}"
            f"{' --no-jump-forward' if arguments.no_jump_forward else ''}",
            "method": METHOD,
            "machine": describe_machine(),
            "versions": describe_versions(),
            "figures": figures,
        }
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


def _params(backends: list[str], temperature: float, max_tokens: int) -> dict[str, SamplingParams]:
    """By constraint and backend."""
    found = {}
    for name, constraint in CONSTRAINTS.items():
        for backend in backends if constraint else [None]:
            asked = StructuredOutputs(**constraint, backend=backend) if constraint else None
            found[f"{name}, {backend}" if backend else name] = SamplingParams(
                temperature=temperature,
                seed=0,
                max_tokens=max_tokens,
                ignore_eos=asked is None,
                structured_outputs=asked,
            )
    return found


def _token_ms(llm: LLM, batch_size: int, params: SamplingParams) -> dict[str, float]:
    """Mean time per token while the whole batch decodes: all of it, and that of sampling."""
    prompts = []
    for index in range(batch_size):
        request = f"Describe {PEOPLE[index % len(PEOPLE)]} as JSON: name, age, city and tags."
        prompts.append(llm.tokenizer.apply_chat_template([{"role": "user", "content": request}]))
    samples: list[tuple[float, float, float]] = []
    marks = [time.thread_time()]

    def observe(record: Any) -> None:
        now = time.thread_time()
        if len(record.num_scheduled_tokens) == batch_size and not record.num_prefill_tokens:
            num_tokens = record.num_new_tokens / batch_size
            samples.append((now - marks[0], record.timings_s["sample"], num_tokens))
        marks[0] = now

    llm.engine.step_observers.append(observe)
    try:
        llm.generate(prompts, params)
    finally:
        llm.engine.step_observers.remove(observe)
    wholes, sampling, num_tokens = zip(*samples[1:], strict=True)
    return {
        "token_thread_ms": round(1e3 * sum(wholes) / sum(num_tokens), 3),
        "sample_wall_ms": round(1e3 * sum(sampling) / sum(num_tokens), 3),
    }


if __name__ == "__main__":
    main()
