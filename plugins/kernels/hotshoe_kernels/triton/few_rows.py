"""Products with few rows of activations, as in decoding: bound by reading the weight once.

A program is one warp, which computes a few outputs from the start of K to its end. So nothing goes
through shared memory, nothing waits for other warps, and sums have one order. Each lane loads 16
bytes of a weight's row at a time. Kernels are compiled for 1, 2, 4 and 8 rows.

Quantized weights are multiplied as integers, four at a time (``dp4a``), by activations that are
quantized to 8 bits in groups of 32: converting every weight to floating point would take longer
than to read it. (llama.cpp's kernels do likewise.)
"""

# M=rows of x N=out_features K=in_features G=groups W=words of 4 bytes

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotshoe_kernels.triton.weights import GROUP_SIZE, PlaneWeight
from hotshoe_triton.runtime import is_interpreting

_MIN_PROGRAMS_PER_PROCESSOR = 4


def dense_product(x: Tensor, weight: PlaneWeight, out: Tensor, num_processors: int) -> None:
    """``x W^T + b`` for up to ``options.MAX_ROWS`` rows.

    Args:
        x: ``[M, K]``, values of a row side by side.
        weight: prepared, ``dense``.
        out: ``[M, N]``, values of a row side by side; written.
        num_processors: of the GPU.
    """
    values, bias = weight.tensors["weight"], weight.tensors.get("bias")
    (num_rows, size), num_out = x.shape, weight.out_features
    vector = 16 // values.element_size()
    rows = triton.next_power_of_2(num_rows)
    columns = _columns(num_out, num_processors, 4 if rows == 1 else 2)
    _dense_product[(triton.cdiv(num_out, columns),)](
        x,
        values,
        values if bias is None else bias,
        out,
        num_rows,
        num_out,
        size,
        x.stride(0),
        out.stride(0),
        ROWS=rows,
        COLUMNS=columns,
        VECTORS=min(_vectors(rows), triton.next_power_of_2(triton.cdiv(size, vector))),
        VECTOR=vector,
        IS_WHOLE=size % vector == 0,
        HAS_BIAS=bias is not None,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _dense_product(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    size,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # indices are clamped where a mask would cost each load its own zeros
    weight += tl.minimum(column, num_out - 1).to(tl.int64)[:, None] * size
    sums = (tl.zeros((COLUMNS, VECTORS), tl.float32),) * ROWS
    for start in range(0, size, VECTORS * VECTOR):
        # two dimensions, so that every version of Triton gives weights and activations one layout
        k = (start + tl.arange(0, VECTORS * VECTOR))[None, :]
        if IS_WHOLE:
            at = weight + tl.minimum(k // VECTOR, size // VECTOR - 1) * VECTOR + k % VECTOR
            values = tl.load(at, eviction_policy="evict_first").to(tl.float32)
        else:
            values = tl.load(
                weight + k, mask=k < size, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
        added = sums[:0]
        for row in tl.static_range(ROWS):
            at = x + tl.minimum(row, num_rows - 1) * x_stride + k
            x_row = tl.load(at, mask=k < size, other=0.0).to(tl.float32)
            terms = tl.reshape(values * x_row, (COLUMNS, VECTORS, VECTOR))
            added += (sums[row] + tl.sum(terms, axis=2),)
        sums = added
    for row in tl.static_range(ROWS):
        y = tl.sum(sums[row], axis=1)
        mask = (column < num_out) & (row < num_rows)
        _store(y, bias, out + row * out_stride, column, mask, HAS_BIAS)


@triton.jit
def _store(y, bias, out, column, mask, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        y += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty), mask=mask)


class QuantizedRows:
    """Rows of activations in 8 bits, with a scale for each group of 32: ``scale = max|x| / 127``.

    Args:
        x: ``[M, K]``, values of a row side by side.

    Attributes:
        codes: ``[M, K]`` int8.
        scales: ``[M, G]`` float32.
        sums: of the codes of each group, ``[M, G]`` float32, scaled.
    """

    def __init__(self, x: Tensor) -> None:
        num_rows, size = x.shape
        num_groups = size // GROUP_SIZE
        self.codes = torch.empty((num_rows, size), dtype=torch.int8, device=x.device)
        self.scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
        self.sums = torch.empty_like(self.scales)
        groups = min(triton.next_power_of_2(num_groups), 32)
        _quantize_rows[(num_rows, triton.cdiv(num_groups, groups))](
            x,
            self.codes,
            self.scales,
            self.sums,
            num_groups,
            x.stride(0),
            GROUPS=groups,
            GROUP_SIZE=GROUP_SIZE,
            num_warps=4 if groups >= 16 else 1,
        )


@triton.jit
def _quantize_rows(
    x,
    codes,
    scales,
    sums,
    num_groups,
    x_stride,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    is_group = group < num_groups
    k = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    values = tl.load(x + row * x_stride + k, mask=is_group[:, None], other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), axis=1) / 127
    divisor = tl.where(scale > 0, scale, 1.0)
    rounded = tl.floor(values / divisor[:, None] + 0.5)
    total = tl.sum(rounded, axis=1)
    # where one isn't a number the largest is another's, and 8 bits can't tell
    scale = tl.where(total == total, scale, total)
    tl.store(codes + row * num_groups * GROUP_SIZE + k, rounded.to(tl.int8), mask=is_group[:, None])
    tl.store(scales + row * num_groups + group, scale, mask=is_group)
    tl.store(sums + row * num_groups + group, total * scale, mask=is_group)


def quantized_product(
    x: QuantizedRows, weight: PlaneWeight, out: Tensor, num_processors: int
) -> None:
    """``x W^T + b`` for up to ``options.MAX_ROWS`` rows.

    Args:
        x: the rows.
        weight: prepared, of one quantized format.
        out: ``[M, N]``, values of a row side by side; written.
        num_processors: of the GPU.
    """
    tensors = weight.tensors
    num_rows, num_groups = x.scales.shape
    num_out = weight.out_features
    codes, scales, bias = tensors["codes"], tensors["scales"], tensors.get("bias")
    rows = triton.next_power_of_2(num_rows)
    columns = _columns(num_out, num_processors, 4 if rows == 1 else 2)
    _quantized_product[(triton.cdiv(num_out, columns),)](
        x.codes.view(torch.int32),
        x.scales,
        x.sums,
        codes.view(torch.int32),
        scales,
        tensors.get("minima", scales),
        scales if bias is None else bias,
        out,
        num_rows,
        num_out,
        num_groups,
        out.stride(0),
        FORMAT=weight.format,
        ROWS=rows,
        COLUMNS=columns,
        GROUPS=min(_vectors(rows), max(triton.next_power_of_2(num_groups), 32)),
        HAS_BIAS=bias is not None,
        IS_INTERPRETED=is_interpreting(),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_product(
    x_codes,
    x_scales,
    x_sums,
    codes,
    scales,
    minima,
    bias,
    out,
    num_rows,
    num_out,
    num_groups,
    out_stride,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    HAS_NIBBLES: tl.constexpr = FORMAT == "q4_0" or FORMAT == "q4_1"
    WORDS: tl.constexpr = 4 if HAS_NIBBLES else 8
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # indices are clamped where a mask would cost each load its own zeros
    first_group = tl.minimum(column, num_out - 1).to(tl.int64)[:, None] * num_groups
    word = tl.arange(0, GROUPS * 4)[None, :]
    sums = (tl.zeros((COLUMNS, GROUPS), tl.float32),) * ROWS
    for start in range(0, num_groups, GROUPS):
        group = (start + tl.arange(0, GROUPS))[None, :]
        is_group = group < num_groups
        # two dimensions, so that every version of Triton gives weights and activations one layout
        clamped = tl.minimum(start + word // 4, num_groups - 1)
        at = codes + (first_group + clamped) * WORDS + word % 4
        low = tl.load(at, eviction_policy="evict_first")
        if HAS_NIBBLES:
            high = (low >> 4) & 0x0F0F0F0F
            low = low & 0x0F0F0F0F
        else:
            high = tl.load(at + 4, eviction_policy="evict_first")
        at = first_group + group
        if FORMAT != "int8":
            scale = tl.load(scales + at, mask=is_group, other=0.0).to(tl.float32)
        if FORMAT == "q4_1":
            minimum = tl.load(minima + at, mask=is_group, other=0.0).to(tl.float32)
        added = sums[:0]
        for row in tl.static_range(ROWS):
            x_group = tl.minimum(row, num_rows - 1) * num_groups
            at_x = x_codes + (x_group + clamped) * 8 + word % 4
            dots = _dot4(low, tl.load(at_x), tl.zeros(low.shape, tl.int32), IS_INTERPRETED)
            dots = _dot4(high, tl.load(at_x + 4), dots, IS_INTERPRETED)
            at = x_group + group
            dots = tl.reshape(dots, (COLUMNS, GROUPS, 4))
            terms = tl.sum(dots, axis=2).to(tl.float32)
            terms *= tl.load(x_scales + at, mask=is_group, other=0.0)
            if FORMAT == "q4_0":
                terms -= 8 * tl.load(x_sums + at, mask=is_group, other=0.0)
            if FORMAT != "int8":
                terms *= scale
            if FORMAT == "q4_1":
                terms += tl.load(x_sums + at, mask=is_group, other=0.0) * minimum
            added += (sums[row] + terms,)
        sums = added
    for row in tl.static_range(ROWS):
        y = tl.sum(sums[row], axis=1)
        mask = (column < num_out) & (row < num_rows)
        if FORMAT == "int8":
            y *= tl.load(scales + column, mask=mask, other=0.0)
        _store(y, bias, out + row * out_stride, column, mask, HAS_BIAS)


@triton.jit
def _dot4(a, b, acc, IS_INTERPRETED: tl.constexpr):
    """``acc`` plus the product of the four signed bytes of ``a`` with those of ``b``."""
    if IS_INTERPRETED:
        for shift in tl.static_range(0, 32, 8):
            acc += ((a << (24 - shift)) >> 24) * ((b << (24 - shift)) >> 24)
        return acc
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, acc],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


def _vectors(num_rows: int) -> int:
    """Loads of 16 bytes of a weight's row, or groups of it, that a program has under way: as many
    as there are registers for, also for the rows of activations.
    """
    if num_rows == 1:
        return 128
    return 64 if num_rows <= 4 else 32


def _columns(num_out: int, num_processors: int, most: int) -> int:
    """Outputs of a program: more share the activations, as long as enough programs are left."""
    columns = most
    while columns > 1 and num_out < columns * num_processors * _MIN_PROGRAMS_PER_PROCESSOR:
        columns //= 2
    return columns
