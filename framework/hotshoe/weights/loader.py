"""Weights, tensor by tensor, from a checkpoint into a model's layers."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import TYPE_CHECKING

from hotshoe.errors import ModelLoadError
from hotshoe.weights.random_weights import load_random_weights, num_random_bytes

if TYPE_CHECKING:
    from hotshoe.api.layers import LayerFactory
    from hotshoe.api.model import Model
    from hotshoe.weights.checkpoint import Checkpoint

_HARMLESS = ("rotary_emb.inv_freq", "rope_freqs.weight", ".attn.bias", ".attn.masked_bias")


def load_weights(model: Model, layers: LayerFactory, checkpoint: Checkpoint) -> None:
    """Feed every tensor to the model, holding one at a time, then finish its layers; of a
    checkpoint without weights these are drawn.

    Raises:
        ModelLoadError: if a tensor is unknown to the model, has the wrong shape, or is missing.
    """
    if checkpoint.format == "random":
        load_random_weights(layers, checkpoint.dtype)
    unknown = [
        tensor.name
        for tensor in checkpoint.tensors()
        if not model.load_tensor(tensor) and not tensor.name.endswith(_HARMLESS)
    ]
    if unknown:
        shown = ", ".join(repr(name) for name in unknown[:5])
        raise ModelLoadError(
            f"model {checkpoint.name!r} has {len(unknown)} tensors that its architecture doesn't "
            f"know: {shown}{', ...' if len(unknown) > 5 else ''}; {_remedy(checkpoint)}"
        )
    layers.finalize()


def stored_bytes(layers: LayerFactory, checkpoint: Checkpoint) -> int:
    """Size of the weights as they are stored, or as they would be if they weren't drawn.

    Args:
        layers: not loaded yet.
        checkpoint: that they are to be loaded from.
    """
    if checkpoint.format != "random":
        return checkpoint.num_bytes
    return num_random_bytes(layers, checkpoint.dtype)


def release_freed_memory() -> None:
    """Give back to the system what loading has freed.

    The C library keeps it for allocations to come: a few hundred megabytes, as the tensors of a
    checkpoint come and go between objects that stay. Does nothing where it isn't glibc.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _remedy(checkpoint: Checkpoint) -> str:
    quantized = checkpoint.config.get("quantization_config")
    if not isinstance(quantized, dict):
        return "is config.json the right one?"
    method = quantized.get("quant_method", "a method that it doesn't name")
    return (
        f"it is quantized by {method}: use the model it was made from, or a quantization plugin "
        "that reads it"
    )
