"""Measure hotshoe beside other engines: same machine, same prompts, by turns.

    python benchmarks/compare.py --engines hotshoe:bf16 vllm:bf16 --workloads throughput latency

Every engine is loaded once, in a process and an environment of its own, and stopped whenever it
isn't measured. A round runs a workload on each engine, in changing order; figures are medians over
the rounds. What the machine can do at most is measured in every round too, so that each figure can
be seen as a share of it. ``make bench-peers`` makes the environments; an engine without one is left
out, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from costs import Limits, ModelCosts, least_times
from engine_process import EngineError, EngineProcess, EngineSpec
from limits import best_of
from report import PAGE, write_report

from hotshoe.bench.machine import describe_machine, describe_versions
from hotshoe.bench.workloads import WORKLOADS, Shape, Workload
from hotshoe.text.tokenizer import Tokenizer, load_tokenizer
from hotshoe.weights.checkpoint import locate_model, open_checkpoint

HERE = Path(__file__).parent
ENGINES = [
    *("hotshoe:bf16", "hotshoe:int8", "hotshoe:gguf", "vllm:bf16", "openvino:int8"),
    *("llama_cpp:q4_1", "transformers:bf16"),
    *("hotshoe:bf16+ngram", "vllm:bf16+ngram", "openvino:int8+ngram", "llama_cpp:q4_1+ngram"),
]
MIN_ROUNDS = 3
Figures = dict[str, Any]


def make_workloads(
    names: Sequence[str], tokenizer: Tokenizer, shape: Mapping[str, Any], num_rounds: int
) -> dict[str, list[Workload]]:
    """Each workload with prompts of its own per round, so that no cache knows them, and once more
    for warming up.
    """
    return {
        name: [
            WORKLOADS[name](tokenizer, Shape(**shape, seed=seed)) for seed in range(num_rounds + 1)
        ]
        for name in names
    }


def jobs_of(workload: Workload) -> list[dict[str, Any]]:
    """What the driver of an engine runs for it: fields of ``Job`` in ``peers/protocol.py``."""
    jobs = []
    for part, members in (workload.parts or {"": range(len(workload.prompts))}).items():
        constraint = workload.constraints.get(part)
        jobs.append(
            {
                "part": part,
                "prompts": [workload.prompts[at] for at in members],
                "max_tokens": workload.max_tokens,
                "shared_len": workload.parameters.get("shared_len", 0),
                "keep_cache": part == "warm",
                "json_schema": constraint.json if constraint else None,
                "regex": constraint.regex if constraint else None,
            }
        )
    return jobs


class Comparison:
    """Runs the rounds and keeps the result, in a file too after each step.

    Args:
        num_limit_threads: with how many threads the machine's limits are measured; None: not at
            all.
    """

    def __init__(
        self,
        output: Path,
        result: dict[str, Any],
        workloads: Mapping[str, list[Workload]],
        num_limit_threads: int | None,
    ) -> None:
        self._output = output
        self._num_limit_threads = num_limit_threads
        self._workloads = workloads
        self.result = result

    def start(self, engines: Sequence[EngineProcess], num_starts: int) -> list[EngineProcess]:
        """Start each so many times; those that run now."""
        running = []
        for engine in engines:
            name = str(engine.spec)
            seconds = []
            try:
                for left in range(num_starts - 1, -1, -1):
                    description, took = engine.start()
                    seconds.append(took)
                    if left:
                        engine.close()
            except EngineError as error:
                self._leave_out(name, str(error))
                continue
            # the first one fills caches: of compiled code, of files
            seconds = seconds[1:] or seconds
            say(f"{name}: first token after {min(seconds):.1f} s")
            entry = self.result["engines"].setdefault(name, {"workloads": {}})
            entry["description"] = description
            entry["start_s"] = spread(seconds)
            self.result["left_out"].pop(name, None)
            running.append(engine)
        self.save()
        return running

    def run(self, engines: Sequence[EngineProcess], num_rounds: int, budget_s: float) -> None:
        """All workloads, round after round."""
        running = list(engines)
        spent: dict[tuple[str, str], list[float]] = {}
        for workload in self._workloads:
            for engine in self._those_for(workload, running):
                self._run_one(engine, workload, num_rounds, running, max_tokens=2)
        for at in range(num_rounds):
            if self._num_limit_threads is not None:
                measured = measured_limits(self._num_limit_threads)
                self.result["limits"]["rounds"].append(measured)
            for workload in self._workloads:
                turn = self._those_for(workload, running)
                turn = turn[at % len(turn) :] + turn[: at % len(turn)] if turn else []
                for engine in turn:
                    times = spent.setdefault((str(engine.spec), workload), [])
                    if len(times) >= MIN_ROUNDS and sum(times) > budget_s:
                        continue
                    started = time.monotonic()
                    self._run_one(engine, workload, at, running)
                    times.append(time.monotonic() - started)
            say(f"round {at + 1} of {num_rounds} is done")
            self._sum_up()
            self.save()
        for engine in running:
            memory_mb = engine.memory_mb()
            self.result["engines"][str(engine.spec)]["memory_mb"] = round(memory_mb)
        self.save()

    def save(self) -> None:
        """Write the file."""
        self._output.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._output.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.result, indent=1) + "\n")
        temporary.replace(self._output)

    @staticmethod
    def _those_for(workload: str, running: Sequence[EngineProcess]) -> list[EngineProcess]:
        """Drafts are for the workload that is about them."""
        return [one for one in running if not one.spec.drafts or workload == "copy"]

    def _run_one(
        self,
        engine: EngineProcess,
        workload: str,
        at: int,
        running: list[EngineProcess],
        max_tokens: int | None = None,
    ) -> None:
        name = str(engine.spec)
        try:
            figures = engine.run(workload, at, max_tokens)
        except EngineError as error:
            self._leave_out(name, f"{workload}: {error}")
            running.remove(engine)
            return
        found = self.result["engines"][name]["workloads"]
        if max_tokens is not None:
            found[workload] = {"warm_up": figures, "rounds": []}
        else:
            # a machine's memory is fast at one time and slow at another
            measured = self.result["limits"]["rounds"][-1:] if self._num_limit_threads else []
            least = self._least(workload, at, name, measured)
            found[workload]["rounds"].append(figures | {"limit": least})
            say(f"{name} {workload}: {headline(figures)}")

    def _least(
        self, workload: str, at: int, engine: str, measured: list[dict[str, Any]]
    ) -> dict[str, dict[str, Any] | None]:
        """The least times of a round's jobs, by part, on a machine that was measured so."""
        costs = ModelCosts(**self.result["model"]["costs"])
        limits = limits_of(measured) if measured else None
        variant = EngineSpec.parse(engine).variant
        jobs = jobs_of(self._workloads[workload][at])
        return {job["part"]: least_of(job, costs, limits, variant) for job in jobs}

    def _leave_out(self, name: str, reason: str) -> None:
        say(f"{name} is left out: {reason}")
        self.result["left_out"][name] = reason

    def _sum_up(self) -> None:
        """Medians, and the limits beside them."""
        measured = self.result["limits"]["rounds"]
        if measured:
            self.result["limits"]["best"] = best_of(measured)
        for name, entry in self.result["engines"].items():
            for workload, found in entry["workloads"].items():
                if workload not in self._workloads or not found["rounds"]:
                    continue
                # rounds differ a little in their prompts; drawn is the limit of the first
                least = self._least(workload, 0, name, measured)
                found["parts"] = summarise(found["rounds"], least)
                shares = [one["foreign_cpu_share"] for one in found["rounds"]]
                found["foreign_cpu_share"] = spread([one for one in shares if one is not None])


def limits_of(measured: list[dict[str, Any]]) -> Limits:
    """The best of some measurements of the machine."""
    best = best_of(measured)
    return Limits(*(1e9 * best[key] for key in best))


def least_of(
    job: Mapping[str, Any], costs: ModelCosts, limits: Limits | None, variant: str
) -> dict[str, Any] | None:
    """The least times of a job; None where a cache, or a constraint, makes them unknown."""
    if limits is None or job["keep_cache"] or job["json_schema"] or job["regex"]:
        return None
    lens = [len(prompt) for prompt in job["prompts"]]
    least = least_times(costs, limits, variant, lens, job["max_tokens"], job["shared_len"])
    num_output = len(lens) * job["max_tokens"]
    return {
        "ttft_ms": 1e3 * least.first_s,
        "tpot_ms": None if least.tpot_s is None else 1e3 * least.tpot_s,
        "elapsed_s": least.total_s,
        "output_tokens_per_s": num_output / least.total_s,
        "separate_tokens_per_s": num_output / least.separate_s,
    }


def summarise(
    rounds: Sequence[Mapping[str, Any]], least: Mapping[str, dict[str, Any] | None]
) -> dict[str, Any]:
    """Median, least and most of each figure by part, with the limit beside it."""
    parts: dict[str, Any] = {}
    for part, first in rounds[0]["parts"].items():
        if "unsupported" in first:
            parts[part] = first
            continue
        found = [one["parts"][part] for one in rounds]
        figures = {
            key: spread([one[key] for one in found])
            for key, value in first.items()
            if isinstance(value, int | float)
        }
        parts[part] = {"figures": figures, "limit": least.get(part)}
    return parts


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least, most."""
    if not values:
        return {}
    return {"median": median(values), "min": min(values), "max": max(values)}


def headline(figures: Mapping[str, Any]) -> str:
    """One round in a line."""
    shown = []
    for part, found in figures["parts"].items():
        text = found.get("unsupported")
        if text is None:
            tpot = f", {found['tpot_ms']:.1f} ms/token" if found["tpot_ms"] else ""
            text = f"{found['elapsed_s']:.2f} s{tpot}"
        shown.append(f"{part} {text}" if part else text)
    share = figures["foreign_cpu_share"]
    return "; ".join(shown) + (f" (others used {share:.0%} of the cores)" if share else "")


def measured_limits(num_threads: int) -> dict[str, Any]:
    """In a process of its own, which leaves no threads or memory behind."""
    command = [sys.executable, str(HERE / "limits.py"), "--threads", str(num_threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def model_facts(model: str, checkpoint: Path) -> dict[str, Any]:
    """What is read and multiplied per token."""
    with open_checkpoint(model) as opened:
        gguf_bytes = opened.num_bytes if opened.gguf_metadata is not None else None
    config = json.loads((checkpoint / "config.json").read_text())
    costs = ModelCosts.of(config, gguf_bytes)
    return {"name": model, "costs": vars(costs)}


def say(text: str) -> None:
    """Progress, for whoever watches."""
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=ENGINES, metavar="ENGINE:VARIANT[+ngram]")
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS], choices=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        help="starts of each engine; the first counts only if it is alone",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=45.0,
        help=f"seconds for an engine on a workload; after them it gets no more than {MIN_ROUNDS} "
        "rounds (default: 45)",
    )
    parser.add_argument("--home", type=Path, default=Path(".peers"), help="environments and models")
    parser.add_argument("--model", default="embedded", help="what hotshoe calls the model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--num-prompts", type=int, help="instead of the workload's; for a try")
    parser.add_argument("--output-len", type=int, help="instead of the workload's; for a try")
    parser.add_argument(
        "--output", type=Path, help="result file; one in benchmarks/results if none"
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="keep what the result file has of other engines and workloads",
    )
    parser.add_argument(
        "--missing", action="store_true", help="with --merge: leave out what's there"
    )
    parser.add_argument(
        "--no-limits", action="store_true", help="don't measure what the machine can do; for a try"
    )
    parser.add_argument("--report", action="store_true", help="write docs/performance.md and plots")
    parser.add_argument("--page", type=Path, default=PAGE, help="instead of docs/performance.md")
    return parser


def _specs(texts: Sequence[str], parser: argparse.ArgumentParser) -> list[EngineSpec]:
    try:
        return [EngineSpec.parse(text) for text in dict.fromkeys(texts)]
    except ValueError as error:
        parser.error(f"--engines: {error}")


def _result(arguments: argparse.Namespace, output: Path, checkpoint: Path) -> dict[str, Any]:
    """A new result, or the one of the file to go on with."""
    old: dict[str, Any] = {}
    if arguments.merge and output.exists():
        old = json.loads(output.read_text())
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "model": model_facts(arguments.model, checkpoint),
        "limits": {"rounds": old.get("limits", {}).get("rounds", []), "best": {}},
        "engines": old.get("engines", {}),
        "left_out": old.get("left_out", {}),
    }


def _is_there(result: Mapping[str, Any], spec: EngineSpec, workloads: Sequence[str]) -> bool:
    found = result["engines"].get(str(spec), {}).get("workloads", {})
    wanted = ["copy"] if spec.drafts else workloads
    return all(found.get(name, {}).get("rounds") for name in wanted)


def main() -> int:
    """Measure, and report; 1 if no engine ran."""
    parser = _parser()
    arguments = parser.parse_args()
    # or stopped engines would be left behind
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    specs = _specs(arguments.engines, parser)
    checkpoint = arguments.home / "models" / "checkpoint"
    if not checkpoint.exists():
        parser.error(
            f"no {checkpoint}; make it with: make bench-peers, or peers/make_checkpoint.py"
        )
    num_cores = len(os.sched_getaffinity(0))
    output = arguments.output or HERE / "results" / f"cpu-{num_cores}-cores-peers.json"
    result = _result(arguments, output, checkpoint)
    if arguments.missing:
        specs = [one for one in specs if not _is_there(result, one, arguments.workloads)]
    models = {"checkpoint": str(checkpoint)}
    if (path := locate_model(arguments.model)).suffix == ".gguf":
        models["gguf"] = str(path)
    models |= {one.name: str(one) for one in checkpoint.parent.glob("openvino-*")}
    sizes = {"num_prompts": arguments.num_prompts, "output_len": arguments.output_len}
    made = make_workloads(
        arguments.workloads, load_tokenizer(str(checkpoint)), sizes, arguments.rounds
    )
    logs = arguments.home / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        all_jobs = {name: [jobs_of(one) for one in rounds] for name, rounds in made.items()}
        json.dump(all_jobs, file)
        file.flush()
        settings = {"models": models, "workloads": file.name, "num_threads": arguments.threads}
        engines = [
            EngineProcess(spec, arguments.home, settings, logs / f"{spec}.log") for spec in specs
        ]
        comparison = Comparison(
            output, result, made, None if arguments.no_limits else arguments.threads
        )
        running: list[EngineProcess] = []
        try:
            running = comparison.start(engines, arguments.starts)
            comparison.run(running, arguments.rounds, arguments.budget_s)
        finally:
            for engine in engines:
                engine.close()
    print(output)
    if arguments.report:
        write_report(output, arguments.page)
    return 0 if running else 1


if __name__ == "__main__":
    sys.exit(main())
