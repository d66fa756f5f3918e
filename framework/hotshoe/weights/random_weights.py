"""Random weights, for a model that is run for its size and not for its words.

They are drawn layer by layer where the layer lives, and come in as tensors of a checkpoint do: the
quantization and the kernels see no difference.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hotshoe.api.layers import AwaitedTensor, LayerFactory
from hotshoe.errors import ModelLoadError

_DTYPES = ("float32", "bfloat16", "float16")
# a prime: no two rows of a matrix begin at the same place of the pool
_POOL_SIZE = 4_194_301


class NoTensors:
    """What a checkpoint has instead of tensors when its weights are to be drawn.

    Args:
        dtype: in which they would have been stored, if that is known.
    """

    num_bytes = 0

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype

    def read_dtype(self, name: str, config: Mapping[str, Any]) -> None:
        """Take the dtype that a ``config.json`` names, float32 if it names none.

        Raises:
            ModelLoadError: if it names another than weights are kept in.
        """
        field = "dtype" if config.get("dtype") is not None else "torch_dtype"
        dtype = config.get(field)
        if dtype is None:
            return
        if dtype not in _DTYPES:
            raise ModelLoadError(
                f"model {name!r}: {field} in config.json is {dtype!r}; allowed: "
                f"{', '.join(map(repr, _DTYPES))}, or null"
            )
        self.dtype = dtype

    def __iter__(self) -> Iterator[RandomTensor]:
        return iter(())

    def close(self) -> None:
        """Nothing is open."""


class RandomPool:
    """Random numbers that all tensors are cut from: drawing billions anew would take minutes.

    They are drawn on the CPU, so that they are the same on every device.

    Args:
        device: where tensors are made.
        dtype: name of the dtype that they seem to be stored in.
    """

    def __init__(self, device: torch.device, dtype: str) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(0)
        self._values = torch.randn(_POOL_SIZE, generator=generator).to(device)

    def fill(self, target: Tensor, name: str, *, mean: float, scale: float) -> None:
        """Write ``mean + scale * N(0, 1)`` into a contiguous tensor, by its name the same ones."""
        flat = target.view(-1)
        if scale == 0:
            flat.fill_(mean)
            return
        values = self._values * scale + mean
        start = zlib.crc32(name.encode()) % _POOL_SIZE
        position = 0
        while position < len(flat):
            piece = values[start : start + len(flat) - position]
            flat[position : position + len(piece)].copy_(piece)
            position, start = position + len(piece), 0


class RandomTensor:
    """A tensor that is drawn when it is read.

    Args:
        awaited: by the layer that it is for.
        pool: where its values come from.
    """

    def __init__(self, awaited: AwaitedTensor, pool: RandomPool) -> None:
        self._awaited = awaited
        self._pool = pool

    @property
    def name(self) -> str:
        """That of the layer, and of its part."""
        return self._awaited.name

    @property
    def shape(self) -> tuple[int, ...]:
        """As the layer awaits it."""
        return self._awaited.shape

    @property
    def format(self) -> str:
        """A torch dtype name."""
        return str(self._pool.dtype).removeprefix("torch.")

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """The values in a dtype, on the layer's device."""
        tensor = self.raw()
        return tensor if dtype == tensor.dtype else tensor.to(dtype)

    def raw(self) -> Tensor:
        """The values as they would have been stored."""
        awaited = self._awaited
        tensor = torch.empty(awaited.shape, dtype=self._pool.dtype, device=awaited.device)
        mean, scale = _distribution(awaited)
        self._pool.fill(tensor, awaited.name, mean=mean, scale=scale)
        return tensor


def _distribution(awaited: AwaitedTensor) -> tuple[float, float]:
    """Mean and scale. Matrices keep the size of what they multiply, so that neither hidden states
    nor logits grow or vanish with the width of the model.
    """
    if awaited.role == "norm":
        return 1.0, 0.0
    if awaited.role == "weight":
        return 0.0, awaited.shape[-1] ** -0.5
    return 0.0, 0.02


def num_random_bytes(layers: LayerFactory, dtype: str) -> int:
    """Size of whatever the layers still wait for.

    Args:
        layers: not loaded yet.
        dtype: name of the dtype that the tensors seem to be stored in.
    """
    itemsize: int = getattr(torch, dtype).itemsize
    return itemsize * sum(math.prod(awaited.shape) for awaited in layers.awaited())


def load_random_weights(layers: LayerFactory, dtype: str) -> None:
    """Draw whatever the layers still wait for, one tensor at a time.

    Args:
        layers: of one device.
        dtype: name of the dtype that the tensors seem to be stored in.
    """
    pool: RandomPool | None = None
    for awaited in layers.awaited():
        pool = pool or RandomPool(awaited.device, dtype)
        awaited.load(RandomTensor(awaited, pool))
