"""``q8_0``, GGUF's 8-bit blocks: 32 signed bytes after their float16 scale."""

# N=num_rows B=blocks per row

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 32
_BLOCK_BYTES = 2 + BLOCK_SIZE
_Q5_0_BYTES = 2 + 4 + BLOCK_SIZE // 2
_CHUNK_SIZE = 1 << 20


def quantize_q8_0(values: Tensor) -> Tensor:
    """Blocks that approximate values with ``scale = max|value| / 127``.

    Args:
        values: ``[N, K]`` float32, K a multiple of 32; not modified.

    Returns:
        ``[N, K / 32 * 34]`` uint8.
    """
    num_rows, width = values.shape
    shape = (num_rows, width // BLOCK_SIZE, _BLOCK_BYTES)
    blocks = torch.empty(shape, dtype=torch.uint8, device=values.device)
    step = max(_CHUNK_SIZE // width, 1)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        values_NB = values[rows].view(-1, width // BLOCK_SIZE, BLOCK_SIZE)
        scale = (values_NB.abs().amax(-1, keepdim=True) / 127).half()
        # the scale as stored decides, so that its rounding isn't an error of the values as well
        divisor = torch.where(scale > 0, scale, 1.0).float()
        rounded = (values_NB / divisor).round_().clamp_(-127, 127).to(torch.int8)
        blocks[rows] = torch.cat((scale.view(torch.uint8), rounded.view(torch.uint8)), -1)
    return blocks.view(num_rows, -1)


def q8_0_from_q5_0(blocks: Tensor) -> Tensor:
    """The same values in 8-bit blocks: scales are taken over, so nothing is rounded.

    Args:
        blocks: ``[N, B * 22]`` uint8 in the format ``q5_0``: a float16 scale, 32 fifth bits, then
            the 16 low and the 16 high nibbles of values that are 16 too large.

    Returns:
        ``[N, B * 34]`` uint8.
    """
    blocks_NB = blocks.view(blocks.shape[0], -1, _Q5_0_BYTES)
    nibbles = blocks_NB[..., 6:]
    low_bits = torch.cat((nibbles & 15, nibbles >> 4), -1)
    shifts = torch.arange(8, dtype=torch.uint8)
    fifth_bits = (blocks_NB[..., 2:6, None] >> shifts & 1).flatten(-2) << 4
    values = (low_bits | fifth_bits).to(torch.int8) - 16
    return torch.cat((blocks_NB[..., :2], values.view(torch.uint8)), -1).flatten(1)
