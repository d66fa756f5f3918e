"""How fast this machine reads memory and multiplies: what no engine can beat. Prints JSON.

    python benchmarks/limits.py [--threads 2]

Read bandwidth is that of torch's sum and of a native loop over 1 GiB. Rates of matrix products are
those that torch and hotshoe's native kernels reach on large ones; beside them stands what the
instructions do in registers, which no real product reaches.
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
        "matmul_gop_per_s": {
            "bf16": {"torch": _rate(_torch_bf16), "native": _rate(_native("dense"))},
            "int8": {"torch": _rate(_torch_int8), "native": _rate(_native("int8"))},
        },
        "instruction_gop_per_s": instructions,
    }


def best_of(measured: list[dict[str, Any]]) -> dict[str, float]:
    """One figure each from several measurements: the limits that percentages are taken of.

    The rate for int8 is at least the share of the instructions' rate that the best product reaches
    in bfloat16: int8 products are not as far optimised everywhere.
    """
    read = max(value for one in measured for value in one["read_gb_per_s"].values())
    rates, peaks = {}, {}
    for kind in ("bf16", "int8"):
        found = [rate for one in measured for rate in one["matmul_gop_per_s"][kind].values()]
        rates[kind] = max(rate or 0.0 for rate in found)
        peaks[kind] = max(one["instruction_gop_per_s"][kind] or 0.0 for one in measured)
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


Product = Callable[[int, int, int], Callable[[], object] | None]
"""Makes a product of so many rows, inner values and columns; None if there is none here."""


def _rate(make: Product) -> float | None:
    """The best of some large shapes."""
    rates = []
    for rows, inner, columns in ((2048, 2048, 2048), (4096, 2048, 4096), (2048, 576, 1536)):
        run = make(rows, inner, columns)
        if run is None:
            return None
        try:
            seconds = _best_s(run, 3)
        except RuntimeError:
            return None  # this build of torch has no such product
        rates.append(2 * rows * inner * columns / seconds / 1e9)
    return max(rates)


def _torch_bf16(rows: int, inner: int, columns: int) -> Callable[[], object]:
    import torch

    left, right = torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16()
    return partial(torch.nn.functional.linear, left, right)


def _torch_int8(rows: int, inner: int, columns: int) -> Callable[[], object]:
    import torch

    left = torch.ones(rows, inner, dtype=torch.int8)
    return partial(torch._int_mm, left, torch.ones(columns, inner, dtype=torch.int8).T)


def _native(weight_format: str) -> Product:
    """The linear layer of hotshoe's native kernels, where they can be compiled."""

    def make(rows: int, inner: int, columns: int) -> Callable[[], object] | None:
        import torch

        from hotshoe.api import HotshoeError, KernelsContext, Weight
        from hotshoe_kernels.cpu import hotshoe_component

        component = hotshoe_component()
        context = KernelsContext(device=torch.device("cpu"), dtype=torch.bfloat16)
        try:
            kernels: Any = component.factory(component.options(), context)
        except HotshoeError:
            return None
        if weight_format == "int8":
            values = torch.ones(columns, inner, dtype=torch.int8)
            tensors = {"weight": values, "scales": torch.ones(columns)}
        else:
            tensors = {"weight": torch.randn(columns, inner).bfloat16()}
        weight = kernels.prepare_weight(
            Weight(format=weight_format, out_features=columns, in_features=inner, tensors=tensors)
        )
        return partial(kernels.linear, torch.randn(rows, inner).bfloat16(), weight)

    return make


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    print(json.dumps(measure_limits(parser.parse_args().threads)))


if __name__ == "__main__":
    main()
