"""The parts of the measurement. Each runs in a process of its own and tells its figures one by one,
so that what fails or takes too long costs no other.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from beside_transformers import comparison
from job import Job
from kernels_alone import attention, draws, linears
from timing import seconds_per_call
from whole_models import decode, switches

from hotshoe.bench.machine import describe_machine, describe_versions

REPOSITORY = Path(__file__).parents[2]

__all__ = [
    "Job",
    "attention",
    "comparison",
    "decode",
    "draws",
    "limits",
    "linears",
    "switches",
    "tests",
]


def limits(job: Job) -> None:
    """The bandwidth of a large copy and the rate of a large matrix product, on random data; and
    where they were measured.
    """
    sizes = job.sizes
    if sizes.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no usable GPU; --dry-run does without")
    job.tell("environment", environment())
    source = torch.empty(sizes.limit_bytes // 2, dtype=torch.int16, device=job.device)
    source.random_()
    target = torch.empty_like(source)
    copying_s = seconds_per_call(lambda _: target.copy_(source), sizes.device, sizes.num_repeats)
    width = sizes.limit_width
    left, right = (torch.randn(width, width, device=job.device, dtype=job.dtype) for _ in range(2))
    multiplying_s = seconds_per_call(
        lambda _: torch.mm(left, right), sizes.device, sizes.num_repeats
    )
    # those of a CPU say nothing about a GPU
    is_gpu = sizes.device == "cuda"
    job.tell(
        "limits",
        {
            "bandwidth_gb_per_s": 2 * source.nbytes / copying_s / 1e9 if is_gpu else None,
            "matrix_tflop_per_s": 2 * width**3 / multiplying_s / 1e12 if is_gpu else None,
        },
    )


def environment() -> dict[str, Any]:
    """Machine and versions."""
    found: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": {
            **describe_versions(),
            "triton": version("triton"),
            "cuda": torch.version.cuda,
        },
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "num_multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return found


def tests(job: Job) -> None:
    """Those that need a GPU; in a dry run there is none."""
    if job.sizes.device != "cuda":
        job.tell("tests", {"num_passed": None, "num_failed": None, "num_skipped": None})
        return
    memory = "tests/gpu/test_memory.py"
    counts = _tested("tests/gpu", "--ignore", memory, *_processes())
    job.tell("tests", counts)
    # some of these fill the GPU, so nothing runs beside them
    more = _tested(memory)
    job.tell("tests", {name: count + more[name] for name, count in counts.items()})


def _processes() -> list[str]:
    """Arguments for several: most of the time kernels are compiled, each by one core."""
    if find_spec("xdist") is None:
        return []
    return ["-n", str(min(8, os.cpu_count() or 1))]


def _tested(*arguments: str) -> dict[str, int]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", *arguments]
    # modules of these folders have names that tests have too
    own = (Path(__file__).parent, Path(__file__).parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = os.pathsep.join(path for path in paths if Path(path) not in own)
    environment = {**os.environ, "PYTHONPATH": kept}
    output = ""
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:  # so that the log has what came before a stop
            print(line, end="", flush=True)
            output += line
    return counts_of(output)


def counts_of(output: str) -> dict[str, int]:
    """From the last line that pytest prints, such as ``3 passed, 1 skipped in 0.5s``; without such
    a line something has failed.
    """
    last = output.strip().rpartition("\n")[2]
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", last)}
    names = ("failed", "errors", "error")
    return {
        "num_passed": counts.get("passed", 0),
        "num_failed": sum(counts.get(name, 0) for name in names) if " in " in last else 1,
        "num_skipped": counts.get("skipped", 0),
    }
