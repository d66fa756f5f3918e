"""What hotshoe reaches on an NVIDIA GPU, beside what that GPU can do and beside transformers.

    benchmarks/gpu/run.sh [--dry-run] [--output DIR] [--only PART ...]

The GPU's limits are measured first, in the same run. Every part runs in a process of its own and
within its share of the time: one that fails or takes too long costs no other. At the end stands a
table of what was to be reached and was. With ``--dry-run`` everything but the kernels runs, tiny,
on a CPU: no figure is compared with anything then.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bars import bars, figure_rows, table, verdict_rows
from sizes import DRY, FULL, Sizes

BUDGET_S = 470.0
DRY_PATIENCE = 10.0
TIMEOUTS_S = {
    "limits": 60.0,
    "attention": 60.0,
    "decode": 90.0,
    "comparison": 130.0,
    "tests": 180.0,
    "linears": 60.0,
    "draws": 60.0,
    "switches": 90.0,
}
"""Together more than the budget: what isn't used is there for the parts that follow."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part by its name, its function in ``parts``, and that one's further arguments."""

    name: str
    function: str
    arguments: tuple[str, ...] = ()

    @property
    def timeout_s(self) -> float:
        """The longest time that it may take."""
        return TIMEOUTS_S[self.function]


def all_parts(sizes: Sizes) -> list[Part]:
    """In the order in which they run: the ones with bars first."""
    return [
        Part("limits", "limits"),
        Part("attention", "attention"),
        *(Part(f"decode {model}", "decode", (model,)) for model in sizes.models),
        Part("comparison", "comparison"),
        Part("tests", "tests"),
        Part("linears", "linears"),
        Part("draws", "draws"),
        Part("switches", "switches"),
    ]


def run_part(
    part: Part, sizes: Sizes, limits: Mapping[str, Any], log: Path, connection: Connection
) -> None:
    """Run it in this process, and send each figure as it is found."""
    os.setsid()  # what it starts is stopped with it
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    try:
        import parts

        job = parts.Job(
            sizes=sizes,
            bandwidth=_scaled(limits.get("bandwidth_gb_per_s"), 1e9),
            matrix_rate=_scaled(limits.get("matrix_tflop_per_s"), 1e12),
            tell=lambda name, figures: connection.send((name, dict(figures))),
        )
        getattr(parts, part.function)(job, *part.arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(1) from None


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else unit * value


class Runner:
    """Runs parts one after another, until the time is used up.

    Args:
        sizes: of what they measure.
        folder: for the log.
        budget_s: time for all of them.
        patience: how many times longer than it may one can take.
    """

    def __init__(self, sizes: Sizes, folder: Path, budget_s: float, patience: float = 1.0) -> None:
        self._sizes = sizes
        self._patience = patience
        self._log = folder / "gpu.log"
        self._log.write_text("")
        self._end = time.monotonic() + budget_s
        # its server imports everything once, and has touched no GPU when it forks
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["parts"])
        self.results: dict[str, dict[str, Any]] = {}

    @property
    def figures(self) -> dict[str, dict[str, Any]]:
        """By part."""
        return {name: result["figures"] for name, result in self.results.items()}

    def run(self, part: Part) -> None:
        """Run one; whatever it comes to."""
        left_s = self._end - time.monotonic()
        if left_s < 1:
            status = "not run: no time left"
            self.results[part.name] = {"status": status, "seconds": 0.0, "figures": {}}
            return
        with self._log.open("a") as log:
            log.write(f"\n==== {part.name}\n")
        limits = self.figures.get("limits", {}).get("limits", {})
        receiver, sender = self._processes.Pipe(duplex=False)
        process = self._processes.Process(
            target=run_part, args=(part, self._sizes, limits, self._log, sender)
        )
        started = time.monotonic()
        process.start()
        sender.close()
        timeout_s = min(part.timeout_s * self._patience, left_s)
        figures: dict[str, Any] = {}
        is_late = not _collect(receiver, figures, started + timeout_s)
        if is_late:
            _kill(process)
        process.join()
        status = "done" if process.exitcode == 0 else f"failed, see {self._log.name}"
        if is_late:
            status = f"stopped after {timeout_s:.0f} s, see {self._log.name}"
        self.results[part.name] = {
            "status": status,
            "seconds": round(time.monotonic() - started, 1),
            "figures": figures,
        }
        if process.exitcode:
            said = self._log.read_text(errors="replace").rpartition("\n==== ")[2]
            print(said[-2000:], file=sys.stderr)


def _kill(process: BaseProcess) -> None:
    """With all that it has started."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet
        process.kill()


def _collect(receiver: Connection, figures: dict[str, Any], until: float) -> bool:
    """Take figures until the process ends: whether it does in time."""
    while receiver.poll(max(until - time.monotonic(), 0)):
        try:
            name, entries = receiver.recv()
        except EOFError:
            return True
        figures[name] = entries
    return False


def main() -> int:
    """Measure; 1 if a part failed or a bar was missed."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="everything but the kernels, on a CPU"
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-results"), help="folder")
    parser.add_argument("--only", nargs="+", metavar="PART", help="some parts, and the limits")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="time for all parts")
    arguments = parser.parse_args()
    sizes = DRY if arguments.dry_run else FULL
    parts = all_parts(sizes)
    names = [part.name for part in parts]
    if unknown := sorted(set(arguments.only or ()) - set(names)):
        parser.error(f"unknown parts {unknown}; there are {names}")
    wanted = {*(arguments.only or names), "limits"}
    arguments.output.mkdir(parents=True, exist_ok=True)
    # a dry run is about what runs, not how fast
    patience = DRY_PATIENCE if arguments.dry_run else 1.0
    runner = Runner(sizes, arguments.output, arguments.budget_s * patience, patience)
    for part in parts:
        if part.name not in wanted:
            continue
        print(f"{part.name} ...", flush=True)
        runner.run(part)
        result = runner.results[part.name]
        print(f"{part.name}: {result['status']}, {result['seconds']} s", flush=True)
        if part.name == "limits" and result["status"] != "done":
            print("error: without the limits nothing can be said", file=sys.stderr)
            return 1
    return _report(runner, sizes, arguments, wanted)


def _report(
    runner: Runner,
    sizes: Sizes,
    arguments: argparse.Namespace,
    wanted: Sequence[str] | set[str],
) -> int:
    judged = [
        bar.judge(runner.figures)
        for bar in bars(list(sizes.models), sizes.decode)
        if bar.part in wanted
    ]
    result = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["benchmarks/gpu/run.sh", *sys.argv[1:]]),
        "is_dry_run": arguments.dry_run,
        **runner.figures["limits"].get("environment", {}),
        "parts": runner.results,
        "bars": judged,
    }
    path = arguments.output / "gpu.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{table(figure_rows(_without_environment(runner.figures)))}\n")
    if arguments.dry_run:
        print("A dry run: tiny models on a CPU, no limits; the figures mean nothing.\n")
    print(table(verdict_rows(judged)))
    lacking = {
        name: one["status"] for name, one in runner.results.items() if one["status"] != "done"
    }
    for name, status in lacking.items():
        print(f"{name}: {status}")
    counts = {
        verdict: sum(one["verdict"] == verdict for one in judged)
        for verdict in ("passed", "failed", "not measured")
    }
    print(f"\n{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}; {path}")
    return 1 if lacking or counts["failed"] else 0


def _without_environment(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        part: {name: entries for name, entries in found.items() if name != "environment"}
        for part, found in figures.items()
    }


if __name__ == "__main__":
    sys.exit(main())
