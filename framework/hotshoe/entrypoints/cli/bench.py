"""``hotshoe bench``: measure the engine on a fixed workload, and say where it was measured."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from hotshoe.bench.workloads import WORKLOADS, Shape
from hotshoe.config import ResolvedConfig
from hotshoe.config.values import config_error
from hotshoe.entrypoints.cli.engine_arguments import CommandParser, parse_engine_arguments
from hotshoe.entrypoints.cli.session import QUIET, start
from hotshoe.errors import ConfigError

if TYPE_CHECKING:
    from hotshoe import LLM

_DESCRIPTION = f"""\
Measure the engine on workloads with fixed prompts, greedy, every request at its full length.

throughput  32 requests at once, prompts of 32 to 256 tokens, 128 tokens each
latency     one request, 128-token prompt, 256 tokens
prefill     one request, 1900-token prompt, 1 token
prefix      16 requests with 1024 tokens in common, 32 tokens each, prefix cache cold and warm
copy        one request to repeat a text of 300 tokens, 200 tokens
structured  free, JSON schema and regular expression, 1 and 16 requests at once, up to 96 tokens;
            needs a guided-decoding backend (--guided-decoding NAME)
all         each of them; structured only with a guided-decoding backend

hotshoe bench serve sends load to a server instead; hotshoe bench serve --help describes it.

{QUIET}"""


def run(argv: list[str]) -> int:
    """Measure and print; the results are JSON with --json and in --output."""
    if argv[:1] == ["serve"]:
        from hotshoe.entrypoints.cli import bench_serve

        return bench_serve.run(argv[1:])
    parser = _parser()
    resolved, arguments = parse_engine_arguments(parser, argv)
    shape = _shape(arguments)
    names = _names(arguments.workload, resolved)
    with ExitStack() as stack:
        # opened first: an hour of measuring must not end with a path that can't be written
        file = stack.enter_context(_open(arguments.output)) if arguments.output else None
        started = time.perf_counter()
        llm = stack.enter_context(start(resolved))
        context = _context(llm, resolved, argv, time.perf_counter() - started)
        results = [_measure(llm, name, shape, arguments.repetitions, context) for name in names]
        text = json.dumps(results if arguments.workload == "all" else results[0], indent=2)
        if file is not None:
            print(text, file=file)
        if arguments.json:
            print(text)
        else:
            _print(results)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("hotshoe bench", _DESCRIPTION)
    parser.add_argument("workload", choices=[*WORKLOADS, "all"], help="what to run")
    parser.add_argument("--num-prompts", type=_count, metavar="N", help="number of requests")
    parser.add_argument(
        "--input-len", type=_range, metavar="MIN:MAX", help="tokens of a prompt; N for N:N"
    )
    parser.add_argument("--output-len", type=_count, metavar="N", help="tokens to generate")
    parser.add_argument(
        "--workload-seed", type=int, default=0, metavar="N", help="of the prompts (default: 0)"
    )
    parser.add_argument(
        "--repetitions", type=_count, default=3, metavar="N", help="measured runs (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--output", metavar="FILE", help="write the results to a file as JSON")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: 1 or more")
    return number


def _range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    least, most = _count(low), _count(high if colon else low)
    if least > most:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: MIN:MAX with MIN <= MAX")
    return least, most


def _names(chosen: str, resolved: ResolvedConfig) -> list[str]:
    """The workloads to run."""
    names = list(WORKLOADS) if chosen == "all" else [chosen]
    if "structured" not in names or resolved.config.guided_decoding.name is not None:
        return names
    if chosen == "all":
        print(f"left out: {_no_backend()}", file=sys.stderr)
        return [name for name in names if name != "structured"]
    raise config_error([_no_backend()])


def _no_backend() -> str:
    from hotshoe.plugins import discover

    installed = ", ".join(info.label for info in discover("guided_decoding"))
    remedy = "choose one with --guided-decoding NAME" if installed else "install one"
    return (
        "the structured workload needs a guided-decoding backend, and none is selected; "
        f"installed: {installed or 'none'}; {remedy}"
    )


def _shape(arguments: argparse.Namespace) -> Shape:
    if arguments.workload in ("copy", "structured", "all") and arguments.input_len:
        own = "copy" if arguments.workload == "all" else arguments.workload
        raise config_error(
            [f"--input-len: the {own} workload has a prompt of its own; drop it, or name another"]
        )
    return Shape(
        num_prompts=arguments.num_prompts,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        seed=arguments.workload_seed,
    )


def _open(path: str) -> IO[str]:
    try:
        return Path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: can't write {path!r}: {error.strerror}") from error


def _context(llm: LLM, resolved: ResolvedConfig, argv: list[str], load_s: float) -> dict[str, Any]:
    """What holds for every workload of this run."""
    from hotshoe.bench.machine import describe_machine, describe_versions

    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["hotshoe", "bench", *argv]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "config": resolved.config.model_dump(mode="json"),
        "components": llm.components,
        "load_time_s": load_s,
    }


def _measure(
    llm: LLM, name: str, shape: Shape, repetitions: int, context: dict[str, Any]
) -> dict[str, Any]:
    from hotshoe.bench.machine import peak_memory_mb, read_bandwidth_gb_per_s
    from hotshoe.bench.measure import measure, summarise

    workload = WORKLOADS[name](llm.tokenizer, shape)
    bandwidth = read_bandwidth_gb_per_s()
    if sys.stderr.isatty():
        print(f"{name}: {repetitions} repetitions ...", file=sys.stderr, flush=True)
    figures = measure(llm, workload, repetitions=repetitions)
    return {
        "workload": {"name": name, **workload.parameters},
        **context,
        "read_bandwidth_gb_per_s": bandwidth,
        "peak_memory_mb": peak_memory_mb(),
        "median": summarise(figures),
        "repetitions": figures,
    }


def _print(results: list[dict[str, Any]]) -> None:
    console = Console(markup=False, highlight=False, soft_wrap=True)
    first = results[0]
    machine, versions = first["machine"], first["versions"]
    console.print(
        f"{machine['cpu']}, {machine['num_cores']} cores, {machine['num_threads']} threads, "
        f"{machine['memory_gb']} GiB" + (f", {machine['gpu']}" if machine["gpu"] else "")
    )
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
    console.print(", ".join(f"{place}={name}" for place, name in first["components"].items()))
    for result in results:
        table = Table(title=_title(result), title_justify="left", box=None, pad_edge=False)
        parts = result["median"] if "elapsed_s" not in result["median"] else {"": result["median"]}
        for heading in ("median of repetitions", *parts):
            table.add_column(heading, justify="left" if heading.startswith("median") else "right")
        rows = [dict(_rows(figures)) for figures in parts.values()]
        for label in rows[0]:
            table.add_row(label, *(row[label] for row in rows))
        console.print()
        console.print(table)


def _title(result: dict[str, Any]) -> str:
    return " ".join(
        f"{key}={_written(value)}" if key != "name" else str(value)
        for key, value in result["workload"].items()
    )


def _written(value: Any) -> str:
    return ":".join(map(str, value)) if isinstance(value, list) else str(value)


def _rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("elapsed s", f"{figures['elapsed_s']:.2f}"),
        ("output tokens/s", f"{figures['output_tokens_per_s']:.1f}"),
        ("total tokens/s", f"{figures['total_tokens_per_s']:.1f}"),
        ("cached prompt tokens", f"{figures['num_cached_tokens']:.0f}"),
    ]
    for label, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("gap", "inter_token_ms")):
        spread = figures[key]
        shown = "-" if spread["median"] is None else f"{spread['median']:.1f} / {spread['p90']:.1f}"
        rows.append((f"{label} ms, median / p90", shown))
    if figures["num_draft_tokens"]:
        accepted = figures["num_accepted_tokens"] / figures["num_draft_tokens"]
        rows.append(("drafts accepted", f"{accepted:.0%}"))
    if figures["foreign_cpu_share"] is not None:
        rows.append(("CPU used by others", f"{figures['foreign_cpu_share']:.0%}"))
    return rows
