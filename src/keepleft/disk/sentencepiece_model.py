"""Read a SentencePiece .model file: pieces with scores, and how a text is normalised before it is split.

The format is a protocol buffer (sentencepiece_model.proto). Only the fields that change the tokens of a text
are read; unknown fields are skipped, as the format demands.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from keepleft.disk.regular_file import read_regular_file

MAX_MODEL_BYTES = 128 << 20
MAX_PIECES = 4 << 20
MAX_VARINT_BYTES = 10

# wire types of protocol buffers
VARINT = 0
FIXED_64 = 1
LENGTH_DELIMITED = 2
FIXED_32 = 5


class PieceType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # in no text: <s>, </s>
    USER_DEFINED = 4  # always one token
    UNUSED = 5
    BYTE = 6  # <0x00> to <0xFF>, for characters that have no piece


class ModelType(IntEnum):
    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    type: PieceType


@dataclass(frozen=True)
class SentencePieceModel:
    pieces: list[Piece]
    model_type: ModelType = ModelType.UNIGRAM
    byte_fallback: bool = False
    whitespace_as_suffix: bool = False
    charsmap: bytes = b""  # precompiled: what each character or sequence is replaced by
    add_dummy_prefix: bool = True  # a space before the text
    remove_extra_whitespaces: bool = True  # at both ends, and all but one between words
    escape_whitespaces: bool = True  # a space is written as ▁

    def texts(self, *types: PieceType) -> list[str]:
        """The pieces of these types."""
        return [piece.text for piece in self.pieces if piece.type in types]


# number and wire type of a field → its value: an integer, the bytes of a float, or those of a text or message
Field = tuple[int, int, int | bytes]


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Read a .model or .spm file. Raises ValueError if it is too large or not one."""
    return parse_sentencepiece_model(read_regular_file(path, max_bytes=MAX_MODEL_BYTES), path)


def parse_sentencepiece_model(content: bytes, source_name: object) -> SentencePieceModel:
    """Parse the content of a .model file. Raises ValueError, naming `source_name`, if it is none."""
    try:
        return _parse_model(content)
    except (ValueError, UnicodeDecodeError, struct.error) as error:
        raise ValueError(f"{source_name} is not a SentencePiece model: {error}") from error


def _parse_model(content: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    values: dict[str, object] = {}
    for number, wire_type, value in _fields(content):
        if wire_type != LENGTH_DELIMITED:
            raise ValueError(f"field {number} is no message")
        assert isinstance(value, bytes)
        if number == 1:
            pieces.append(_parse_piece(value))
            if len(pieces) > MAX_PIECES:
                raise ValueError(f"it has more than {MAX_PIECES:,} pieces")
        elif number == 2:
            values |= _parse_trainer(value)
        elif number == 3:
            values |= _parse_normalizer(value)
    if not pieces:
        raise ValueError("it has no pieces")
    texts = {piece.text for piece in pieces}
    if len(texts) < len(pieces) or "" in texts:
        raise ValueError("a piece is empty, or there twice")
    if sum(piece.type == PieceType.UNKNOWN for piece in pieces) != 1:
        raise ValueError("it has not one piece for what is unknown")
    return SentencePieceModel(pieces, **values)  # type: ignore[arg-type]


def _parse_piece(content: bytes) -> Piece:
    text, score, piece_type = "", 0.0, PieceType.NORMAL
    for number, wire_type, value in _fields(content):
        if number == 1 and wire_type == LENGTH_DELIMITED:
            assert isinstance(value, bytes)
            text = value.decode()
        elif number == 2 and wire_type == FIXED_32:
            assert isinstance(value, bytes)
            (score,) = struct.unpack("<f", value)
        elif number == 3 and wire_type == VARINT:
            piece_type = PieceType(int(value))
    if not score - score == 0.0:
        raise ValueError(f"the score of {text!r} is {score}")
    return Piece(text, score, piece_type)


def _parse_trainer(content: bytes) -> dict[str, object]:
    values: dict[str, object] = {}
    for number, wire_type, value in _fields(content):
        if wire_type == VARINT and number == 3:
            values["model_type"] = ModelType(int(value))
        elif wire_type == VARINT and number == 24:
            values["whitespace_as_suffix"] = bool(value)
        elif wire_type == VARINT and number == 35:
            values["byte_fallback"] = bool(value)
    return values


def _parse_normalizer(content: bytes) -> dict[str, object]:
    names = {3: "add_dummy_prefix", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"}
    values: dict[str, object] = {}
    for number, wire_type, value in _fields(content):
        if number == 2 and wire_type == LENGTH_DELIMITED:
            values["charsmap"] = value
        elif number in names and wire_type == VARINT:
            values[names[number]] = bool(value)
    return values


def _fields(content: bytes) -> Iterator[Field]:
    """The fields of a message. Raises ValueError where it is cut off or makes no sense."""
    position = 0
    while position < len(content):
        tag, position = _read_varint(content, position)
        number, wire_type = tag >> 3, tag & 7
        value: int | bytes
        if wire_type == VARINT:
            value, position = _read_varint(content, position)
        else:
            if wire_type == LENGTH_DELIMITED:
                length, position = _read_varint(content, position)
            elif wire_type in (FIXED_32, FIXED_64):
                length = 4 if wire_type == FIXED_32 else 8
            else:
                raise ValueError(f"field {number} has the wire type {wire_type}")
            if not number or length > len(content) - position:
                raise ValueError(
                    f"field {number} at byte {position} has {length:,} bytes, which are not there"
                )
            value = content[position : position + length]
            position += length
        yield number, wire_type, value


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    """An integer of seven bits per byte, the lowest first, and where it ends."""
    value = 0
    for n, byte in enumerate(content[position : position + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * n)
        if byte < 0x80:
            return value, position + n + 1
    raise ValueError(f"the number at byte {position} has no end")
