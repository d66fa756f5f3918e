"""The GGUF container: metadata and where each tensor lies, with every length checked against the
file. Knows nothing of models.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hotshoe.errors import ModelLoadError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4

TYPE_NAMES = {
    0: "float32",
    1: "float16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    9: "q8_1",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    15: "q8_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    29: "iq1_m",
    30: "bfloat16",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
}

# Elements and bytes of one block, for the formats that can be read.
BLOCK_SIZES = {
    "float32": (1, 4),
    "float16": (1, 2),
    "bfloat16": (1, 2),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """Where a tensor lies.

    Attributes:
        shape: outermost dimension first, as torch has it (the file has them the other way round).
        format: a name from ``BLOCK_SIZES``.
        offset: of its first byte, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Product of all dimensions but the innermost."""
        return prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """All of a GGUF file but the tensors' bytes.

    Attributes:
        metadata: values by key, arrays as lists.
        tensors: by name, in file order.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensorInfo]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file.

    Raises:
        ModelLoadError: if the file can't be read, is not GGUF of a supported version, is truncated,
            or holds a tensor format that can't be read.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _HeaderReader(path, data).read()
    except ValueError as error:
        raise ModelLoadError(f"can't read GGUF file {str(path)!r}: it is empty") from error
    except OSError as error:
        raise ModelLoadError(f"can't read GGUF file {str(path)!r}: {error}") from error


class _HeaderReader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0

    def read(self) -> GGUFHeader:
        version = self._read_version()
        num_tensors = self._count("tensors", min_bytes_each=24)
        num_entries = self._count("metadata entries", min_bytes_each=13)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._error(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._scalar(_U32, f"the type of {key!r}"), key)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self._error(f"general.alignment is {alignment!r}, not a multiple of 8")
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensorInfo] = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise self._error(f"tensor {name!r} appears twice")
            if offset % alignment:
                raise self._error(
                    f"tensor {name!r} starts at {offset}, not a multiple of {alignment}"
                )
            tensors[name] = self._locate(name, shape, type_id, data_start + offset)
        return GGUFHeader(self._path, version, metadata, tensors)

    def _read_version(self) -> int:
        magic = self._data[:4]
        if magic != MAGIC:
            raise self._error(f"not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}")
        self._position = 4
        version: int = self._scalar(_U32, "the version")
        if version not in SUPPORTED_VERSIONS:
            if version & 0xFFFF == 0:
                raise self._error("it is big-endian; convert it to little-endian")
            raise self._error(
                f"GGUF version {version} is not supported, allowed: {SUPPORTED_VERSIONS}; "
                "convert the model again"
            )
        return version

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor name")
        num_dimensions: int = self._scalar(_U32, f"the rank of tensor {name!r}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(
                f"tensor {name!r} has {num_dimensions} dimensions, allowed: 1 to {MAX_DIMENSIONS}"
            )
        shape = [self._scalar(_U64, f"the shape of tensor {name!r}") for _ in range(num_dimensions)]
        if 0 in shape:
            raise self._error(f"tensor {name!r} is empty: a dimension is 0")
        type_id = self._scalar(_U32, f"the type of tensor {name!r}")
        offset = self._scalar(_U64, f"the offset of tensor {name!r}")
        return name, tuple(reversed(shape)), type_id, offset

    def _locate(
        self, name: str, shape: tuple[int, ...], type_id: int, offset: int
    ) -> GGUFTensorInfo:
        type_name = TYPE_NAMES.get(type_id, f"type {type_id}")
        if type_name not in BLOCK_SIZES:
            raise self._error(
                f"tensor {name!r} is stored as {type_name}, which is not supported; "
                f"supported: {', '.join(BLOCK_SIZES)}"
            )
        block_size, block_bytes = BLOCK_SIZES[type_name]
        if shape[-1] % block_size:
            raise self._error(
                f"tensor {name!r} has rows of {shape[-1]} values, "
                f"not a multiple of the {block_size} in a {type_name} block"
            )
        num_bytes = prod(shape) // block_size * block_bytes
        if offset + num_bytes > self._size:
            raise self._error(
                f"truncated: tensor {name!r} needs bytes {offset} to {offset + num_bytes}, "
                f"but the file has {self._size}; download it again"
            )
        return GGUFTensorInfo(name, shape, type_name, offset, num_bytes)

    def _value(self, type_id: int, key: str, depth: int = 0) -> Any:
        if type_id in _SCALARS:
            return self._scalar(_SCALARS[type_id], f"metadata {key!r}")
        if type_id == _STRING:
            return self._string(f"metadata {key!r}")
        if type_id == _ARRAY and depth < MAX_ARRAY_DEPTH:
            return self._array(key, depth)
        raise self._error(f"metadata {key!r} has the unknown type {type_id}")

    def _array(self, key: str, depth: int) -> list[Any]:
        type_id = self._scalar(_U32, f"metadata {key!r}")
        if type_id in _SCALARS:
            item = _SCALARS[type_id]
            length = self._count(f"items in {key!r}", min_bytes_each=item.size)
            start = self._advance(length * item.size, f"metadata {key!r}")
            values = struct.unpack_from(f"<{length}{item.format[1:]}", self._data, start)
            return list(values)
        if type_id == _STRING:
            length = self._count(f"items in {key!r}", min_bytes_each=8)
            return self._strings(length, key)
        length = self._count(f"items in {key!r}", min_bytes_each=12)
        return [self._value(type_id, key, depth + 1) for _ in range(length)]

    def _strings(self, length: int, key: str) -> list[str]:
        """The hot loop of a header: vocabulary and merges are 100,000 strings."""
        data, position, size, unpack = self._data, self._position, self._size, _U64.unpack_from
        strings = []
        for _ in range(length):
            start = position + 8
            if start > size:
                raise self._truncated(f"metadata {key!r}")
            position = start + unpack(data, position)[0]
            if position > size:
                raise self._truncated(f"metadata {key!r}")
            strings.append(data[start:position])
        self._position = position
        return [self._decode(string, f"metadata {key!r}") for string in strings]

    def _string(self, what: str) -> str:
        length = self._scalar(_U64, what)
        start = self._advance(length, what)
        return self._decode(self._data[start : start + length], what)

    def _decode(self, string: bytes, what: str) -> str:
        try:
            return string.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not valid UTF-8: {string[:40]!r}") from error

    def _scalar(self, item: struct.Struct, what: str) -> Any:
        return item.unpack_from(self._data, self._advance(item.size, what))[0]

    def _count(self, what: str, *, min_bytes_each: int) -> int:
        count: int = self._scalar(_U64, f"the number of {what}")
        if count * min_bytes_each > self._size - self._position:
            raise self._error(
                f"truncated or damaged: it claims {count} {what}, "
                f"but only {self._size - self._position} bytes are left"
            )
        return count

    def _advance(self, num_bytes: int, what: str) -> int:
        start = self._position
        if start + num_bytes > self._size:
            raise self._truncated(what)
        self._position = start + num_bytes
        return start

    def _truncated(self, what: str) -> ModelLoadError:
        return self._error(
            f"truncated: the file ends after {self._size} bytes, within {what}; download it again"
        )

    def _error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"can't read GGUF file {str(self._path)!r}: {problem}")
