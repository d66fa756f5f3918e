"""Arguments of the ops in ``elementwise.cpp``."""

from __future__ import annotations

import ctypes

from hotshoe_native.ops import OpArgs


class RmsNormArgs(OpArgs):
    """Of the op ``rms_norm``."""

    row_counts = ("num_rows",)
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("x_head_stride", ctypes.c_int64),
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_int64),
        ("residual_head_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("eps", ctypes.c_double),
    )


class SiluAndMulArgs(OpArgs):
    """Of the op ``silu_and_mul``."""

    row_counts = ("num_rows",)
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class SiluArgs(OpArgs):
    """Of the op ``silu``."""

    row_counts = ("num_rows",)
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class AddArgs(OpArgs):
    """Of the op ``add``."""

    row_counts = ("num_rows",)
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class CopyRowsArgs(OpArgs):
    """Of the op ``copy_rows``; strides and sizes in bytes."""

    row_counts = ("num_rows",)
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("x_num_rows", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    )


class RopeArgs(OpArgs):
    """Of the op ``rope``."""

    row_counts = ("num_tokens",)
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("k", ctypes.c_void_p),
        ("k_token_stride", ctypes.c_int64),
        ("k_head_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("positions", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )
