"""How step time and throughput depend on batch, context and model size, and what memory is used.

    python benchmarks/scaling.py [--sizes 135M 360M 1.7B] [--report] [-- --kernels torch ...]

Each size runs in a process of its own, on random weights. What follows ``--`` are
hotshoe's own flags: which components to use, and how. Two sweeps: the batch, at one context; the
context, at one batch. Every request has a prompt of its own. Beside each figure stands the least
time that the machine needs, from its bandwidth and rates in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from costs import Limits, ModelCosts, least_times
from limits import best_of
from random_model import SHAPES, model_config, write_config
from report import PAGE, replace_between

from hotshoe.bench.machine import ForeignLoad, describe_machine, describe_versions, tree_memory_mb

if TYPE_CHECKING:
    from hotshoe import LLM

HERE = Path(__file__).parent
MEMORY_BAR_MB = 150
NUM_STEPS = 24


def measure_size(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Both sweeps and the memory of one size, in this process."""
    import torch

    from hotshoe import LLM
    from hotshoe.config import load_config

    torch.set_num_threads(settings["threads"])
    base_mb = tree_memory_mb(os.getpid())
    points = [tuple(point) for point in settings["points"]]
    max_model_len = 16 * -(-max(context + NUM_STEPS + 2 for _, context in points) // 16)
    num_blocks = max(batch * (-(-(context + NUM_STEPS + 2) // 16) + 1) for batch, context in points)
    resolved = load_config(
        cli=settings["flags"],
        overrides={
            "model": settings["model"],
            "max_model_len": max_model_len,
            "max_num_seqs": max(batch for batch, _ in points),
            "cache": {"num_blocks": num_blocks, "enable_prefix_caching": False},
        },
    )
    llm = LLM.from_config(resolved)
    with llm:
        steps = [measure_point(llm, batch, context) for batch, context in points]
        memory_mb = tree_memory_mb(os.getpid())
        components = llm.components
    variant = {"none": "bf16"}.get(resolved.config.quantization.name, "int8")
    costs = ModelCosts.of(json.loads(Path(settings["model"]["path"], "config.json").read_text()))
    kv_mb = 2 * costs.kv_params_per_token * num_blocks * 16 / 2**20
    weights_mb = costs.weight_bytes(variant) / 2**20
    return {
        "costs": vars(costs),
        "variant": variant,
        "components": components,
        "points": steps,
        "memory_mb": {
            "after_imports": round(base_mb),
            "weights": round(weights_mb),
            "kv_cache": round(kv_mb),
            "resident": round(memory_mb),
            "beyond": round(memory_mb - base_mb - weights_mb - kv_mb),
        },
    }


def measure_point(llm: LLM, batch: int, context: int) -> dict[str, Any]:
    """Median time of the steps in which every request decodes."""
    from hotshoe import SamplingParams

    numbers = random.Random(f"{batch}/{context}")
    prompts = [[numbers.randrange(256) for _ in range(context)] for _ in range(batch)]
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_STEPS + 1, ignore_eos=True, detokenize=False
    )
    records: list[Any] = []
    llm.on_step(records.append)
    load = ForeignLoad()
    llm.generate(prompts, params)
    share = load.share()
    llm.engine.step_observers.remove(records.append)
    # those in which all requests decode, without the first of them
    seconds = [
        one.timings_s["total"]
        for one in records
        if one.num_decode_tokens == batch and not one.num_prefill_tokens
    ][1:]
    if not seconds:
        raise SystemExit(f"no step had all {batch} requests with contexts of {context}")
    return {
        "batch": batch,
        "context": context,
        "step_ms": 1e3 * median(seconds),
        "min_step_ms": 1e3 * min(seconds),
        "output_tokens_per_s": batch / median(seconds),
        "foreign_cpu_share": None if share is None else round(share, 3),
    }


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every size, and the machine's limits."""
    limits = []
    sizes: dict[str, Any] = {}
    points = [(batch, arguments.context) for batch in arguments.batches]
    points += [
        (arguments.batch, context)
        for context in arguments.contexts
        if (arguments.batch, context) not in points
    ]
    for size in arguments.sizes:
        command = [sys.executable, str(HERE / "limits.py"), "--threads", str(arguments.threads)]
        limits.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
        print(f"{size}: {len(points)} points", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            settings = {
                "model": write_config(Path(folder), model_config(size)),
                "points": points,
                "threads": arguments.threads,
                "flags": arguments.flags,
            }
            command = [sys.executable, __file__, "--one", json.dumps(settings)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        sizes[size] = json.loads(done.stdout.splitlines()[-1])
    best = best_of(limits)
    for found in sizes.values():
        add_limits(found, Limits(*(1e9 * value for value in best.values())))
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "limits": {"rounds": limits, "best": best},
        "batch_of_context_sweep": arguments.batch,
        "context_of_batch_sweep": arguments.context,
        "memory_bar_mb": MEMORY_BAR_MB,
        "sizes": sizes,
    }


def add_limits(found: dict[str, Any], limits: Limits) -> None:
    """The least time of each point's step."""
    costs = ModelCosts(**found["costs"])
    for point in found["points"]:
        lens = [point["context"] + NUM_STEPS // 2] * point["batch"]
        least = least_times(costs, limits, found["variant"], lens, 2)
        assert least.tpot_s is not None  # there is a second token
        point["least_step_ms"] = 1e3 * least.tpot_s


def write_report(result_path: Path, page: Path) -> None:
    """Replace table and plot of the page."""
    result = json.loads(result_path.read_text())
    images = page.parent / "images"
    images.mkdir(exist_ok=True)
    draw(result, images / "scaling.svg")
    content = "\n".join(lines_of(result, result_path))
    page.write_text(replace_between(page.read_text(), "scaling", content))
    print(page)


def lines_of(result: Mapping[str, Any], path: Path) -> Iterator[str]:
    """The Markdown."""
    yield (
        f"Random weights, `{result['command']}`; all figures: "
        f"[{path.name}](../benchmarks/results/{path.name})."
    )
    yield ""
    yield "![step time and throughput by batch, context and model size](images/scaling.svg)"
    yield ""
    yield "Milliseconds a step and, in brackets, the share of the machine's limit:"
    yield ""
    first = next(iter(result["sizes"].values()))
    yield "| batch | context | " + " | ".join(result["sizes"]) + " |"
    yield "|---" * (2 + len(result["sizes"])) + "|"
    for at, point in enumerate(first["points"]):
        cells = []
        for found in result["sizes"].values():
            one = found["points"][at]
            cells.append(f"{one['step_ms']:.1f} ({one['least_step_ms'] / one['step_ms']:.0%})")
        yield f"| {point['batch']} | {point['context']} | " + " | ".join(cells) + " |"
    yield ""
    yield f"Memory in MB; the bar for the last column is {result['memory_bar_mb']}:"
    yield ""
    yield "| model | after imports | weights | KV cache | resident | beyond these |"
    yield "|---|---|---|---|---|---|"
    for size, found in result["sizes"].items():
        yield f"| {size} | " + " | ".join(map(str, found["memory_mb"].values())) + " |"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Step time by batch, throughput by batch, step time by context."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hotshoe"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4))
    panels = (
        ("batch", "step_ms", f"ms per step, context {result['context_of_batch_sweep']}"),
        ("batch", "output_tokens_per_s", "output tokens/s"),
        ("context", "step_ms", f"ms per step, batch {result['batch_of_context_sweep']}"),
    )
    for axis, (along, figure_name, title) in zip(axes, panels, strict=True):
        for number, (size, found) in enumerate(result["sizes"].items()):
            points = sweep(found["points"], along, result)
            x = [point[along] for point in points]
            colour = f"C{number}"
            axis.plot(
                x, [one[figure_name] for one in points], color=colour, marker="o", ms=3, label=size
            )
            least = [
                one["least_step_ms"]
                if figure_name == "step_ms"
                else 1e3 * one["batch"] / one["least_step_ms"]
                for one in points
            ]
            axis.plot(x, least, color=colour, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel(along)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8)
    figure.text(0.5, 0.01, "dotted: the machine's limit", ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def sweep(
    points: Sequence[Mapping[str, Any]], along: str, result: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The points of one sweep, in its order."""
    other = {"batch": "context", "context": "batch"}[along]
    fixed = result[f"{other}_of_{along}_sweep"]
    return sorted((one for one in points if one[other] == fixed), key=lambda one: one[along])


def main() -> int:
    """Measure; 1 if a size takes more memory than the bar allows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["135M", "360M", "1.7B"], choices=[*SHAPES])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 512, 2048, 8128])
    parser.add_argument("--batch", type=int, default=1, help="of the sweep over contexts")
    parser.add_argument("--context", type=int, default=128, help="of the sweep over batches")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--report", action="store_true", help="write docs/performance.md and a plot"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="instead of docs/performance.md")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    own, flags = _split(sys.argv[1:])
    arguments = parser.parse_args(own, argparse.Namespace(flags=flags))
    if arguments.one is not None:
        print(json.dumps(measure_size(arguments.one)))
        return 0
    result = measure_all(arguments)
    num_cores = len(os.sched_getaffinity(0))
    output = arguments.output or HERE / "results" / f"cpu-{num_cores}-cores-scaling.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(output)
    if arguments.report:
        write_report(output, arguments.page)
    beyond = {size: found["memory_mb"]["beyond"] for size, found in result["sizes"].items()}
    for size, megabytes in beyond.items():
        print(f"{size}: {megabytes} MB beyond imports, weights and KV cache")
    return 1 if any(one > MEMORY_BAR_MB for one in beyond.values()) else 0


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
