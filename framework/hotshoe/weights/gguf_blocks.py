"""Dequantization of GGUF's block formats, chunk by chunk, so that no float32 copy of a whole tensor
exists.

A format's ``unpack`` function turns ``[num_blocks, bytes per block]`` uint8 into
``[num_blocks, values per block]`` float32, with the arithmetic of the format's definition in ggml.
"""

# N=num_blocks

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hotshoe.weights.gguf import BLOCK_SIZES

# Values per chunk: its float32 intermediates stay within a core's second-level cache.
CHUNK_SIZE = 1 << 17

DENSE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def dequantize(raw: Tensor, block_format: str, dtype: torch.dtype) -> Tensor:
    """The values that blocks stand for.

    Args:
        raw: ``[rows, bytes per row]`` uint8, contiguous; not modified.
        block_format: a block format of ``BLOCK_SIZES``.
        dtype: of the result; values are computed in float32 and rounded once.

    Returns:
        ``[rows, values per row]``.
    """
    block_size, block_bytes = BLOCK_SIZES[block_format]
    unpack = _UNPACK[block_format]
    blocks = raw.reshape(-1, block_bytes)
    values = torch.empty(blocks.shape[0], block_size, dtype=dtype)
    step = CHUNK_SIZE // block_size
    for start in range(0, blocks.shape[0], step):
        values[start : start + step] = unpack(blocks[start : start + step])
    return values.view(raw.shape[0], -1)


def _float16(blocks_N: Tensor, start: int) -> Tensor:
    """``[N, 1]`` float32 from the two bytes at ``start`` of every block."""
    return blocks_N[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed_N: Tensor) -> Tensor:
    """Low nibbles, then high nibbles: ``[..., n]`` to ``[..., 2n]``."""
    return torch.cat((packed_N & 15, packed_N >> 4), dim=-1)


def _fifth_bits(blocks_N: Tensor, start: int) -> Tensor:
    """``[N, 32]`` uint8, 16 where the bit of a 32-bit mask at ``start`` is set."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks_N[:, start : start + 4, None] >> shifts) & 1
    return bits.view(-1, 32) << 4


def _unpack_q4_0(blocks_N: Tensor) -> Tensor:
    return _nibbles(blocks_N[:, 2:]).float().sub_(8).mul_(_float16(blocks_N, 0))


def _unpack_q4_1(blocks_N: Tensor) -> Tensor:
    values = _nibbles(blocks_N[:, 4:]).float()
    return values.mul_(_float16(blocks_N, 0)).add_(_float16(blocks_N, 2))


def _unpack_q5_0(blocks_N: Tensor) -> Tensor:
    values = _nibbles(blocks_N[:, 6:]) | _fifth_bits(blocks_N, 2)
    return values.float().sub_(16).mul_(_float16(blocks_N, 0))


def _unpack_q5_1(blocks_N: Tensor) -> Tensor:
    values = _nibbles(blocks_N[:, 8:]) | _fifth_bits(blocks_N, 4)
    return values.float().mul_(_float16(blocks_N, 0)).add_(_float16(blocks_N, 2))


def _unpack_q8_0(blocks_N: Tensor) -> Tensor:
    return blocks_N[:, 2:].view(torch.int8).float().mul_(_float16(blocks_N, 0))


def _crumbs(packed_N: Tensor) -> Tensor:
    """2-bit values of ``[N, 64]`` bytes: ``[N, 2, 4, 32]``, half, bit pair, byte within half."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return (packed_N.reshape(-1, 2, 1, 32) >> shifts[:, None]) & 3


def _unpack_q2_k(blocks_N: Tensor) -> Tensor:
    scales = blocks_N[:, :16]
    scale = (scales & 15).float().mul_(_float16(blocks_N, 80))
    minimum = (scales >> 4).float().mul_(_float16(blocks_N, 82))
    values = _crumbs(blocks_N[:, 16:80]).reshape(-1, 16, 16).float()
    return values.mul_(scale[..., None]).sub_(minimum[..., None]).view(-1, 256)


def _unpack_q3_k(blocks_N: Tensor) -> Tensor:
    packed = blocks_N[:, 96:108]
    low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), dim=-1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = ((packed[:, None, 8:] >> shifts[:, None]) & 3).view(-1, 16)
    scale = (low | high << 4).float().sub_(32).mul_(_float16(blocks_N, 108))
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    has_high_bit = ((blocks_N[:, None, :32] >> bits) & 1).view(-1, 16, 16)
    values = _crumbs(blocks_N[:, 32:96]).reshape(-1, 16, 16) | has_high_bit << 2
    return values.float().sub_(4).mul_(scale[..., None]).view(-1, 256)


def _six_bit_scales(packed_N: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minima of 6 bits each, from 12 bytes: two ``[N, 8]`` float32."""
    first, second, third = packed_N[:, 0:4], packed_N[:, 4:8], packed_N[:, 8:12]
    scale = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), dim=-1)
    minimum = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), dim=-1)
    return scale.float(), minimum.float()


def _scale_eighths(values: Tensor, blocks_N: Tensor) -> Tensor:
    """Apply the scales and minima that q4_k and q5_k keep in their first 16 bytes."""
    scale, minimum = _six_bit_scales(blocks_N[:, 4:16])
    scale.mul_(_float16(blocks_N, 0))
    minimum.mul_(_float16(blocks_N, 2))
    scaled = values.view(-1, 8, 32).float().mul_(scale[..., None]).sub_(minimum[..., None])
    return scaled.view(-1, 256)


def _unpack_q4_k(blocks_N: Tensor) -> Tensor:
    return _scale_eighths(_nibbles(blocks_N[:, 16:].reshape(-1, 4, 32)), blocks_N)


def _unpack_q5_k(blocks_N: Tensor) -> Tensor:
    low = _nibbles(blocks_N[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (blocks_N[:, None, 16:48] >> bits) & 1
    return _scale_eighths(low | high << 4, blocks_N)


def _unpack_q6_k(blocks_N: Tensor) -> Tensor:
    low = blocks_N[:, :128].reshape(-1, 2, 1, 64) >> torch.tensor([[0], [4]], dtype=torch.uint8)
    high = _crumbs(blocks_N[:, 128:192]).reshape(-1, 2, 2, 64)
    values = ((low & 15) | high << 4).view(-1, 16, 16).float().sub_(32)
    scale = blocks_N[:, 192:208].contiguous().view(torch.int8).float()
    return values.mul_(scale.mul_(_float16(blocks_N, 208))[..., None]).view(-1, 256)


_UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "q4_0": _unpack_q4_0,
    "q4_1": _unpack_q4_1,
    "q5_0": _unpack_q5_0,
    "q5_1": _unpack_q5_1,
    "q8_0": _unpack_q8_0,
    "q2_k": _unpack_q2_k,
    "q3_k": _unpack_q3_k,
    "q4_k": _unpack_q4_k,
    "q5_k": _unpack_q5_k,
    "q6_k": _unpack_q6_k,
}
