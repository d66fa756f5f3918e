"""Norms, rotary embeddings and activations: one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_NORM_BLOCK = 8192
_MIN_NORM_TILE = 1024
_ROPE_HEADS = 8


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As ``Kernels.rms_norm``; the sum is written into the residual."""
    x = packed(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    total = x if residual is None else packed(residual)
    if num_rows:
        block = min(triton.next_power_of_2(size), _MAX_NORM_BLOCK)
        rows = max(_MIN_NORM_TILE // block, 1)
        _rms_norm[(triton.cdiv(num_rows, rows),)](
            x,
            total,
            weight,
            out,
            num_rows,
            num_heads,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            total.stride(0),
            total.stride(1) if x.dim() == 3 else 0,
            eps,
            SIZE=size,
            BLOCK=block,
            ROWS=rows,
            HAS_RESIDUAL=residual is not None,
            num_warps=min(max(rows * block // 512, 1), 8),
        )
    return out, total


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x,
    residual,
    weight,
    out,
    num_rows,
    num_heads,
    x_stride,
    x_head_stride,
    residual_stride,
    residual_head_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_rows)[:, None]
    token, head = (rows // num_heads).to(tl.int64), (rows % num_heads).to(tl.int64)
    x += (token * x_stride + head * x_head_stride)[:, None]
    residual += (token * residual_stride + head * residual_head_stride)[:, None]
    out += rows.to(tl.int64)[:, None] * SIZE
    if SIZE <= BLOCK:
        columns = tl.arange(0, BLOCK)[None, :]
        mask = is_row & (columns < SIZE)
        values = tl.load(x + columns, mask=mask, other=0.0)
        scales = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            before = tl.load(residual + columns, mask=mask, other=0.0).to(tl.float32)
            values = (before + values.to(tl.float32)).to(values.dtype)
            tl.store(residual + columns, values, mask=mask)
        values = values.to(tl.float32)
        factor = tl.rsqrt(tl.sum(values * values, axis=1) / SIZE + eps)[:, None]
        tl.store(out + columns, (values * factor * scales).to(out.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, SIZE, BLOCK):
            columns = start + tl.arange(0, BLOCK)[None, :]
            mask = is_row & (columns < SIZE)
            values = tl.load(x + columns, mask=mask, other=0.0)
            if HAS_RESIDUAL:
                before = tl.load(residual + columns, mask=mask, other=0.0).to(tl.float32)
                values = (before + values.to(tl.float32)).to(values.dtype)
                tl.store(residual + columns, values, mask=mask)
            squares += values.to(tl.float32) * values.to(tl.float32)
        factor = tl.rsqrt(tl.sum(squares, axis=1) / SIZE + eps)[:, None]
        tl.debug_barrier()  # what is read back may have been written by other threads
        for start in range(0, SIZE, BLOCK):
            columns = start + tl.arange(0, BLOCK)[None, :]
            mask = is_row & (columns < SIZE)
            values = tl.load(residual + columns, mask=mask, other=0.0).to(tl.float32)
            scales = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
            tl.store(out + columns, (values * factor * scales).to(out.dtype.element_ty), mask=mask)


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """As ``Kernels.rope``, in place where the values of a head lie side by side."""
    q, k = packed(q), packed(k)
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, half = k.shape[1], cos.shape[1]
    if num_tokens:
        num_blocks = triton.cdiv(num_heads, _ROPE_HEADS) + triton.cdiv(num_kv_heads, _ROPE_HEADS)
        _rope[(num_tokens, num_blocks)](
            q,
            k,
            positions.contiguous(),
            cos,
            sin,
            num_heads,
            num_kv_heads,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos.stride(0),
            sin.stride(0),
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            HEADS=_ROPE_HEADS,
            num_warps=2,
        )
    return q, k


@triton.jit
def _rope(
    q,
    k,
    positions,
    cos,
    sin,
    num_heads,
    num_kv_heads,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    cos_stride,
    sin_stride,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    column = tl.arange(0, BLOCK)
    cos_H = tl.load(cos + position * cos_stride + column, mask=column < HALF, other=0.0)
    sin_H = tl.load(sin + position * sin_stride + column, mask=column < HALF, other=0.0)
    num_q_blocks = tl.cdiv(num_heads, HEADS)
    if block < num_q_blocks:
        start = block * HEADS
        _turn(
            q + token * q_stride, start, num_heads, q_head_stride, cos_H, sin_H, HALF, BLOCK, HEADS
        )
    else:
        start = (block - num_q_blocks) * HEADS
        _turn(
            k + token * k_stride,
            start,
            num_kv_heads,
            k_head_stride,
            cos_H,
            sin_H,
            HALF,
            BLOCK,
            HEADS,
        )


@triton.jit
def _turn(
    heads,
    start,
    num_heads,
    head_stride,
    cos_H,
    sin_H,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    head = start + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (head < num_heads) & (column < HALF)
    at = heads + head * head_stride + column
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + HALF, mask=mask, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    cos_1H, sin_1H = cos_H[None, :], sin_H[None, :]
    tl.store(at, (x * cos_1H - y * sin_1H).to(first.dtype), mask=mask)
    tl.store(at + HALF, (y * cos_1H + x * sin_1H).to(first.dtype), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """As ``Kernels.silu_and_mul``, rounded once."""
    x = packed(x)
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(triton.next_power_of_2(size), 1024)
        _silu_and_mul[(num_rows, triton.cdiv(size, block))](
            x, out, x.stride(0), SIZE=size, BLOCK=block, num_warps=min(max(block // 256, 1), 4)
        )
    return out


@triton.jit
def _silu_and_mul(x, out, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out + row * SIZE + column,
        (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty),
        mask=mask,
    )


def packed(x: Tensor) -> Tensor:
    """``x`` itself where values of a row lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
