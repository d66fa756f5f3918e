"""Whether a part costs more as a third-party plugin than built in: counts instructions.

    python benchmarks/instructions.py [--num-steps 20] [--repetitions 3]

A distribution is made whose entry points offer the built-in components under names of its own. The
same tiny model decodes the same tokens once with the built-in names and once with those. Counted
are the decode steps alone: by perf where the machine has a counter, else by valgrind's callgrind,
whose simulated processor knows no AVX-512, so the components are those made of torch operations by
default. Prints JSON; the exit code is 1 if the two differ by more than 0.5%.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median
from typing import Any

BAR = 0.005
PARTS = {
    "scheduler": ("schedulers", "fcfs"),
    "attention": ("attention", "torch_sdpa"),
    "kernels": ("kernels", "torch"),
    "sampler": ("samplers", "standard"),
    "quantization": ("quantization", "none"),
    "executor": ("executors", "uniproc"),
}
"""By config section: plugin kind, and the component that is measured by default."""
PREFIX = "third_party_"


def make_third_party(folder: Path, parts: Mapping[str, str]) -> None:
    """Write a distribution that offers built-in components under other names."""
    from hotshoe.testing.plugins import make_distribution

    groups: dict[str, dict[str, str]] = {}
    modules = {}
    for section, name in parts.items():
        kind = PARTS[section][0]
        (found,) = entry_points(group=f"hotshoe.{kind}", name=name)
        module = f"third_party.{section}"
        modules[module] = (
            f"from {found.module} import *\nfrom {found.module} import hotshoe_component"
        )
        groups[f"hotshoe.{kind}"] = {PREFIX + name: module}
    make_distribution(folder, "third-party", modules=modules, entry_points=groups)


def decode(settings: Mapping[str, Any]) -> None:
    """The measured process: load, decode a while, say so, and decode when told to."""
    sys.path[:0] = settings["path"]
    import gc

    import torch

    from hotshoe import LLM, SamplingParams

    torch.set_num_threads(1)
    llm = LLM(
        settings["model"],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        cache={"num_blocks": 64, "enable_prefix_caching": False},
        **settings["components"],
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=settings["num_steps"], ignore_eos=True, detokenize=False
    )
    prompts = [[5, 6, 7, 8 + number] for number in range(4)]
    with llm:
        llm.generate(prompts, params)
        gc.collect()
        gc.disable()
        print("ready", flush=True)
        sys.stdin.readline()
        llm.generate(prompts, params)
        print("done", flush=True)
        sys.stdin.readline()


class Counter(ABC):
    """Counts the instructions of a process between two moments."""

    @abstractmethod
    def command(self, command: list[str]) -> list[str]:
        """What to start instead of ``command``."""

    @abstractmethod
    def begin(self, process_id: int) -> None:
        """From now on."""

    @abstractmethod
    def end(self) -> int:
        """Up to now."""


class Perf(Counter):
    """The processor's own counter."""

    def command(self, command: list[str]) -> list[str]:
        return command

    def begin(self, process_id: int) -> None:
        command = ["perf", "stat", "-x", ",", "-e", "instructions:u", "-p", str(process_id)]
        self._perf = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        # perf says nothing when it has begun; reading the target's tasks takes it a few ms
        with subprocess.Popen(["sleep", "0.5"]):
            pass

    def end(self) -> int:
        self._perf.send_signal(signal.SIGINT)
        _, shown = self._perf.communicate()
        return int(
            next(line for line in shown.splitlines() if "instructions" in line).split(",")[0]
        )


class Callgrind(Counter):
    """A simulated processor, about fifty times slower."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process_id = 0

    def command(self, command: list[str]) -> list[str]:
        options = ["--tool=callgrind", "--instr-atstart=no", "--quiet"]
        return ["valgrind", *options, f"--callgrind-out-file={self._folder}/%p", *command]

    def begin(self, process_id: int) -> None:
        self._process_id = process_id
        self._control("--instr=on")
        self._control("--zero")

    def end(self) -> int:
        self._control("--dump")
        dumps = self._folder.glob(f"{self._process_id}.*")
        newest = max(dumps, key=lambda path: path.stat().st_mtime_ns)
        found = re.search(r"^(?:totals|summary): (\d+)", newest.read_text(errors="replace"), re.M)
        if found is None:
            raise SystemExit(f"callgrind wrote no total into {newest}")
        return int(found[1])

    def _control(self, action: str) -> None:
        command = ["callgrind_control", action, str(self._process_id)]
        subprocess.run(command, check=True, capture_output=True)


def choose_counter(folder: Path) -> Counter:
    """The processor's if it has one that may be read, else the simulation."""
    if shutil.which("perf"):
        command = ["perf", "stat", "-x", ",", "-e", "instructions:u", "true"]
        shown = subprocess.run(command, capture_output=True, text=True).stderr
        if re.search(r"^\d+,", shown, re.M):
            return Perf()
    if shutil.which("valgrind"):
        return Callgrind(folder)
    raise SystemExit("needs perf with an instruction counter, or valgrind; install one of them")


def count(counter: Counter, settings: Mapping[str, Any]) -> int:
    """Instructions of the measured steps in one process."""
    command = [sys.executable, __file__, "--decode", json.dumps(settings)]
    # one order of hashes, one thread: what is left to vary is where memory lies
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    environment["ATEN_CPU_CAPABILITY"] = "avx2"  # what valgrind knows
    process = subprocess.Popen(
        counter.command(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        _expect(process.stdout.readline(), "ready")
        counter.begin(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        _expect(process.stdout.readline(), "done")
        found = counter.end()
        process.stdin.write("\n")
        process.stdin.flush()
    return found


def _expect(line: str, wanted: str) -> None:
    if line.strip() != wanted:
        raise SystemExit(f"the measured process said {line!r} instead of {wanted!r}")


def compare(arguments: argparse.Namespace, parts: Mapping[str, str]) -> dict[str, Any]:
    """Both by turns."""
    from hotshoe.testing.models import write_tiny_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = write_tiny_checkpoint(folder / "model")
        make_third_party(folder / "site", parts)
        counter = choose_counter(folder)
        common = {
            "model": str(model),
            "num_steps": arguments.num_steps,
            # both have it on their path, so that start-up finds the same packages
            "path": [str(folder / "site")],
        }
        sides = {
            "built_in": dict(parts),
            "third_party": {section: PREFIX + name for section, name in parts.items()},
        }
        counts: dict[str, list[int]] = {side: [] for side in sides}
        for _ in range(arguments.repetitions):
            for side, components in sides.items():
                counts[side].append(count(counter, {**common, "components": components}))
                print(f"{side}: {counts[side][-1]:,}", file=sys.stderr, flush=True)
    ratio = median(counts["third_party"]) / median(counts["built_in"])
    return {
        "counter": type(counter).__name__.lower(),
        "components": dict(parts),
        "num_steps": arguments.num_steps,
        "instructions": counts,
        "ratio": ratio,
        "bar": BAR,
        "is_met": abs(ratio - 1) <= BAR,
    }


def main() -> int:
    """Count, and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for section, (_, name) in PARTS.items():
        parser.add_argument(f"--{section}", default=name, metavar="NAME", help=f"default: {name}")
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--decode", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.decode is not None:
        decode(arguments.decode)
        return 0
    parts = {section: getattr(arguments, section) for section in PARTS}
    result = compare(arguments, parts)
    text = json.dumps(result, indent=2)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")
    print(text)
    return 0 if result["is_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
