"""Packing of 8-bit and 4-bit weights for ``linear``, and the room that quantized rows take."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hotshoe_native.ops import NativeLibrary

GROUP_SIZE = 32
"""Values along K that share a scale; K is a multiple of it."""

_PANEL_COLUMNS = 32
_ROW_GROUP_BYTES = 48
_CACHE_LINE = 64

# Bytes of a row's 32 values in a checkpoint, and of 32 such rows in a panel.
_ROW_BYTES = {"int8": 32, "q8_0": 34, "q4_0": 18, "q4_1": 20}
_PANEL_BYTES = {name: _PANEL_COLUMNS * size for name, size in _ROW_BYTES.items()}

FORMATS = tuple(_ROW_BYTES)
"""Weight formats that ``pack`` takes."""


def pack(library: NativeLibrary, weight_format: str, weight: Tensor) -> Tensor:
    """The panels of a weight, as ``quantized.h`` describes them.

    Args:
        library: any; all of them pack alike.
        weight_format: one of ``FORMATS``.
        weight: ``[N, K]`` int8, or ``[N, bytes per row]`` uint8 as a GGUF file holds them; not
            modified.

    Returns:
        One-dimensional uint8, padded to whole panels.
    """
    weight = weight.contiguous()
    num_rows, row_bytes = weight.shape
    num_groups = row_bytes // _ROW_BYTES[weight_format]
    num_panels = -(-num_rows // _PANEL_COLUMNS)
    size = num_panels * num_groups * _PANEL_BYTES[weight_format]
    packed = torch.empty(size, dtype=torch.uint8)
    function = library.function(f"hs_pack_{weight_format}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    function.restype = None
    function(weight.data_ptr(), num_rows, num_groups * GROUP_SIZE, packed.data_ptr())
    return packed


def pack_scales(scales: Tensor) -> Tensor:
    """Float32 column scales, padded with zeros to whole panels."""
    size = scales.numel() + -scales.numel() % _PANEL_COLUMNS
    padded = torch.zeros(size, dtype=torch.float32)
    padded[: scales.numel()] = scales
    return padded


def quantized_rows_bytes(num_rows: int, in_features: int) -> int:
    """Scratch memory that ``linear`` needs for so many input rows, aligned to 64 bytes."""
    row_bytes = in_features // GROUP_SIZE * _ROW_GROUP_BYTES
    return num_rows * (-(-row_bytes // _CACHE_LINE) * _CACHE_LINE)
