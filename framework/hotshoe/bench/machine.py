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


class ForeignLoad:
    """The share of all cores that other processes use between two moments: noise in a figure."""

    def __init__(self) -> None:
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

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Wall, busy (of all cores) and own seconds."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        ticks = sum(int(fields[index]) for index in _BUSY_FIELDS)
        times = os.times()
        own = times.user + times.system
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
