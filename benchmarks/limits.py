"""How fast this machine reads memory and multiplies: what no engine can beat. Prints JSON.

    python benchmarks/limits.py [--threads 2]

Read bandwidth is the best of torch's sum and a native loop over 1 GiB. Rates of matrix products are
those that torch reaches on large ones; beside them stands what the instructions do in registers,
which no real product reaches.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

SOURCE = Path(__file__).with_name("limits.cpp")
NUM_BYTES = 1 << 30
Together = Callable[[Callable[[int], float]], list[float]]
"""Runs a function once per thread, at the same time."""


def measure_limits(num_threads: int) -> dict[str, Any]:
    """Bandwidth in GB/s, rates in 10^9 operations a second; None for what can't be measured."""
    import torch

    torch.set_num_threads(num_threads)
    data = torch.ones(NUM_BYTES // 4)
    read = {"torch": NUM_BYTES / _best_s(data.sum) / 1e9}
    library = _compile()
    instructions: dict[str, float | None] = {"bf16": None, "int8": None}
    with ThreadPoolExecutor(num_threads) as pool:
        together = partial(_together, pool, num_threads)
        if library is not None:
            part = NUM_BYTES // num_threads // 512 * 512
            run = partial(_read, library, data.data_ptr(), part, together)
            read["native"] = num_threads * part / _best_s(run) / 1e9
            instructions = {
                "bf16": _instruction_rate(library.multiply_bf16, together),
                "int8": _instruction_rate(library.multiply_int8, together),
            }
    del data
    return {
        "num_threads": num_threads,
        "read_gb_per_s": read,
        "matmul_gop_per_s": {"bf16": _matmul_rate("bf16"), "int8": _matmul_rate("int8")},
        "instruction_gop_per_s": instructions,
    }


def best_of(measured: list[dict[str, Any]]) -> dict[str, float]:
    """One figure each from several measurements: the limits that percentages are taken of.

    The rate for int8 is that of torch, or, if more, the share of the instructions' rate that torch
    reaches in bfloat16: torch's own int8 products are slow on some machines.
    """
    read = max(value for one in measured for value in one["read_gb_per_s"].values())
    rates = {
        kind: max((one["matmul_gop_per_s"][kind] or 0.0) for one in measured)
        for kind in ("bf16", "int8")
    }
    peaks = {
        kind: max((one["instruction_gop_per_s"][kind] or 0.0) for one in measured)
        for kind in ("bf16", "int8")
    }
    if peaks["bf16"] and peaks["int8"]:
        rates["int8"] = max(rates["int8"], rates["bf16"] * peaks["int8"] / peaks["bf16"])
    rates["int8"] = max(rates["int8"], rates["bf16"])
    return {"read_gb_per_s": read, "bf16_gop_per_s": rates["bf16"], "int8_gop_per_s": rates["int8"]}


def _best_s(run: Callable[[], object], num_repeats: int = 5) -> float:
    run()
    times = []
    for _ in range(num_repeats):
        started = perf_counter()
        run()
        times.append(perf_counter() - started)
    return min(times)


def _compile() -> ctypes.CDLL | None:
    """The native loops; None without a compiler."""
    if shutil.which("g++") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "limits.so"
        flags = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-shared"]
        subprocess.run(["g++", *flags, "-o", str(path), str(SOURCE)], check=True)
        library = ctypes.CDLL(str(path))
    library.read_once.restype = ctypes.c_uint64
    library.read_once.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for name in ("multiply_bf16", "multiply_int8"):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_int64]
    return library


def _together(
    pool: ThreadPoolExecutor, num_threads: int, run: Callable[[int], float]
) -> list[float]:
    return list(pool.map(run, range(num_threads)))


def _read(library: ctypes.CDLL, start: int, part: int, together: Together) -> None:
    together(lambda index: float(library.read_once(start + index * part, part)))


def _instruction_rate(function: Callable[[int], float], together: Together) -> float | None:
    if not function(1):
        return None
    rounds = 30_000_000
    started = perf_counter()
    operations = sum(together(lambda _: function(rounds)))
    return operations / (perf_counter() - started) / 1e9


def _matmul_rate(kind: str) -> float | None:
    """The best of some large shapes."""
    import torch

    rates = []
    for rows, inner, columns in ((2048, 2048, 2048), (4096, 2048, 4096), (2048, 576, 1536)):
        if kind == "bf16":
            left, right = (
                torch.randn(rows, inner).bfloat16(),
                torch.randn(columns, inner).bfloat16(),
            )
            run = partial(torch.nn.functional.linear, left, right)
        else:
            left = torch.ones(rows, inner, dtype=torch.int8)
            run = partial(torch._int_mm, left, torch.ones(columns, inner, dtype=torch.int8).T)
        try:
            seconds = _best_s(run, 3)
        except RuntimeError:
            return None  # this build of torch has no such product
        rates.append(2 * rows * inner * columns / seconds / 1e9)
    return max(rates)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    print(json.dumps(measure_limits(parser.parse_args().threads)))


if __name__ == "__main__":
    main()
