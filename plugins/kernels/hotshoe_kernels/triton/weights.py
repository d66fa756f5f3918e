"""Weights as the kernels read them: codes and scales in planes of their own.

Blocks of a GGUF file have 18, 20 or 34 bytes, so that no load of 16 bytes is aligned. As planes
the same bytes are read in whole words.
"""

# N=out_features K=in_features G=groups per row

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotshoe.api import ModelLoadError, Weight

GROUP_SIZE = 32
"""Values along K that share a scale; K is a multiple of it."""

# Bytes of a block before its codes: the scale, and the minimum of q4_1, float16 each.
_HEADER_BYTES = {"q8_0": 2, "q4_0": 2, "q4_1": 4}
_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneWeight(Weight):
    """A weight that ``prepare_weight`` has repacked.

    Attributes:
        tensors: ``dense`` has ``weight`` ``[N, K]``. The others have ``codes``, ``[N, K]`` int8 or
            ``[N, K / 2]`` uint8 with the first 16 values of a group in the low nibbles of its 16
            bytes, and ``scales``: ``[N, G]`` float16, of ``int8`` ``[N]`` float32. ``q4_1`` has
            ``minima`` ``[N, G]`` float16. Each may have ``bias`` ``[N]``.
    """


def prepare(weight: Weight, dtype: torch.dtype) -> PlaneWeight:
    """Repack a weight, or its parts.

    Args:
        weight: as it was loaded.
        dtype: of activations.

    Raises:
        ModelLoadError: if dense values are not in the dtype of activations, or the width of a
            quantized weight is no multiple of a group.
    """
    return PlaneWeight(
        format=weight.format,
        out_features=weight.out_features,
        in_features=weight.in_features,
        tensors={} if weight.parts else _planes(weight, dtype),
        parts=tuple(prepare(part, dtype) for part in weight.parts),
    )


def _planes(weight: Weight, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = weight.tensors
    bias = {"bias": tensors["bias"]} if "bias" in tensors else {}
    if weight.format == "dense":
        values = tensors["weight"]
        if values.dtype != dtype:
            raise ModelLoadError(
                f"a dense weight has dtype {str(values.dtype)!r}, but activations have "
                f"{str(dtype)!r}; the quantization plugin has to convert it"
            )
        return {"weight": values.contiguous()} | bias
    if weight.in_features % GROUP_SIZE:
        raise ModelLoadError(
            f"a weight of format {weight.format!r} has {weight.in_features} inputs, which is no "
            f"multiple of {GROUP_SIZE}; keep it dense"
        )
    if weight.format == "int8":
        return {"codes": tensors["weight"].contiguous(), "scales": tensors["scales"]} | bias
    return _block_planes(weight.format, tensors["blocks"]) | bias


def _block_planes(block_format: str, blocks: Tensor) -> dict[str, Tensor]:
    num_rows = blocks.shape[0]
    blocks_NG = blocks.view(num_rows, -1, _BLOCK_BYTES[block_format])
    header = _HEADER_BYTES[block_format]
    codes = blocks_NG[..., header:].reshape(num_rows, -1).contiguous()
    planes = {
        "codes": codes.view(torch.int8) if block_format == "q8_0" else codes,
        "scales": _float16(blocks_NG[..., :2]),
    }
    if block_format == "q4_1":
        planes["minima"] = _float16(blocks_NG[..., 2:4])
    return planes


def _float16(raw: Tensor) -> Tensor:
    """``[N, G]`` from ``[N, G, 2]`` bytes."""
    return raw.contiguous().view(torch.float16).squeeze(-1)
