"""The tensors of a checkpoint by name, however they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hotshoe.errors import ModelLoadError


class _StoredTensor(Protocol):
    num_bytes: int

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...


Stored = TypeVar("Stored", bound=_StoredTensor)


class TensorTable(Generic[Stored]):
    """All tensors of a checkpoint, in the order of its files."""

    def __init__(self) -> None:
        self._tensors: dict[str, Stored] = {}

    @property
    def num_bytes(self) -> int:
        """Over all tensors, as stored."""
        return sum(tensor.num_bytes for tensor in self._tensors.values())

    @property
    def dtype(self) -> str:
        """The float dtype that most bytes are stored in."""
        num_bytes: dict[str, int] = {}
        for tensor in self._tensors.values():
            if "float" in tensor.format:
                num_bytes[tensor.format] = num_bytes.get(tensor.format, 0) + tensor.num_bytes
        return max(num_bytes, key=lambda name: num_bytes[name], default="float32")

    def __iter__(self) -> Iterator[Stored]:
        return iter(self._tensors.values())

    def _add(self, tensor: Stored, path: Path) -> None:
        if tensor.name in self._tensors:
            raise ModelLoadError(
                f"tensor {tensor.name!r} is in {str(path)!r} and in another file of the checkpoint"
            )
        self._tensors[tensor.name] = tensor
