"""Arguments of the ops in ``attention.cpp``, and the memory that they need."""

from __future__ import annotations

import ctypes

import numpy as np

from hotshoe_native.ops import NativeLibrary, OpArgs

DTYPES = {"float32": 0, "bfloat16": 1}
"""Dtypes of activations, as the ops number them."""

PAGE_DTYPES = {**DTYPES, "int8": 2}
"""Dtypes of pages."""

LANES = 16
"""Value dimensions in a page are a multiple of it."""

MAX_HEAD_DIM = 1024
"""Of keys; values may have any number of dimensions."""

_HEADER_BYTES = 32
_ITEM_BYTES = 48
_ALIGNMENT = 64


class AttentionBatchArgs(ctypes.Structure):
    """What the layers of a step have in common; the arguments of both ops point to it."""

    _fields_ = (
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("plan", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("num_reqs", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
    )


class AttentionPlanArgs(OpArgs):
    """Of the op ``attention_plan``, which divides a step's work into items."""

    row_counts = ()  # it reads them from the batch
    _fields_ = (
        ("batch", ctypes.c_void_p),
        ("group_size", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("max_items", ctypes.c_int64),
        ("max_partials", ctypes.c_int64),
        ("items_per_thread", ctypes.c_int64),
    )


class AttentionArgs(OpArgs):
    """Of the op ``attention``."""

    row_counts = ()
    _fields_ = (
        ("batch", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("k_token_stride", ctypes.c_int64),
        ("k_head_stride", ctypes.c_int64),
        ("v_token_stride", ctypes.c_int64),
        ("v_head_stride", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("head_dim_v", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("rotary_half", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("kv_dtype", ctypes.c_int64),
        ("max_partials", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    )


def scratch_bytes(
    library: NativeLibrary,
    *,
    group_size: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    kv_dtype: str,
    max_partials: int,
    num_threads: int,
) -> int:
    """Size of ``AttentionBatchArgs.scratch``, which must be aligned as ``Memory`` is."""
    function = library.function("hs_attention_scratch_bytes")
    function.argtypes = [ctypes.c_int64] * 7
    function.restype = ctypes.c_int64
    return int(
        function(
            group_size,
            num_kv_heads,
            head_dim,
            head_dim_v,
            PAGE_DTYPES[kv_dtype],
            max_partials,
            num_threads,
        )
    )


def plan_bytes(max_items: int) -> int:
    """Size of ``AttentionBatchArgs.plan``."""
    return _HEADER_BYTES + max_items * _ITEM_BYTES


class Memory:
    """Uninitialised bytes, aligned for whole vectors. No tensor, which a recording would take for
    one of its own.

    Attributes:
        address: of the first byte.
    """

    __slots__ = ("_bytes", "address", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._bytes = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        start: int = self._bytes.__array_interface__["data"][0]
        self.address = start + -start % _ALIGNMENT
