"""What a result must say about where it was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = ("hotshoe", "torch", "transformers", "tokenizers")
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal of /proc/stat


def describe_machine() -> dict[str, Any]:
    """Processor, memory, accelerator and operating system, as plain data."""
    import torch

    has_cuda = torch.cuda.is_available()
    return {
        "cpu": _cpu_model(),
        "num_cores": _num_cores(),
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
        "gpu": torch.cuda.get_device_name() if has_cuda else None,
        "system": platform.platform(),
    }


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter."""
    versions = {name: importlib.metadata.version(name) for name in _DISTRIBUTIONS}
    return {"python": platform.python_version(), **versions}


def read_bandwidth_gb_per_s() -> float:
    """How fast this process reads memory now: the bound of decoding one sequence. Takes 0.2 s."""
    import torch

    values = torch.ones(64 * 1024**2, dtype=torch.float32)
    values.sum()
    started = time.perf_counter()
    num_rounds = 4
    for _ in range(num_rounds):
        values.sum()
    return num_rounds * values.nbytes / (time.perf_counter() - started) / 1e9


def peak_memory_mb() -> float:
    """Most resident memory that this process has had."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def process_tree(process_id: int) -> list[int]:
    """A process and all its descendants that are alive, parents first; Linux only."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [process_id]
    for one in found:  # grows while it is walked
        found += children.get(one, [])
    return found


def tree_memory_mb(process_id: int) -> float:
    """Memory of a process and its descendants, pages that several of them share counted once."""
    total_kb = 0
    for one in process_tree(process_id):
        try:
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
        except OSError:
            continue  # it has just ended
        total_kb += sum(
            int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")
        )
    return total_kb / 1024


class ForeignLoad:
    """The share of all cores that other processes use between two moments: noise in a figure.

    Args:
        process_id: whose use isn't foreign, with its descendants; None: this process only.
    """

    def __init__(self, process_id: int | None = None) -> None:
        self._process_id = process_id
        self._started = self._now()

    def share(self) -> float | None:
        """Since construction, 0 to 1; None where the system doesn't tell."""
        now = self._now()
        if self._started is None or now is None:
            return None
        wall, busy, own = (
            later - earlier for later, earlier in zip(now, self._started, strict=True)
        )
        return max(0.0, (busy - own) / max(wall, 1e-3) / (os.cpu_count() or 1))

    def _now(self) -> tuple[float, float, float] | None:
        """Wall, busy (of all cores) and own seconds."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        ticks = sum(int(fields[index]) for index in _BUSY_FIELDS)
        own = self._own_seconds()
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own

    def _own_seconds(self) -> float:
        if self._process_id is None:
            times = os.times()
            return times.user + times.system
        trees = [_stat_fields(one) for one in process_tree(self._process_id)]
        # user and system time, of the process and of those children that it has waited for
        ticks = sum(int(field) for fields in trees if fields for field in fields[11:15])
        return ticks / os.sysconf("SC_CLK_TCK")


def _stat_fields(process_id: int) -> list[str] | None:
    """What ``/proc/PID/stat`` says after the name; None if the process has ended."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
