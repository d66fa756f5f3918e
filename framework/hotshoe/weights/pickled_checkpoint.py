"""Tensors of PyTorch's own files, in which most drafters are published: ``pytorch_model.bin`` and
the like.

They are pickles, which can run code when they are loaded. Torch's restricted unpickler is the only
one that reads them here; it builds nothing but tensors and plain containers.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from hotshoe.errors import ModelLoadError
from hotshoe.weights.safetensors_checkpoint import DTYPES, read_index
from hotshoe.weights.tensor_table import TensorTable

INDEX_FILE = "pytorch_model.bin.index.json"
HUB_PATTERNS = ("*.json", "pytorch_model*.bin", "medusa_lm_head.pt")
SUFFIXES = (".bin", ".pt", ".pth")
_SINGLE_FILES = ("pytorch_model.bin", "medusa_lm_head.pt")
_DTYPES = frozenset(DTYPES.values())


class PickledTensor:
    """One tensor of such a file, mapped into memory."""

    def __init__(self, name: str, values: Tensor, path: Path) -> None:
        self._name = name
        self._values: Tensor | None = values
        self._path = path
        self._shape = tuple(values.shape)
        self._dtype = values.dtype
        self.num_bytes: int = values.numel() * values.element_size()

    @property
    def name(self) -> str:
        """As in the file."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """As in the file."""
        return self._shape

    @property
    def format(self) -> str:
        """A torch dtype name."""
        return str(self._dtype).removeprefix("torch.")

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """The values in a dtype.

        Raises:
            ModelLoadError: if they are whole numbers.
        """
        if not self._dtype.is_floating_point:
            raise ModelLoadError(
                f"tensor {self._name!r} holds {self.format}, which are no weights as they stand; "
                "use a checkpoint that isn't quantized"
            )
        return self.raw().to(dtype)

    def raw(self) -> Tensor:
        """A copy of the tensor as stored.

        Raises:
            ModelLoadError: if the checkpoint is closed.
        """
        if self._values is None:
            raise ModelLoadError(
                f"can't read tensor {self._name!r}: checkpoint {str(self._path)!r} is closed"
            )
        return self._values.clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Let go of the file."""
        self._values = None


class PickledTensors(TensorTable[PickledTensor]):
    """All tensors of a checkpoint, in the order of its files."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__()
        for path in paths:
            self._add_file(path)

    def close(self) -> None:
        """Unmap the files; their tensors can't be read any more."""
        for tensor in self._tensors.values():
            tensor.close()

    def _add_file(self, path: Path) -> None:
        for name, values in _read(path).items():
            self._add(PickledTensor(name, values, path), path)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        # files of before torch 1.6 are no archives, and can't be mapped
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise ModelLoadError(
            f"{str(path)!r} holds more than tensors, or is damaged, and isn't unpickled: "
            f"{str(error).splitlines()[0]}; convert it to safetensors where you trust it"
        ) from error
    except Exception as error:  # torch raises whatever its readers raise
        raise ModelLoadError(
            f"can't read {str(path)!r}: {str(error).splitlines()[:1]}; "
            "it is missing, truncated or damaged, download it again"
        ) from error
    if not isinstance(content, dict):
        raise ModelLoadError(
            f"{str(path)!r} holds a {type(content).__name__}; expected tensors by name"
        )
    for name, values in content.items():
        _check(path, name, values)
    return content


def _check(path: Path, name: object, values: object) -> None:
    if not isinstance(name, str) or not isinstance(values, Tensor):
        raise ModelLoadError(
            f"{str(path)!r} holds {name!r}: {type(values).__name__}; expected tensors by name"
        )
    if values.layout is not torch.strided or values.device.type != "cpu":
        raise ModelLoadError(
            f"tensor {name!r} in {str(path)!r} is {values.layout} on {values.device.type!r}, which "
            "is not supported; supported: dense tensors"
        )
    if values.dtype not in _DTYPES:
        raise ModelLoadError(
            f"tensor {name!r} in {str(path)!r} is stored as {values.dtype}, which is not "
            f"supported; supported: {', '.join(map(str, DTYPES.values()))}"
        )


def find_pickled(folder: Path) -> list[Path]:
    """The files of such a checkpoint in a folder; empty if it has none.

    Raises:
        ModelLoadError: if the index is damaged or names a file that is missing, or nothing says
            which of several files holds the weights.
    """
    if (folder / INDEX_FILE).exists():
        return read_index(folder / INDEX_FILE)
    for name in _SINGLE_FILES:
        if (folder / name).exists():
            return [folder / name]
    others = sorted(path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}"))
    if len(others) > 1:
        raise ModelLoadError(
            f"{str(folder)!r} has {len(others)} files of PyTorch weights; name the one you want: "
            f"{', '.join(path.name for path in others[:5])}"
        )
    return others
