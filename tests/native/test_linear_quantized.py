"""``linear`` and ``embedding`` with weights of 8 and 4 bits equal float64 arithmetic on what the
weights and the quantized activations stand for.
"""

# M=rows of x N=out_features K=in_features G=groups of 32 along K

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hotshoe.weights.gguf_blocks import dequantize
from hotshoe_native.isa import available
from hotshoe_native.library import load
from hotshoe_native.linear import (
    DTYPES,
    EmbeddingArgs,
    PackedPart,
    PackedWeight,
    pack_quantized,
)
from hotshoe_native.ops import NativeLibrary
from hotshoe_native.quantized import FORMATS
from hotshoe_native.weight_arena import WeightArena
from native.guarded_product import guarded_product

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
NUM_CASES = 12

each_format = pytest.mark.parametrize("weight_format", FORMATS)


@dataclass(frozen=True)
class Layer:
    """A quantized weight and the numbers that it stands for.

    Attributes:
        raw: as a checkpoint holds it.
        values_NK: float32.
        sizes_NK: float64, what the terms of a value add up to in absolute terms.
    """

    weight_format: str
    raw: Tensor
    scales_N: Tensor | None
    bias_N: Tensor | None
    values_NK: Tensor
    sizes_NK: Tensor

    def part(self, library: NativeLibrary) -> PackedPart:
        """The weight, packed."""
        return pack_quantized(
            library,
            self.weight_format,
            self.raw,
            self.values_NK.shape[1],
            WeightArena(),
            scales=self.scales_N,
            bias=self.bias_N,
        )


def random_layer(weight_format: str, n: int, k: int, seed: int, *, has_bias: bool = True) -> Layer:
    """Values of all bits, scales like those of real weights."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(n, k // 32, generator=generator) * 0.01 + 0.001
    offsets = torch.randn(n, k // 32, generator=generator) * 0.03
    codes = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    bias_N = torch.randn(n, generator=generator) if has_bias else None
    return layer_of(weight_format, codes, scales, offsets, bias_N)


def layer_of(
    weight_format: str,
    codes_NK: Tensor,
    scales_NG: Tensor,
    offsets_NG: Tensor,
    bias_N: Tensor | None,
) -> Layer:
    """A layer with given bits.

    Args:
        codes_NK: uint8; only the lower halves count for formats of 4 bits.
        scales_NG: float32 d; rounded to float16, or the first column alone counts for ``int8``.
        offsets_NG: float32 m, of the formats that have it.
    """
    n, k = codes_NK.shape
    if weight_format == "int8":
        weight = codes_NK.view(torch.int8)
        values = weight.float() * scales_NG[:, :1]
        return Layer(weight_format, weight, scales_NG[:, 0], bias_N, values, values.double().abs())
    codes = codes_NK.view(n, -1, 32)
    halves = [scales_NG.half().view(n, -1, 1).view(torch.uint8)]
    if weight_format == "q4_1":
        halves.append(offsets_NG.half().view(n, -1, 1).view(torch.uint8))
    if weight_format != "q8_0":
        codes = (codes[..., :16] & 15) | (codes[..., 16:] << 4)
    raw = torch.cat((*halves, codes), dim=-1).view(n, -1)
    values = dequantize(raw, weight_format, torch.float32)
    sizes = values.double().abs()
    if weight_format == "q4_1":
        products = codes_NK.bitwise_and(15).view(n, -1, 32) * scales_NG.half().double()[..., None]
        sizes = (products.abs() + offsets_NG.half().double().abs()[..., None]).view(n, k)
    return Layer(weight_format, raw, None, bias_N, values, sizes)


def linear(
    library: NativeLibrary,
    layers: list[Layer],
    x: Tensor,
    *,
    num_threads: int = 1,
    y_dtype: torch.dtype | None = None,
) -> Tensor:
    weight = PackedWeight([layer.part(library) for layer in layers])
    return guarded_product(
        library,
        "linear",
        weight.address,
        x,
        weight.out_features,
        num_threads=num_threads,
        y_dtype=y_dtype,
    )


def quantized(x: Tensor) -> Tensor:
    """What activations are rounded to, in float64."""
    groups = x.float().view(x.shape[0], -1, 32)
    scale = groups.abs().amax(dim=-1, keepdim=True) / 127
    is_zero = scale < SMALLEST_NORMAL
    codes = torch.where(is_zero, 0.0, (groups * (1 / scale)).round())
    return (codes.double() * scale.double()).view(x.shape)


def assert_exact(y: Tensor, layer: Layer, x: Tensor) -> None:
    """Y is right up to the float32 rounding of one addition per group, and the dtype's."""
    activations = quantized(x)
    expected = activations @ layer.values_NK.double().T
    sizes = activations.abs() @ layer.sizes_NK.T
    if layer.bias_N is not None:
        expected += layer.bias_N.double()
        sizes += layer.bias_N.double().abs()
    tolerance = sizes * (x.shape[1] // 32 + 4) * 2.0**-23 + 1e-37
    if y.dtype == torch.bfloat16:
        tolerance += expected.abs() * 2.0**-8
    error = (y.double() - expected).abs()
    assert (error <= tolerance).all(), f"{(error / tolerance).max()} times the tolerance"


def random_shape(rng: random.Random) -> tuple[int, int, int]:
    """(M, N, K)."""
    return rng.randint(1, 70), rng.randint(1, 150), 32 * rng.randint(1, 24)


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_result_equals_float64_on_quantized_operands(
    library: NativeLibrary, weight_format: str, dtype: torch.dtype
) -> None:
    rng = random.Random(f"{weight_format} {dtype}")
    for case in range(NUM_CASES):
        m, n, k = random_shape(rng)
        layer = random_layer(weight_format, n, k, case, has_bias=case % 2 == 0)
        x = torch.randn(m, k + 7, generator=torch.Generator().manual_seed(case)).to(dtype)[:, :k]
        y = linear(library, [layer], x, num_threads=1 + case % 2)
        assert_exact(y, layer, x.contiguous())


@each_format
def test_results_of_bfloat16_need_not_be_rounded(
    library: NativeLibrary, weight_format: str
) -> None:
    layer = random_layer(weight_format, 77, 96, 15)
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(16)).bfloat16()
    exact = linear(library, [layer], x, y_dtype=torch.float32)
    assert_exact(exact, layer, x)
    assert exact.bfloat16().equal(linear(library, [layer], x))


@each_format
def test_quantizing_activations_changes_the_result_by_less_than_a_percent(
    library: NativeLibrary, weight_format: str
) -> None:
    layer = random_layer(weight_format, 96, 576, 1, has_bias=False)
    x = torch.randn(33, 576, generator=torch.Generator().manual_seed(2))
    expected = x.double() @ layer.values_NK.double().T
    error = linear(library, [layer], x) - expected
    assert error.norm() < 0.01 * expected.norm()
    assert error.norm() > 0


@each_format
def test_a_row_has_the_same_bits_in_every_batch_on_any_number_of_threads(
    library: NativeLibrary, weight_format: str
) -> None:
    layer = random_layer(weight_format, 77, 416, 3)
    x = torch.randn(70, 416, generator=torch.Generator().manual_seed(4))
    alone = torch.cat([linear(library, [layer], x[i : i + 1]) for i in range(70)])
    for num_rows in (2, 3, 5, 6, 7, 8, 13, 32, 70):
        for num_threads in (1, 2, 3):
            y = linear(library, [layer], x[:num_rows], num_threads=num_threads)
            assert y.equal(alone[:num_rows])


@each_format
def test_rows_beyond_a_second_level_cache_are_right_too(
    library: NativeLibrary, weight_format: str
) -> None:
    layer = random_layer(weight_format, 40, 768, 5)
    x = torch.randn(700, 768, generator=torch.Generator().manual_seed(6))
    assert_exact(linear(library, [layer], x), layer, x)


@each_format
def test_rows_that_threads_have_for_themselves_have_the_same_bits(
    library: NativeLibrary, weight_format: str
) -> None:
    layer = random_layer(weight_format, 40, 64, 17)
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(18)).bfloat16()
    few = torch.cat([linear(library, [layer], x[i : i + 50]) for i in range(0, 300, 50)])
    for num_threads in (1, 2, 3, 4):
        assert linear(library, [layer], x, num_threads=num_threads).equal(few)


def test_parts_of_different_formats_share_a_result(library: NativeLibrary) -> None:
    layers = [
        random_layer(name, n, 160, n) for name, n in zip(FORMATS, (40, 32, 7, 65), strict=True)
    ]
    x = torch.randn(9, 160, generator=torch.Generator().manual_seed(7))
    for num_threads in (1, 2):
        y = linear(library, layers, x, num_threads=num_threads)
        for layer, columns in zip(layers, y.split([40, 32, 7, 65], dim=1), strict=True):
            assert_exact(columns, layer, x)


@each_format
@pytest.mark.parametrize("code", [0x00, 0x80, 0x7F, 0xFF])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_products_do_not_saturate(
    library: NativeLibrary, weight_format: str, code: int, sign: float
) -> None:
    codes = torch.full((33, 128), code, dtype=torch.uint8)
    layer = layer_of(weight_format, codes, torch.ones(33, 4), -torch.ones(33, 4), None)
    x = torch.full((7, 128), 127.0 * sign)
    assert linear(library, [layer], x).equal(x @ layer.values_NK.T)


@each_format
def test_rows_of_zeros_give_the_bias(library: NativeLibrary, weight_format: str) -> None:
    layer = random_layer(weight_format, 50, 96, 8)
    x = torch.zeros(5, 96)
    x[3] = 1.0
    y = linear(library, [layer], x)
    assert layer.bias_N is not None
    for row in (0, 1, 2, 4):
        assert y[row].equal(layer.bias_N)
    assert_exact(y, layer, x)


@each_format
@pytest.mark.parametrize("size", [1e35, 1e-30, 1e-34])
def test_huge_and_tiny_activations_keep_their_precision(
    library: NativeLibrary, weight_format: str, size: float
) -> None:
    layer = random_layer(weight_format, 50, 96, 9, has_bias=False)
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(10)) * size
    assert_exact(linear(library, [layer], x), layer, x)


@each_format
def test_activations_whose_scale_is_subnormal_count_as_zeros(
    library: NativeLibrary, weight_format: str
) -> None:
    layer = random_layer(weight_format, 50, 96, 9)
    y = linear(library, [layer], torch.full((6, 96), 1e-37))
    assert layer.bias_N is not None
    assert y.equal(layer.bias_N.expand(6, 50))


@each_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_spoils_its_row_and_no_other(
    library: NativeLibrary, weight_format: str, value: float
) -> None:
    layer = random_layer(weight_format, 50, 96, 11)
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(12))
    before = linear(library, [layer], x)
    x[2, 40] = value
    after = linear(library, [layer], x)
    others = [0, 1, 3, 4, 5]
    assert not after[2].isfinite().any()
    assert after[others].equal(before[others])


@pytest.mark.parametrize("weight_format", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("scale", [6e-8, 3e-5, 60000.0, -0.5])
def test_block_scales_of_every_size_are_exact(
    library: NativeLibrary, weight_format: str, scale: float
) -> None:
    codes = torch.randint(
        0, 256, (40, 64), generator=torch.Generator().manual_seed(13), dtype=torch.uint8
    )
    scales = torch.full((40, 2), scale)
    scales[5] = 0.0
    layer = layer_of(weight_format, codes, scales, -3 * scales.clamp(max=20000.0), None)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(14))
    assert_exact(linear(library, [layer], x), layer, x)
    assert embedded(library, layer, list(range(40)), torch.float32).equal(layer.values_NK)


def embedded(
    library: NativeLibrary, layer: Layer, token_ids: list[int], dtype: torch.dtype
) -> Tensor:
    weight = PackedWeight([layer.part(library)])
    out = torch.empty(len(token_ids), weight.in_features, dtype=dtype)
    ids = torch.tensor(token_ids)
    args = EmbeddingArgs(
        token_ids=ids.data_ptr(),
        out=out.data_ptr(),
        num_tokens=len(token_ids),
        dtype=DTYPES[dtype],
        weight=weight.address,
    )
    library.op("embedding")(args, 1)
    return out


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_embedding_rows_are_the_dequantized_values(
    library: NativeLibrary, weight_format: str, dtype: torch.dtype
) -> None:
    layer = random_layer(weight_format, 45, 224, 15)
    token_ids = [44, 0, 31, 32, 7, 7]
    rows = embedded(library, layer, token_ids, dtype)
    assert rows.equal(layer.values_NK[token_ids].to(dtype))


@each_format
def test_every_library_packs_alike(weight_format: str) -> None:
    layer = random_layer(weight_format, 45, 96, 16)
    first, *others = (layer.part(load(isa.name)).panels for isa in available())
    assert all(other.equal(first) for other in others)
