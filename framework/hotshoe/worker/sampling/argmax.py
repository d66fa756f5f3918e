"""Greedy choice: an argmax in two levels, several times as fast on a CPU as ``Tensor.argmax``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 256


def most_likely(logits: Tensor) -> Tensor:
    """The most likely token of each row, of equal ones the lowest id.

    Args:
        logits: ``[R, V]`` float32; not modified.

    Returns:
        ``[R]`` int64; where a row holds NaN, the place of one.
    """
    vocab_size = logits.shape[1]
    num_blocks, num_left = divmod(vocab_size, _BLOCK)
    if num_blocks < 4:
        return logits.argmax(-1)
    # the largest of each block is a plain reduction, which vectorises; finding its place doesn't
    head = logits[:, : num_blocks * _BLOCK]
    best = head.view(-1, num_blocks, _BLOCK).amax(-1)
    if num_left:
        tail = logits[:, num_blocks * _BLOCK :].amax(-1, keepdim=True)
        best = torch.cat((best, tail), dim=1)
    starts = best.argmax(-1, keepdim=True) * _BLOCK
    places = (starts + torch.arange(_BLOCK, device=logits.device)).clamp_(max=vocab_size - 1)
    within = logits.gather(1, places).argmax(-1, keepdim=True)
    return places.gather(1, within)[:, 0]
