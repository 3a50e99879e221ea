"""What lies in a GGUF file: facts and tensors, read straight from the mapped file.

The gguf package reads it too, but keeps several arrays for each token of a vocabulary, which takes seconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32  # of the tensors, where the file says nothing else
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # kinds of fact
TEXT, LIST = 8, 9
LENGTH = struct.Struct("<Q")


class Laid(NamedTuple):
    """A tensor as it lies there."""

    kind: Any                # how it is quantised, by the gguf package's name
    shape: tuple[int, ...]
    data: np.ndarray         # (all but the last of the shape, bytes of a row)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Laid]]:
    """The facts and the tensors by their names. Tensors stay in the file until they are looked at."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = Cursor(mapped)
    if mapped[cursor.passed(4):4] != MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := cursor.number("I")) not in VERSIONS:
        raise ValueError(f"its version is {version}, and {' and '.join(map(str, VERSIONS))} are understood" if version & 0xFFFF
                         else "it was written for machines that keep the last byte of a number first")
    count, fields = cursor.number("Q"), cursor.number("Q")
    facts: dict[str, Any] = {}
    for _ in range(fields):
        name, = cursor.texts(1)
        if name in facts:
            raise ValueError(f"it says {name!r} twice")
        facts[name] = cursor.fact(cursor.number("I"))
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name, = cursor.texts(1)
        if name in tensors:
            raise ValueError(f"it holds the tensor {name!r} twice")
        shape = tuple(reversed(cursor.numbers("Q", cursor.number("I"))))
        tensors[name] = shape, cursor.number("I"), cursor.number("Q")
    align = facts.get("general.alignment", ALIGNMENT)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise ValueError(f"'general.alignment' is {align!r}: it must be a power of two")
    begin = -(-cursor.at // align) * align
    whole = np.frombuffer(mapped, np.uint8)
    return facts, {name: _laid(whole[begin:], name, *found) for name, found in tensors.items()}


def _laid(data: np.ndarray, name: str, shape: tuple[int, ...], number: int, offset: int) -> Laid:
    """One tensor among the bytes of all."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(number)
    block, size = GGML_QUANT_SIZES[kind]  # so many numbers in so many bytes
    if not shape or shape[-1] % block:
        raise ValueError(f"the tensor {name!r} has shape {shape}: rows of {kind.name} are multiples of {block}")
    rows = (*shape[:-1], shape[-1] // block * size)
    if offset + math.prod(rows) > len(data):
        raise ValueError("it ends too early")
    return Laid(kind, shape, data[offset:offset + math.prod(rows)].reshape(rows))


class Cursor:
    """A place in the file, which moves on with all that is read and never behind the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def passed(self, size: int) -> int:
        """Where so many bytes begin."""
        if size > len(self.data) - self.at:
            raise ValueError("it ends too early")
        self.at += size
        return self.at - size

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        begin = self.passed(count * struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{count}{code}", self.data, begin)

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def texts(self, count: int) -> list[str]:
        """Each behind its length. There may be some hundred thousand: they are read without a call for each."""
        data, at, last, out = self.data, self.at, len(self.data), []
        for _ in range(count):
            begin = at + 8
            at = begin + LENGTH.unpack_from(data, at)[0] if begin <= last else begin
            if at > last:
                raise ValueError("it ends too early")
            out.append(str(data[begin:at], "utf-8"))
        self.at = at
        return out

    def fact(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.texts(1)[0]
        if kind != LIST:
            raise ValueError(f"a fact is of the kind {kind}, which there is not")
        kind, count = self.number("I"), self.number("Q")
        if kind in NUMBERS:
            return list(self.numbers(NUMBERS[kind], count))
        return self.texts(count) if kind == TEXT else [self.fact(kind) for _ in range(count)]
