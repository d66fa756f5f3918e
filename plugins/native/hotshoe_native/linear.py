"""Arguments of ``linear`` and ``embedding``, and packed weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotshoe_native.ops import NativeLibrary, OpArgs
from hotshoe_native.quantized import pack, pack_scales
from hotshoe_native.weight_arena import WeightArena

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes of activations, as the ops number them."""

_PANEL_COLUMNS = 32
_DENSE_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
_QUANTIZED_FORMATS = {"int8": 2, "q8_0": 3, "q4_0": 4, "q4_1": 5}


class HsWeight(ctypes.Structure):
    """A part of a weight, see ``weight.h``."""

    _fields_ = (
        ("format", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("panel_bytes", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
    )


class LinearArgs(OpArgs):
    """Of the ops ``linear`` and ``linear_silu_and_mul``, see ``linear.cpp``."""

    row_counts = ("m",)
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("y_dtype", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


class EmbeddingArgs(OpArgs):
    """Of the op ``embedding``, see ``linear.cpp``."""

    row_counts = ("num_tokens",)
    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedPart:
    """Some rows of a weight, packed.

    Attributes:
        format: number of the format in ``weight.h``.
        out_features: N.
        in_features: K.
        panels: uint8, padded to whole panels.
        scales: per row, padded likewise, for the formats that have them.
        bias: ``[N]`` float32.
    """

    format: int
    out_features: int
    in_features: int
    panels: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None

    @property
    def num_panels(self) -> int:
        """How many panels its rows are packed in."""
        return -(-self.out_features // _PANEL_COLUMNS)

    @property
    def panel_bytes(self) -> int:
        """Of one panel."""
        return self.panels.numel() // self.num_panels

    def rows(self, begin: int, end: int) -> PackedPart:
        """Some of the rows, in the same memory; ``begin`` is the first row of a panel."""
        start = begin // _PANEL_COLUMNS * self.panel_bytes
        return replace(
            self,
            out_features=end - begin,
            panels=self.panels[
                start : start + -(-(end - begin) // _PANEL_COLUMNS) * self.panel_bytes
            ],
            scales=None if self.scales is None else self.scales[begin:],
            bias=None if self.bias is None else self.bias[begin:end],
        )


class PackedWeight:
    """A chain of parts in native memory, which lives as long as this object.

    Attributes:
        address: of the first part, for the argument structs.
        halves_address: of the same rows as two parts of one size, which
            ``linear_silu_and_mul`` takes; None if the second half doesn't begin with a panel, or a
            half is itself of several parts.
        out_features: rows of all parts.
        in_features: K.
        is_quantized: whether ``linear`` needs scratch memory of ``quantized_rows_bytes``.
    """

    __slots__ = (
        "_keep",
        "address",
        "halves_address",
        "in_features",
        "is_quantized",
        "out_features",
    )

    def __init__(self, parts: Sequence[PackedPart]) -> None:
        chain, halves = _chain(parts), _halves(parts)
        chain_of_halves = _chain(halves) if halves else None
        self._keep = (chain, chain_of_halves, tuple(parts))
        self.address = ctypes.addressof(chain)
        self.halves_address = None if chain_of_halves is None else ctypes.addressof(chain_of_halves)
        self.out_features = sum(part.out_features for part in parts)
        self.in_features = parts[0].in_features
        self.is_quantized = any(part.format in _QUANTIZED_FORMATS.values() for part in parts)


def pack_dense(weight: Tensor, bias: Tensor | None, arena: WeightArena) -> PackedPart:
    """Pack ``[N, K]`` float32 or bfloat16, see ``dense.h``."""
    n, k = weight.shape
    per_step = 4 // weight.element_size()
    num_panels, num_steps = -(-n // _PANEL_COLUMNS), -(-k // per_step)
    panels = arena.empty(num_panels * num_steps * _PANEL_COLUMNS * 4)
    if (num_panels * _PANEL_COLUMNS, num_steps * per_step) != (n, k):
        padded = weight.new_zeros(num_panels * _PANEL_COLUMNS, num_steps * per_step)
        padded[:n, :k] = weight
        weight = padded
    steps = weight.contiguous().view(torch.int32).view(num_panels, _PANEL_COLUMNS, num_steps)
    panels.view(torch.int32).view(num_panels, num_steps, _PANEL_COLUMNS).copy_(steps.mT)
    return PackedPart(_DENSE_FORMATS[weight.dtype], n, k, panels, bias=_float_bias(bias))


def pack_quantized(
    library: NativeLibrary,
    weight_format: str,
    weight: Tensor,
    in_features: int,
    arena: WeightArena,
    *,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
) -> PackedPart:
    """Pack a weight in one of ``quantized.FORMATS``, as ``quantized.pack`` takes it."""
    packed = pack(library, weight_format, weight)
    return PackedPart(
        _QUANTIZED_FORMATS[weight_format],
        weight.shape[0],
        in_features,
        arena.empty(packed.numel()).copy_(packed),
        scales=None if scales is None else pack_scales(scales),
        bias=_float_bias(bias),
    )


def _chain(parts: Sequence[PackedPart]) -> ctypes.Array[HsWeight]:
    chain = (HsWeight * len(parts))()
    for link, part in zip(chain, parts, strict=True):
        link.format, link.n, link.k = part.format, part.out_features, part.in_features
        link.data, link.panel_bytes = part.panels.data_ptr(), part.panel_bytes
        link.scales = _pointer(part.scales)
        link.bias = _pointer(part.bias)
    for i in range(len(parts) - 1):
        chain[i].next = ctypes.addressof(chain[i + 1])
    return chain


def _halves(parts: Sequence[PackedPart]) -> tuple[PackedPart, PackedPart] | None:
    if len(parts) == 1:
        (whole,) = parts
        middle, rest = divmod(whole.out_features, 2)
        if rest or middle % _PANEL_COLUMNS:
            return None
        return whole.rows(0, middle), whole.rows(middle, whole.out_features)
    if len(parts) == 2 and parts[0].out_features == parts[1].out_features:
        return parts[0], parts[1]
    return None


def _float_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32).contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
