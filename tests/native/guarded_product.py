"""Products that are watched for what they write."""

# M=rows of x N=columns of the result K=in_features

from __future__ import annotations

import torch
from torch import Tensor

from hotshoe_native.linear import DTYPES, LinearArgs
from hotshoe_native.ops import NativeLibrary
from hotshoe_native.quantized import quantized_rows_bytes

SENTINEL = 7.0


def guarded_product(
    library: NativeLibrary,
    op: str,
    weight_address: int,
    x_MK: Tensor,
    n: int,
    *,
    num_threads: int,
    y_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run an op that takes ``LinearArgs``; it writes to y and its scratch memory alone.

    Returns:
        ``[M, N]`` in the dtype of y, by default that of x.
    """
    m, k = x_MK.shape
    guard = torch.full((m + 2, n + 5), SENTINEL, dtype=y_dtype or x_MK.dtype)
    scratch_bytes = quantized_rows_bytes(m, k)
    scratch = torch.full((scratch_bytes + 64,), 0xA5, dtype=torch.uint8)
    y = guard[1:-1, :n]
    args = LinearArgs(
        x=x_MK.data_ptr(),
        x_stride=x_MK.stride(0),
        y=y.data_ptr(),
        y_stride=y.stride(0),
        m=m,
        dtype=DTYPES[x_MK.dtype],
        y_dtype=DTYPES[y.dtype],
        weight=weight_address,
        scratch=scratch.data_ptr(),
    )
    library.op(op)(args, num_threads)
    result = y.clone()
    y.fill_(SENTINEL)
    assert (guard == SENTINEL).all(), "written outside of y"
    assert (scratch[scratch_bytes:] == 0xA5).all(), "written past the scratch memory"
    return result
