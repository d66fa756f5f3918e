"""Arguments of the ops in ``sampling.cpp``."""

from __future__ import annotations

import ctypes

from torch import Tensor

from hotshoe_native.linear import DTYPES
from hotshoe_native.ops import NativeLibrary, OpArgs

# R=num_rows, V=vocab_size


class MaskArgs(OpArgs):
    """Of ``mask``: forbids tokens."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("words", ctypes.c_int64),
    )


class MostLikelyArgs(OpArgs):
    """Of ``most_likely``: the token with the largest logit of each row, and that logit."""

    row_counts = ("num_rows",)
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class SampleArgs(OpArgs):
    """Of ``sample``: one token per row, after temperature, top_k, top_p and min_p."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("uniforms", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


def mask_args(logits: Tensor, bitmask: Tensor) -> MaskArgs:
    """Arguments of ``mask``; the tensors must outlive them.

    Args:
        logits: ``[R, V]`` float32 or bfloat16, rows contiguous; written: -inf where a bit is 0.
        bitmask: ``[R, words]`` int32, contiguous, at least V bits a row.
    """
    return MaskArgs(
        logits=logits.data_ptr(),
        masks=bitmask.data_ptr(),
        **_shape(logits),
        words=bitmask.shape[1],
    )


def most_likely_args(logits: Tensor, token_ids: Tensor, values: Tensor) -> MostLikelyArgs:
    """Arguments of ``most_likely``; the tensors must outlive them.

    Args:
        logits: ``[R, V]`` float32 or bfloat16, rows contiguous; not modified.
        token_ids: ``[R]`` int64, written: the lowest id of the largest logits, or a NaN's.
        values: ``[R]`` float32, written: NaN if there is one.
    """
    return MostLikelyArgs(
        logits=logits.data_ptr(),
        token_ids=token_ids.data_ptr(),
        values=values.data_ptr(),
        **_shape(logits),
    )


def sample_args(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    token_ids: Tensor,
    scratch: Tensor,
) -> SampleArgs:
    """Arguments of ``sample``; the tensors must outlive them, and all but logits be contiguous.

    Args:
        logits: ``[R, V]`` float32 or bfloat16, rows contiguous; not modified. Each row has a finite
            one, and neither NaN nor inf.
        temperature: ``[R]`` float32; 0 = greedy.
        top_k: ``[R]`` int64; 0 = all.
        top_p: ``[R]`` float32 in ``(0, 1]``.
        min_p: ``[R]`` float32 in ``[0, 1]``.
        uniforms: ``[R]`` float64 in ``[0, 1)``.
        token_ids: ``[R]`` int64, written.
        scratch: ``sample_scratch_bytes`` for each thread.
    """
    return SampleArgs(
        logits=logits.data_ptr(),
        temperature=temperature.data_ptr(),
        top_k=top_k.data_ptr(),
        top_p=top_p.data_ptr(),
        min_p=min_p.data_ptr(),
        uniforms=uniforms.data_ptr(),
        token_ids=token_ids.data_ptr(),
        scratch=scratch.data_ptr(),
        **_shape(logits),
    )


def sample_scratch_bytes(library: NativeLibrary, vocab_size: int) -> int:
    """Scratch memory that one thread of ``sample`` needs."""
    function = library.function("hs_sample_scratch_bytes")
    function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
    return int(function(vocab_size))


def _shape(logits: Tensor) -> dict[str, int]:
    num_rows, vocab_size = logits.shape
    return {
        "num_rows": num_rows,
        "vocab_size": vocab_size,
        "stride": logits.stride(0),
        "dtype": DTYPES[logits.dtype],
    }
