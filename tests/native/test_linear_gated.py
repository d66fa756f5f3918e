"""``linear_silu_and_mul`` gives the bits that ``silu_and_mul`` gives of ``linear``, and writes
nothing but its outputs.
"""

# M=rows of x N=rows of gates, and of factors K=in_features

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from hotshoe_native.elementwise import SiluAndMulArgs
from hotshoe_native.linear import (
    DTYPES,
    PackedPart,
    PackedWeight,
    pack_dense,
    pack_quantized,
)
from hotshoe_native.ops import NativeLibrary
from hotshoe_native.quantized import FORMATS
from hotshoe_native.weight_arena import WeightArena
from native.guarded_product import guarded_product

ROW_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}


def part(
    library: NativeLibrary, weight_format: str, n: int, k: int, dtype: torch.dtype
) -> PackedPart:
    """Random rows, such that products are of the order of one, and a bias."""
    bias = torch.randn(n)
    if weight_format == "dense":
        return pack_dense((torch.randn(n, k) / k**0.5).to(dtype), bias, WeightArena())
    scales = None
    if weight_format == "int8":
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        scales = torch.rand(n) / 60 / k**0.5
    else:
        blocks = torch.randint(0, 256, (n, k // 32, ROW_BYTES[weight_format]), dtype=torch.uint8)
        largest = 127 if weight_format == "q8_0" else 8
        for begin in (0, 2) if weight_format == "q4_1" else (0,):
            halves = (torch.rand(n, k // 32, 1) / largest / k**0.5).half()
            blocks[..., begin : begin + 2] = halves.view(torch.uint8)
        weight = blocks.view(n, -1)
    return pack_quantized(
        library, weight_format, weight, k, WeightArena(), scales=scales, bias=bias
    )


def assert_same_bits(
    library: NativeLibrary, weight: PackedWeight, x: Tensor, num_threads: int
) -> None:
    """One op gives what two give."""
    assert weight.halves_address is not None
    n = weight.out_features // 2
    both = guarded_product(library, "linear", weight.address, x, 2 * n, num_threads=num_threads)
    expected = torch.empty(len(x), n, dtype=x.dtype)
    args = SiluAndMulArgs(
        x=both.data_ptr(),
        x_stride=2 * n,
        out=expected.data_ptr(),
        num_rows=len(x),
        size=n,
        dtype=DTYPES[x.dtype],
    )
    library.op("silu_and_mul")(args, num_threads)
    gated = guarded_product(
        library, "linear_silu_and_mul", weight.halves_address, x, n, num_threads=num_threads
    )
    assert gated.equal(expected), (weight.out_features, *x.shape, num_threads)


@pytest.mark.parametrize("weight_format", ["dense", *FORMATS])
def test_halves_of_one_part(library: NativeLibrary, weight_format: str, dtype: torch.dtype) -> None:
    rng = random.Random(f"{weight_format} {dtype}")
    torch.manual_seed(0)
    for num_rows in (1, 2, 3, 8, rng.randint(4, 70), rng.randint(70, 250)):
        n, k = 32 * rng.randint(1, 6), 32 * rng.randint(1, 20)
        weight = PackedWeight([part(library, weight_format, 2 * n, k, dtype)])
        x = torch.randn(num_rows, k + 7).to(dtype)[:, :k]
        for num_threads in (1, 2, 5):
            assert_same_bits(library, weight, x, num_threads)


def test_parts_of_any_width_and_format(library: NativeLibrary, dtype: torch.dtype) -> None:
    rng = random.Random(str(dtype))
    torch.manual_seed(1)
    formats = ["dense", *FORMATS]
    for gates in formats:
        for factors in formats:
            n, k, num_rows = (
                rng.choice([1, 33, 70, 128]),
                32 * rng.randint(1, 9),
                rng.randint(1, 99),
            )
            parts = [part(library, name, n, k, dtype) for name in (gates, factors)]
            x = torch.randn(num_rows, k).to(dtype)
            assert_same_bits(library, PackedWeight(parts), x, rng.choice([1, 2, 3]))


@pytest.mark.parametrize("weight_format", ["dense", "q8_0"])
def test_rows_beyond_a_second_level_cache(
    library: NativeLibrary, weight_format: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    weight = PackedWeight([part(library, weight_format, 128, 1536, dtype)])
    x = torch.randn(700, 1536).to(dtype)
    for num_threads in (1, 2):
        assert_same_bits(library, weight, x, num_threads)


def test_weights_that_have_no_halves(library: NativeLibrary) -> None:
    def widths(*ns: int) -> PackedWeight:
        return PackedWeight([part(library, "dense", n, 8, torch.float32) for n in ns])

    for weight in (widths(33), widths(40), widths(32, 64), widths(32, 16, 16)):
        assert weight.halves_address is None
