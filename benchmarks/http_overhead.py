"""What serving over HTTP costs beside the offline engine, on one workload and one machine.

Two figures: the share of throughput that is lost at 32 concurrent streams, and the time that is
added per token to a single stream. A server (`hotshoe serve`, a process of its own) and an offline
engine are alive together, with the same configuration; they run the workload in turns, in changing
order, and the figure is the median over the pairs. The load comes from this process. JSON on
standard output, or in --output.

    python benchmarks/http_overhead.py [MODEL] [--repetitions 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from hotshoe import LLM, SamplingParams
from hotshoe.bench.datasets import PlannedRequest
from hotshoe.bench.load import LoadSettings, RequestRecord, run_load
from hotshoe.bench.machine import describe_machine, describe_versions, read_bandwidth_gb_per_s
from hotshoe.bench.serve import served_model
from hotshoe.bench.workloads import WORKLOADS, Shape
from hotshoe.http_client import HttpClient

LOSS_BAR = 0.10
ADDED_MS_BAR = 1.5
# without the prefix cache, whose hits would make every run after the first another workload
ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "cache": {"enable_prefix_caching": False},
}
FLAGS = ["--max-model-len", "2048", "--max-num-seqs", "32", "--cache.enable-prefix-caching=false"]


@contextmanager
def serving(model: str) -> Iterator[str]:
    """A server's URL."""
    command = [Path(sys.executable).with_name("hotshoe"), "serve", model, "--server.port", "0"]
    process = subprocess.Popen(
        [*map(str, command), *FLAGS, "--log-level", "warning"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            first = process.stdout.readline()
            url = re.search(r"https?://\S+", first)
            if url is None:
                raise SystemExit(f"the server didn't start; it said {first!r}")
            yield url[0]
        finally:
            process.terminate()
            process.wait()


def offline_tokens_per_s(llm: LLM, prompts: Sequence[list[int]], output_len: int) -> float:
    """Throughput with every prompt at once."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    started = perf_counter()
    outputs = llm.generate(list(prompts), params)
    elapsed_s = perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / elapsed_s


def offline_tpot_ms(llm: LLM, prompt: list[int], output_len: int) -> float:
    """Time per token after the first of a single stream, as its reader sees it."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    times = [perf_counter() for _ in llm.stream(prompt, params)]
    return 1e3 * (times[-1] - times[0]) / (output_len - 1)


class HttpSide:
    """Sends the same workloads to the server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def tokens_per_s(self, prompts: Sequence[list[int]], output_len: int) -> float:
        """Throughput with every prompt at once."""
        records = self._run(prompts, output_len)
        elapsed_s = max(one.end_s for one in records) - min(one.sent_s for one in records)
        return sum(one.num_output_tokens for one in records) / elapsed_s

    def tpot_ms(self, prompt: list[int], output_len: int) -> float:
        """Time per token after the first of a single stream."""
        (record,) = self._run([prompt], output_len)
        assert record.tpot_s is not None
        return 1e3 * record.tpot_s

    def _run(self, prompts: Sequence[list[int]], output_len: int) -> list[RequestRecord]:
        async def main() -> list[RequestRecord]:
            async with HttpClient(self._url) as client:
                settings = LoadSettings(
                    endpoint="completions",
                    model=await served_model(client),
                    output_len=output_len,
                    fields={"temperature": 0, "ignore_eos": True},
                )
                planned = [PlannedRequest(turns=(prompt,)) for prompt in prompts]
                return await run_load(client, planned, settings)

        records = asyncio.run(main())
        failed = [one for one in records if one.error is not None]
        if failed:
            raise SystemExit(f"{len(failed)} requests failed: {failed[0].error_message}")
        return records


def alternate(
    offline: Callable[[], float], http: Callable[[], float], repetitions: int
) -> tuple[list[float], list[float]]:
    """Run both so many times, the first of a pair by turns."""
    found: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions):
        for side in (0, 1) if repetition % 2 == 0 else (1, 0):
            found[side].append((offline, http)[side]())
            print(".", end="", file=sys.stderr, flush=True)
    return found


def measure(llm: LLM, http: HttpSide, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both figures, with the runs that they come from."""
    many = WORKLOADS["throughput"](llm.tokenizer, Shape(num_prompts=arguments.num_prompts))
    (one,) = WORKLOADS["latency"](llm.tokenizer, Shape()).prompts
    http.tokens_per_s(many.prompts, 4)
    offline_tokens_per_s(llm, many.prompts, 4)
    length = arguments.output_len
    rates = alternate(
        lambda: offline_tokens_per_s(llm, many.prompts, length),
        lambda: http.tokens_per_s(many.prompts, length),
        arguments.repetitions,
    )
    length_of_one = arguments.single_output_len
    times = alternate(
        lambda: offline_tpot_ms(llm, one, length_of_one),
        lambda: http.tpot_ms(one, length_of_one),
        arguments.repetitions,
    )
    print(file=sys.stderr)
    losses = [1 - over_http / offline for offline, over_http in zip(*rates, strict=True)]
    added = [over_http - offline for offline, over_http in zip(*times, strict=True)]
    return {
        "throughput": {
            "num_concurrent": arguments.num_prompts,
            "output_len": length,
            "offline_tokens_per_s": rates[0],
            "http_tokens_per_s": rates[1],
            "losses": losses,
            "median_loss": statistics.median(losses),
            "bar": LOSS_BAR,
            "is_met": statistics.median(losses) <= LOSS_BAR,
        },
        "single_stream": {
            "output_len": length_of_one,
            "offline_tpot_ms": times[0],
            "http_tpot_ms": times[1],
            "added_ms_per_token": added,
            "median_added_ms_per_token": statistics.median(added),
            "bar_ms": ADDED_MS_BAR,
            "is_met": statistics.median(added) <= ADDED_MS_BAR,
        },
    }


def main() -> int:
    """Measure; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--repetitions", type=int, default=5, help="pairs of runs")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--single-output-len", type=int, default=256)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with serving(arguments.model) as url, LLM(arguments.model, **ENGINE) as llm:
        figures = measure(llm, HttpSide(url), arguments)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "model": arguments.model,
        "engine": ENGINE,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "read_bandwidth_gb_per_s": read_bandwidth_gb_per_s(),
        **figures,
    }
    text = json.dumps(result, indent=2)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")
    print(text)
    return 0 if all(figures[name]["is_met"] for name in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
