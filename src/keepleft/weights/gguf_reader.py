"""The binary format of GGUF files: metadata and tensors, read from the memory-mapped file.

The gguf package reads it too, but keeps several arrays for each token of a vocabulary, which takes seconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keepleft.disk.regular_file import open_regular_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # of the tensors
# types of metadata values
STRUCT_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING_TYPE = 8
ARRAY_TYPE = 9
UINT64 = struct.Struct("<Q")


class TensorInfo(NamedTuple):
    """A tensor in the file."""

    quant_type: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray  # of bytes: (*shape[:-1], bytes of a row)


def read(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata and tensors by name. Tensors are read from the file when they are accessed."""
    with open_regular_file(path) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = Cursor(mapped)
    if mapped[cursor.advance(4) : 4] != MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := cursor.number("I")) not in VERSIONS:
        raise ValueError(
            f"its version is {version}, and {' and '.join(map(str, VERSIONS))} are understood"
            if version & 0xFFFF
            else "it was written for machines that keep the last byte of a number first"
        )
    tensor_count, metadata_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        (name,) = cursor.strings(1)
        if name in metadata:
            raise ValueError(f"it says {name!r} twice")
        metadata[name] = cursor.value(cursor.number("I"))
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        (name,) = cursor.strings(1)
        if name in tensors:
            raise ValueError(f"it holds the tensor {name!r} twice")
        shape = tuple(reversed(cursor.numbers("Q", cursor.number("I"))))
        tensors[name] = shape, cursor.number("I"), cursor.number("Q")
    align = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise ValueError(f"'general.alignment' is {align!r}: it must be a power of two")
    data_start = -(-cursor.offset // align) * align
    file_bytes = np.frombuffer(mapped, np.uint8)
    return metadata, {
        name: _tensor_info(file_bytes[data_start:], name, *entry) for name, entry in tensors.items()
    }


def _tensor_info(
    data: np.ndarray, name: str, shape: tuple[int, ...], type_id: int, offset: int
) -> TensorInfo:
    """One tensor at its offset in the data of all."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    quant_type = GGMLQuantizationType(type_id)
    block_size, block_bytes = GGML_QUANT_SIZES[quant_type]  # numbers and bytes of a block
    if not shape or shape[-1] % block_size:
        raise ValueError(
            f"the tensor {name!r} has shape {shape}: rows of {quant_type.name} are multiples of {block_size}"
        )
    byte_shape = (*shape[:-1], shape[-1] // block_size * block_bytes)
    if offset + math.prod(byte_shape) > len(data):
        raise ValueError("it ends too early")
    return TensorInfo(quant_type, shape, data[offset : offset + math.prod(byte_shape)].reshape(byte_shape))


class Cursor:
    """A read position in the file; reading past the end is a ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def advance(self, size: int) -> int:
        """Move on by so many bytes; returns where they begin."""
        if size > len(self.data) - self.offset:
            raise ValueError("it ends too early")
        self.offset += size
        return self.offset - size

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        start = self.advance(count * struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def strings(self, count: int) -> list[str]:
        """Strings, each after its length; without a call for each, as there may be hundreds of thousands."""
        data = self.data
        offset = self.offset
        size = len(self.data)
        out = []
        for _ in range(count):
            start = offset + 8
            offset = start + UINT64.unpack_from(data, offset)[0] if start <= size else start
            if offset > size:
                raise ValueError("it ends too early")
            out.append(str(data[start:offset], "utf-8"))
        self.offset = offset
        return out

    def value(self, value_type: int) -> Any:
        """A metadata value of that type."""
        if value_type in STRUCT_CODES:
            return self.number(STRUCT_CODES[value_type])
        if value_type == STRING_TYPE:
            return self.strings(1)[0]
        if value_type != ARRAY_TYPE:
            raise ValueError(f"a metadata value has the type {value_type}, which does not exist")
        value_type, count = self.number("I"), self.number("Q")
        if value_type in STRUCT_CODES:
            return list(self.numbers(STRUCT_CODES[value_type], count))
        if value_type == STRING_TYPE:
            return self.strings(count)
        return [self.value(value_type) for _ in range(count)]
