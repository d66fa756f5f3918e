"""Tensors of one or many safetensors files, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotshoe.errors import ModelLoadError
from hotshoe.weights.files import FileReader
from hotshoe.weights.tensor_table import TensorTable

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The format's names of the types that weights come in; int types are buffers such as masks.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsTensor:
    """One tensor of a safetensors file."""

    def __init__(self, name: str, entry: Mapping[str, Any], data_start: int, file: FileReader):
        self._name = name
        self._shape = tuple(entry["shape"])
        self._dtype = DTYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        self._offset = data_start + begin
        self.num_bytes: int = end - begin
        self._file = file

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
            ModelLoadError: if they are whole numbers: those of a quantized model mean something
                else without their scales.
        """
        if not self._dtype.is_floating_point:
            raise ModelLoadError(
                f"tensor {self._name!r} holds {self.format}, which are no weights as they stand; "
                "use a checkpoint that isn't quantized, or a quantization plugin that reads it"
            )
        return self.raw().to(dtype)

    def raw(self) -> Tensor:
        """The tensor as stored."""
        tensor = torch.empty(self._shape, dtype=self._dtype)
        self._file.read_into(tensor, self._offset, what=f"tensor {self._name!r}")
        return tensor


class SafetensorsTensors(TensorTable[SafetensorsTensor]):
    """All tensors of a checkpoint, in the order of its files."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__()
        self._files: list[FileReader] = []
        for path in paths:
            self._add_file(path)

    def close(self) -> None:
        """Close the files; their tensors can't be read any more."""
        for file in self._files:
            file.close()

    def _add_file(self, path: Path) -> None:
        header, data_start = _read_header(path)
        file = FileReader(path)
        self._files.append(file)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, entry in entries:
            if entry["dtype"] not in DTYPES:
                raise ModelLoadError(
                    f"tensor {name!r} in {str(path)!r} is stored as {entry['dtype']}, which is not "
                    f"supported; supported: {', '.join(DTYPES)}"
                )
            self._add(SafetensorsTensor(name, entry, data_start, file), path)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Entries by tensor name, and where the data starts.

    The library checks header and offsets against the file; reading the entries ourselves lets
    tensors be read without the library's memory map.
    """
    try:
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"can't read safetensors file {str(path)!r}: {error}; "
            "it is missing, truncated or damaged, download it again"
        ) from error
    header.pop("__metadata__", None)
    return header, 8 + header_bytes


def find_safetensors(folder: Path) -> list[Path]:
    """The files of the checkpoint in a folder; empty if it has none.

    Raises:
        ModelLoadError: if the index is damaged or names a file that is missing.
    """
    index = folder / INDEX_FILE
    if index.exists():
        return read_index(index)
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) > 1:
        raise ModelLoadError(
            f"{str(folder)!r} has {len(others)} safetensors files but no {INDEX_FILE}; "
            "download the index as well"
        )
    return others


def read_index(index: Path) -> list[Path]:
    """The files that an index names, beside it.

    Raises:
        ModelLoadError: if it is damaged, or a file is missing.
    """
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        names = list(dict.fromkeys(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"can't read index {str(index)!r}: {error!r}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{str(index)!r} names {len(missing)} of {len(names)} files that don't exist: "
            f"{', '.join(sorted(missing)[:5])}; download them"
        )
    return [index.parent / name for name in names]
