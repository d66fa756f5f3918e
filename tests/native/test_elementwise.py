"""The ops of ``elementwise.cpp`` write nothing but their outputs, whatever the size of a row; what
they compute is checked with the plugin that calls them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hotshoe_native.elementwise import (
    AddArgs,
    CopyRowsArgs,
    RmsNormArgs,
    RopeArgs,
    SiluAndMulArgs,
    SiluArgs,
)
from hotshoe_native.linear import DTYPES
from hotshoe_native.ops import NativeLibrary, OpArgs

SENTINEL = 7.0
SIZES = (1, 7, 15, 16, 17, 31, 32, 33, 257)


def framed(values: Tensor) -> tuple[Tensor, Tensor]:
    """A copy amid memory that is full of a value, and that memory."""
    memory = torch.full((values.numel() + 64,), SENTINEL, dtype=values.dtype)
    inside = memory[32:-32].view(values.shape)
    inside.copy_(values)
    return inside, memory


def assert_frame_holds(memory: Tensor) -> None:
    assert (memory[:32] == SENTINEL).all()
    assert (memory[-32:] == SENTINEL).all()


def run(library: NativeLibrary, name: str, args: OpArgs, num_threads: int) -> None:
    library.op(name)(args, num_threads)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(library: NativeLibrary, dtype: torch.dtype, size: int, num_threads: int) -> None:
    x, scale = torch.randn(5, size).to(dtype), torch.rand(size).to(dtype)
    before = torch.randn(5, size).to(dtype)
    residual, residual_memory = framed(before)
    out, memory = framed(torch.zeros(5, size, dtype=dtype))
    args = RmsNormArgs(
        x=x.data_ptr(),
        x_stride=size,
        residual=residual.data_ptr(),
        residual_stride=size,
        out=out.data_ptr(),
        weight=scale.data_ptr(),
        num_rows=5,
        num_heads=1,
        size=size,
        dtype=DTYPES[dtype],
        eps=1e-5,
    )
    run(library, "rms_norm", args, num_threads)
    assert torch.equal(residual, before + x)
    expected = torch.nn.functional.rms_norm(residual.double(), (size,), scale.double(), 1e-5)
    rtol = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-6)
    assert_frame_holds(memory)
    assert_frame_holds(residual_memory)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_silu_and_mul(
    library: NativeLibrary, dtype: torch.dtype, size: int, num_threads: int
) -> None:
    x = torch.randn(3, 2 * size).to(dtype)
    out, memory = framed(torch.zeros(3, size, dtype=dtype))
    args = SiluAndMulArgs(
        x=x.data_ptr(),
        x_stride=2 * size,
        out=out.data_ptr(),
        num_rows=3,
        size=size,
        dtype=DTYPES[dtype],
    )
    run(library, "silu_and_mul", args, num_threads)
    gate, up = x.double().chunk(2, -1)
    rtol = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(out.double(), gate * gate.sigmoid() * up, rtol=rtol, atol=1e-6)
    assert_frame_holds(memory)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_silu_and_add(
    library: NativeLibrary, dtype: torch.dtype, size: int, num_threads: int
) -> None:
    wide = torch.randn(3, 2 * size).to(dtype)
    x, y = wide[:, :size], wide[:, size:]
    shape = {"num_rows": 3, "size": size, "dtype": DTYPES[dtype]}
    out, memory = framed(torch.zeros(3, size, dtype=dtype))
    run(
        library,
        "silu",
        SiluArgs(x=x.data_ptr(), x_stride=2 * size, out=out.data_ptr(), **shape),
        num_threads,
    )
    rtol = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(out.double(), x.double() * x.double().sigmoid(), rtol=rtol, atol=0)
    assert_frame_holds(memory)

    added = AddArgs(
        x=x.data_ptr(),
        x_stride=2 * size,
        y=y.data_ptr(),
        y_stride=2 * size,
        out=out.data_ptr(),
        **shape,
    )
    run(library, "add", added, num_threads)
    assert torch.equal(out, x + y)
    assert_frame_holds(memory)


def test_silu_is_right_however_large_its_argument(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    ends = torch.tensor([-1e4, -200, -100, -88, 0, 88, 100, 200, 1e4, 1e30, torch.inf])
    x = torch.cat((ends, torch.linspace(-95, 95, 999))).to(dtype)
    wide = torch.cat((x, torch.ones_like(x)))
    silu, gated = torch.empty_like(x), torch.empty_like(x)
    shape = {"num_rows": 1, "size": len(x), "dtype": DTYPES[dtype]}
    args = SiluArgs(x=x.data_ptr(), x_stride=len(x), out=silu.data_ptr(), **shape)
    run(library, "silu", args, 1)
    both = SiluAndMulArgs(x=wide.data_ptr(), x_stride=len(wide), out=gated.data_ptr(), **shape)
    run(library, "silu_and_mul", both, 1)
    expected = torch.nn.functional.silu(x.double())
    rtol = max(torch.finfo(dtype).eps, 1e-5)
    # what it is below -88 isn't told from 0
    torch.testing.assert_close(silu.double(), expected, rtol=rtol, atol=1e-34)
    assert torch.equal(gated, silu)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_copy_rows_marks_rows_that_are_not_there(
    library: NativeLibrary, dtype: torch.dtype, size: int, num_threads: int
) -> None:
    x = torch.randn(4, size + 3).to(dtype)
    rows = torch.tensor([3, -1, 0, 4, 3, 1 << 40])
    out, memory = framed(torch.zeros(6, size, dtype=dtype))
    args = CopyRowsArgs(
        x=x.data_ptr(),
        x_stride=(size + 3) * dtype.itemsize,
        x_num_rows=4,
        rows=rows.data_ptr(),
        out=out.data_ptr(),
        out_stride=size * dtype.itemsize,
        num_rows=6,
        row_bytes=size * dtype.itemsize,
    )
    run(library, "copy_rows", args, num_threads)
    assert torch.equal(out[[0, 2, 4]], x[[3, 0, 3], :size])
    assert out[[1, 3, 5]].isnan().all()
    assert_frame_holds(memory)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("half", [1, 3, 16, 17, 40])
def test_rope(library: NativeLibrary, dtype: torch.dtype, half: int, num_threads: int) -> None:
    head_dim = 2 * half + 3
    q, q_memory = framed(torch.randn(4, 3, head_dim).to(dtype))
    k, k_memory = framed(torch.randn(4, 1, head_dim).to(dtype))
    before = torch.cat((q, k), 1).double()
    angles = torch.rand(10, half)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([9, 0, 3, 3])
    args = RopeArgs(
        q=q.data_ptr(),
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        k=k.data_ptr(),
        k_token_stride=k.stride(0),
        k_head_stride=k.stride(1),
        num_tokens=4,
        num_heads=3,
        num_kv_heads=1,
        half=half,
        positions=positions.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        table_stride=half,
        dtype=DTYPES[dtype],
    )
    run(library, "rope", args, num_threads)
    first, second = before[..., :half], before[..., half : 2 * half]
    c, s = cos.double()[positions][:, None], sin.double()[positions][:, None]
    expected = torch.cat((first * c - second * s, second * c + first * s), -1)
    after = torch.cat((q, k), 1).double()
    rtol = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(after[..., : 2 * half], expected, rtol=rtol, atol=1e-6)
    assert torch.equal(after[..., 2 * half :], before[..., 2 * half :])
    assert_frame_holds(q_memory)
    assert_frame_holds(k_memory)
