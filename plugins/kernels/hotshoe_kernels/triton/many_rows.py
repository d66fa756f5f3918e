"""Products of quantized weights with many rows of activations, on tensor cores, and rows of such
weights as values.

Codes become values in the dtype of activations on the way to the tensor cores, so the weight is
read from memory as it is stored. With very many rows that work would be repeated for each block of
them: then values are made once, a part of the weight at a time, for the vendor's product.
"""

# M=rows of x N=out_features K=in_features G=groups S=splits

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from hotshoe_kernels.triton.weights import GROUP_SIZE, PlaneWeight

_MAX_FUSED_ROWS = 256
_VALUES_BYTES = (
    64 << 20
)  # of values at a time: a cache's worth, and enough rows for every processor
_MIN_PROGRAMS_PER_PROCESSOR = 2
_MAX_SPLITS = 8


def product_of_values(x: Tensor, values: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``x W^T + b`` by the vendor's library, in the dtype of x or in float32.

    Args:
        x: ``[M, K]``.
        values: ``[N, K]``, dtype of x.
        bias: ``[N]``, or None.
        dtype: of the result.
    """
    if dtype == x.dtype:
        return F.linear(x, values, bias)
    if x.is_cuda:
        output = torch.mm(x, values.T, out_dtype=dtype)
    else:
        output = x.to(dtype) @ values.to(dtype).T
    return output if bias is None else output.add_(bias)


def quantized_matmul(x: Tensor, weight: PlaneWeight, out: Tensor, num_processors: int) -> None:
    """``x W^T + b`` for any number of rows.

    Args:
        x: ``[M, K]``, values of a row side by side.
        weight: prepared, of one quantized format.
        out: ``[M, N]``, values of a row side by side; written.
        num_processors: of the GPU.
    """
    if x.shape[0] > _MAX_FUSED_ROWS:
        _multiply_values(x, weight, out)
    else:
        _multiply_codes(x, weight, out, num_processors)


def _multiply_values(x: Tensor, weight: PlaneWeight, out: Tensor) -> None:
    bias = weight.tensors.get("bias")
    step = max(_VALUES_BYTES // (weight.in_features * x.element_size()), 1)
    for begin in range(0, weight.out_features, step):
        end = min(begin + step, weight.out_features)
        values = torch.empty((end - begin, weight.in_features), dtype=x.dtype, device=x.device)
        read_rows(weight, values, first_row=begin)
        part = None if bias is None else bias[begin:end]
        out[:, begin:end] = product_of_values(x, values, part, out.dtype)


def _multiply_codes(x: Tensor, weight: PlaneWeight, out: Tensor, num_processors: int) -> None:
    tensors = weight.tensors
    bias, scales = tensors.get("bias"), tensors["scales"]
    (num_rows, _), num_out = x.shape, weight.out_features
    num_groups = weight.in_features // GROUP_SIZE
    rows = min(max(triton.next_power_of_2(num_rows), 16), 128)
    columns = 64 if rows < 128 else 128
    groups = 2 if x.element_size() < 4 else 1
    num_tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_out, columns)
    num_splits, split_groups = _splits(num_tiles, num_groups, groups, num_processors)
    shape = (num_splits, num_rows, num_out)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device) if num_splits > 1 else out
    _multiply[(num_tiles, num_splits)](
        x,
        tensors["codes"],
        scales,
        tensors.get("minima", scales),
        scales if bias is None else bias,
        parts,
        num_rows,
        num_out,
        num_groups,
        split_groups,
        x.stride(0),
        parts.stride(-2),
        parts.stride(0) if num_splits > 1 else 0,
        FORMAT=weight.format,
        ROWS=rows,
        COLUMNS=columns,
        GROUPS=groups,
        GROUP_SIZE=GROUP_SIZE,
        HAS_BIAS=bias is not None and num_splits == 1,
        num_warps=8 if rows == 128 else 4,
        num_stages=4 if rows < 128 else 3,
    )
    if num_splits > 1:
        block = 1024
        _add_splits[(num_rows, triton.cdiv(num_out, block))](
            parts,
            scales if bias is None else bias,
            out,
            num_rows,
            num_out,
            out.stride(0),
            SPLITS=num_splits,
            BLOCK=block,
            HAS_BIAS=bias is not None,
        )


@triton.jit(do_not_specialize=["num_rows", "split_groups"])
def _multiply(
    x,
    codes,
    scales,
    minima,
    bias,
    out,
    num_rows,
    num_out,
    num_groups,
    split_groups,
    x_stride,
    out_stride,
    split_stride,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    HAS_NIBBLES: tl.constexpr = FORMAT == "q4_0" or FORMAT == "q4_1"
    BYTES: tl.constexpr = GROUP_SIZE // 2 if HAS_NIBBLES else GROUP_SIZE
    # programs that share a part of the weight run together
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    row = tl.program_id(0) % num_row_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // num_row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    first_group = tl.program_id(1) * split_groups
    num_groups_here = tl.minimum(first_group + split_groups, num_groups)
    x_rows = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * x_stride
    weight_row = tl.minimum(column, num_out - 1).to(tl.int64)[:, None] * num_groups
    byte = tl.arange(0, GROUPS * BYTES)
    k = byte // BYTES * GROUP_SIZE + byte % BYTES
    byte_in_group = tl.arange(0, BYTES)[None, None, :]
    # codes are exact in every dtype, and converted to half precision several at a time
    dtype: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first_group, num_groups_here, GROUPS):
        group = start + tl.arange(0, GROUPS)
        clamped = tl.minimum(group, num_groups - 1)
        is_x = (start * GROUP_SIZE + k < num_groups_here * GROUP_SIZE)[None, :]
        at_x = x_rows + start * GROUP_SIZE + k[None, :]
        loaded = tl.load(
            codes + (weight_row + clamped[None, :])[:, :, None] * BYTES + byte_in_group
        )
        at = weight_row + clamped[None, :]
        if FORMAT != "int8":
            scale = tl.load(scales + at).to(dtype)[:, :, None]
        if HAS_NIBBLES:
            low = (loaded & 15).to(tl.int8).to(dtype)
            high = (loaded >> 4).to(tl.int8).to(dtype)
            if FORMAT == "q4_0":
                low, high = (low - 8) * scale, (high - 8) * scale
            else:
                minimum = tl.load(minima + at).to(dtype)[:, :, None]
                low, high = low * scale + minimum, high * scale + minimum
            acc = _add_product(tl.load(at_x, mask=is_x, other=0.0), low, acc)
            at_x += GROUP_SIZE // 2
            acc = _add_product(tl.load(at_x, mask=is_x, other=0.0), high, acc)
        else:
            values = loaded.to(dtype)
            if FORMAT != "int8":
                values *= scale
            acc = _add_product(tl.load(at_x, mask=is_x, other=0.0), values, acc)
    is_column = column < num_out
    if FORMAT == "int8":
        acc *= tl.load(scales + column, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out += tl.program_id(1).to(tl.int64) * split_stride
    at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    mask = (row < num_rows)[:, None] & is_column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_product(x, values, acc):
    """``acc + x values^T``, of values ``[COLUMNS, GROUPS, BYTES]``."""
    w = tl.reshape(values, (values.shape[0], values.shape[1] * values.shape[2]))
    return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows"])
def _add_splits(
    parts,
    bias,
    out,
    num_rows,
    num_out,
    out_stride,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_out
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * num_rows + row) * num_out + column, mask=mask, other=0.0)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=mask)


def _splits(num_tiles: int, num_groups: int, groups: int, num_processors: int) -> tuple[int, int]:
    """Into how many parts K is split so that every processor has programs, and groups of each."""
    wanted = triton.cdiv(_MIN_PROGRAMS_PER_PROCESSOR * num_processors, num_tiles)
    steps = triton.cdiv(num_groups, groups)
    # a part of fewer steps would take longer to add than to compute
    num_splits = max(min(wanted, _MAX_SPLITS, steps // 8), 1)
    split_groups = triton.cdiv(steps, num_splits) * groups
    return triton.cdiv(num_groups, split_groups), split_groups


def read_rows(
    weight: PlaneWeight, out: Tensor, *, row_ids: Tensor | None = None, first_row: int = 0
) -> None:
    """Values of some rows.

    Args:
        weight: prepared, of one quantized format.
        out: ``[n, K]``, contiguous; written. Rows that the weight doesn't have are not numbers.
        row_ids: ``[n]`` int64; None for those from ``first_row`` on.
        first_row: the first of them.
    """
    num_groups = weight.in_features // GROUP_SIZE
    groups = min(triton.next_power_of_2(num_groups), 64)
    scales = weight.tensors["scales"]
    if out.shape[0] == 0:
        return
    _read_rows[(out.shape[0], triton.cdiv(num_groups, groups))](
        scales if row_ids is None else row_ids.contiguous(),
        weight.tensors["codes"],
        scales,
        weight.tensors.get("minima", scales),
        out,
        first_row,
        weight.out_features,
        num_groups,
        FORMAT=weight.format,
        GROUPS=groups,
        GROUP_SIZE=GROUP_SIZE,
        HAS_IDS=row_ids is not None,
        num_warps=4 if groups >= 32 else 1,
    )


@triton.jit(do_not_specialize=["first_row"])
def _read_rows(
    row_ids,
    codes,
    scales,
    minima,
    out,
    first_row,
    num_weight_rows,
    num_groups,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    HAS_NIBBLES: tl.constexpr = FORMAT == "q4_0" or FORMAT == "q4_1"
    BYTES: tl.constexpr = GROUP_SIZE // 2 if HAS_NIBBLES else GROUP_SIZE
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + place) if HAS_IDS else first_row + place
    is_row = (row >= 0) & (row < num_weight_rows)
    nothing = tl.where(is_row, 0.0, float("nan"))
    row = tl.where(is_row, row, 0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    mask = group < num_groups
    byte = tl.arange(0, BYTES)[None, :]
    at = row * num_groups + group
    loaded = tl.load(codes + at * BYTES + byte, mask=mask, other=0)
    if FORMAT == "int8":
        scale = tl.load(scales + row) + nothing
    else:
        scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32) + nothing
    out += place * num_groups * GROUP_SIZE + group * GROUP_SIZE + byte
    if HAS_NIBBLES:
        minimum = -8 * scale
        if FORMAT == "q4_1":
            minimum = tl.load(minima + at, mask=mask, other=0.0).to(tl.float32)
        low = (loaded & 15).to(tl.float32) * scale + minimum
        high = (loaded >> 4).to(tl.float32) * scale + minimum
        tl.store(out, low.to(out.dtype.element_ty), mask=mask)
        tl.store(out + GROUP_SIZE // 2, high.to(out.dtype.element_ty), mask=mask)
    else:
        values = loaded.to(tl.float32) * scale
        tl.store(out, values.to(out.dtype.element_ty), mask=mask)
