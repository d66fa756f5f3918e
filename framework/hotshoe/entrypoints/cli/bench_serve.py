"""``hotshoe bench serve``: send load to a server, and report throughput and latency."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from hotshoe.bench.datasets import PlannedRequest
from hotshoe.bench.load import LoadSettings, RequestRecord
from hotshoe.bench.serve import measure_server, served_model
from hotshoe.bench.serving_metrics import LATENCIES, OBJECTIVES, spread
from hotshoe.config.values import config_error
from hotshoe.entrypoints.cli.bench_serve_arguments import make_dataset, parse_arguments
from hotshoe.entrypoints.cli.server_arguments import api_key
from hotshoe.errors import ConfigError
from hotshoe.http_client import HttpClient


def run(argv: list[str]) -> int:
    """Send the load and print; 1 if every request failed."""
    arguments = parse_arguments(argv)
    objectives_ms = _objectives(arguments.goodput)
    fields = _fields(arguments)
    requests, dataset = make_dataset(arguments)
    with ExitStack() as stack:
        file = stack.enter_context(_open(arguments.output)) if arguments.output else None
        result, records = asyncio.run(_measure(arguments, requests, fields, objectives_ms))
        result = {
            "command": shlex.join(["hotshoe", "bench", "serve", *_without_key(argv)]),
            "dataset": dataset,
            **result,
        }
        if arguments.save_requests:
            result["requests"] = [record.as_data() for record in records]
        text = json.dumps(result, indent=2)
        if file is not None:
            print(text, file=file)
    print(text) if arguments.json else _print(result, records)
    return 0 if result["summary"]["num_succeeded"] else 1


async def _measure(
    arguments: argparse.Namespace,
    requests: list[PlannedRequest],
    fields: dict[str, Any],
    objectives_ms: dict[str, float],
) -> tuple[dict[str, Any], list[RequestRecord]]:
    async with HttpClient(arguments.url, api_key=api_key(arguments)) as client:
        settings = LoadSettings(
            endpoint=arguments.endpoint,
            model=arguments.model or await served_model(client),
            output_len=None if arguments.output_len is None else arguments.output_len[1],
            fields=fields,
            request_rate=arguments.request_rate or math.inf,
            burstiness=arguments.burstiness,
            max_concurrency=arguments.max_concurrency,
            timeout_s=arguments.timeout_s,
            seed=arguments.seed,
        )
        with _Progress(sum(len(request.turns) for request in requests)) as progress:
            return await measure_server(
                client,
                requests,
                settings,
                num_warmups=arguments.num_warmups,
                objectives_ms=objectives_ms,
                on_done=progress.advance,
            )


class _Progress:
    """A bar on standard error, if that is a terminal."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="request", disable=not sys.stderr.isatty())
        self._num_failed = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, record: RequestRecord) -> None:
        self._bar.update()
        if record.error is not None:
            self._num_failed += 1
            self._bar.set_postfix(failed=self._num_failed)


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """What every request says besides its prompt."""
    fields: dict[str, Any] = {"temperature": arguments.temperature}
    if arguments.ignore_eos:
        fields["ignore_eos"] = True
    fields.update(arguments.extra_body)
    return fields


def _objectives(texts: list[str]) -> dict[str, float]:
    objectives = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            objectives[name] = float(limit)
        except ValueError:
            name = ""
        if name not in OBJECTIVES or not objectives[name] > 0:
            raise config_error(
                [f"--goodput: got {text!r}, allowed: NAME:MS with NAME of {', '.join(OBJECTIVES)}"]
            )
    return objectives


def _without_key(argv: list[str]) -> list[str]:
    """The arguments with the API key hidden: results are passed around."""
    hidden = [
        "***" if before == "--api-key" else one
        for before, one in zip(["", *argv], argv, strict=False)
    ]
    return ["--api-key=***" if one.startswith("--api-key=") else one for one in hidden]


def _open(path: str) -> IO[str]:
    try:
        return Path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: can't write {path!r}: {error.strerror}") from error


def _print(result: dict[str, Any], records: list[RequestRecord]) -> None:
    summary = result["summary"]
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(f"{result['model']} at {result['url']}, {result['endpoint']}")
    dataset = " ".join(
        f"{key}={_range(value)}" for key, value in result["dataset"].items() if value is not None
    )
    console.print(f"{dataset}\n")
    for label, value in _rows(summary):
        console.print(f"{label:<24} {value:>12}")
    table = Table(box=None, pad_edge=False)
    names = list(spread([]))
    for heading in ("ms", *names):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for latency in LATENCIES:
        values = summary[f"{latency}_ms"]
        shown = ["-" if values[name] is None else f"{values[name]:.1f}" for name in names]
        table.add_row(latency.upper(), *shown)
    console.print()
    console.print(table)
    for kind in summary["errors"]:
        first = next(one for one in records if one.error == kind)
        console.print(f"\n{kind}, for example: {first.error_message}")


def _range(value: object) -> object:
    """A setting as its flag takes it: a range as ``MIN:MAX``."""
    return ":".join(map(str, value)) if isinstance(value, tuple | list) else value


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("duration s", f"{summary['duration_s']:.2f}"),
        ("requests succeeded", f"{summary['num_succeeded']}"),
        ("requests failed", f"{summary['num_failed']}"),
        ("most at once", f"{summary['max_concurrency']}"),
        ("requests/s", f"{summary['requests_per_s']:.2f}"),
        ("output tokens/s", f"{summary['output_tokens_per_s']:.1f}"),
        ("total tokens/s", f"{summary['total_tokens_per_s']:.1f}"),
        ("prompt tokens", f"{summary['num_prompt_tokens']}"),
        ("  of them cached", f"{summary['num_cached_tokens']}"),
        ("output tokens", f"{summary['num_output_tokens']}"),
    ]
    rows += [(f"failed: {kind}", str(count)) for kind, count in summary["errors"].items()]
    if "goodput" in summary:
        goodput = summary["goodput"]
        wanted = ", ".join(f"{name} {limit:g}" for name, limit in goodput["objectives_ms"].items())
        rows.append(("goodput requests/s", f"{goodput['requests_per_s']:.2f}"))
        rows.append((f"  within {wanted} ms", f"{goodput['share']:.0%}"))
    return rows
