"""Random weights of every format, as a checkpoint would hold them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hotshoe.weights.gguf import BLOCK_SIZES
from hotshoe.weights.gguf_blocks import dequantize


def random_weight(
    weight_format: str, n: int, k: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a weight, and the values that they stand for, ``[n, k]``.

    Args:
        weight_format: ``dense``, ``int8``, ``q8_0``, ``q4_0`` or ``q4_1``.
        n: out_features.
        k: in_features.
        dtype: of dense values.
    """
    return _TENSORS[weight_format](n, k, dtype)


def _dense(n: int, k: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    values = torch.randn(n, k).to(dtype)
    return {"weight": values}, values


def _int8(n: int, k: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    scales = torch.rand(n) * 0.01 + 0.001
    return {"weight": codes, "scales": scales}, codes.float() * scales[:, None]


def _blocks(
    block_format: str, num_scales: int
) -> Callable[[int, int, torch.dtype], tuple[dict[str, Tensor], Tensor]]:
    def make(n: int, k: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
        block_size, num_bytes = BLOCK_SIZES[block_format]
        blocks = torch.randint(0, 256, (n, k // block_size, num_bytes), dtype=torch.uint8)
        scales = (torch.rand(n, k // block_size, num_scales) * 0.01 + 0.001).half()
        blocks[..., : 2 * num_scales] = scales.view(torch.uint8)
        raw = blocks.view(n, -1)
        return {"blocks": raw}, dequantize(raw, block_format, torch.float32)

    return make


_TENSORS = {
    "dense": _dense,
    "int8": _int8,
    "q8_0": _blocks("q8_0", 1),
    "q4_0": _blocks("q4_0", 1),
    "q4_1": _blocks("q4_1", 2),
}
