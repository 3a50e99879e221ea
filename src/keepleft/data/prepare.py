"""Tokenise sources into a token store, a few thousand records at a time; skipped records are counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from keepleft.data.fast_encode import EncodeFunction
from keepleft.data.records import Record
from keepleft.data.token_store import TokenStore, store_writer, token_dtype

MAX_CHUNK_RECORDS = 1 << 12  # tokenised together
MAX_CHUNK_CHARACTERS = 1 << 22  # where records are long

Overlong = Literal["leave", "cut", "break", "flow"]


@dataclass(frozen=True)
class EncodedField:
    """How the texts of one field are encoded, and what becomes of those longer than `max_length`.

    "leave" skips the record, "cut" truncates it, "break" makes several records of it, each with prefix and
    suffix, and "flow" cuts it into pieces of one running text.
    """

    name: str
    encode: EncodeFunction
    max_length: int | None = None  # tokens, prefix and suffix included; None: any number
    prefix: bytes = b""
    suffix: bytes = b""
    overlong: Overlong = "leave"


@dataclass
class Counts:
    """What became of the records."""

    records: int = 0  # read
    written: int = 0  # each piece of a broken record counts
    empty: int = 0  # skipped: one of the fields is blank
    overlong: int = 0  # skipped
    truncated: int = 0


def label_encoder(label_names: Sequence[str], name: str, vocab: int) -> EncodeFunction:
    """Encodes labels by their index in a list; an unknown one is an error that names `name`, the source."""
    dtype = token_dtype(vocab)
    encoded = {label: np.array([n], dtype).tobytes() for n, label in enumerate(label_names)}

    def encode(texts: Sequence[str]) -> list[bytes]:
        try:
            return [encoded[text] for text in texts]
        except KeyError as error:
            raise ValueError(
                f"{name} has the label {error.args[0]!r}, which was never seen in training: there are "
                f"{', '.join(map(repr, list(label_names)[:20]))}"
            ) from None

    return encode


def prepare(
    parts: Iterable[tuple[Iterable[Record], Sequence[EncodedField]]], folder: Path, *, vocab: int
) -> tuple[TokenStore, Counts]:
    """Write the records of several sources, each with its own field encoders, into one store."""
    counts, itemsize = Counts(), token_dtype(vocab).itemsize
    parts = list(parts)
    names = [field.name for field in parts[0][1]]
    with store_writer(folder, names, vocab=vocab) as writer:
        for source, encoded_fields in parts:
            for chunk in _chunks(source):
                fields = [
                    field.encode(texts)
                    for field, texts in zip(encoded_fields, zip(*chunk, strict=True), strict=True)
                ]
                for field, rows in zip(
                    encoded_fields, _fit_rows(fields, encoded_fields, chunk, counts, itemsize), strict=True
                ):
                    writer.add(field.name, rows)
        if not counts.written:
            raise ValueError(
                f"of {counts.records} records none is left to train on: {counts.empty} are empty, "
                f"{counts.overlong} are longer than the model takes"
            )
    return TokenStore.open(folder), counts


def _chunks(source: Iterable[Record]) -> Iterable[list[Record]]:
    """Records in chunks, limited by their number and by their characters."""
    records = iter(source)
    while chunk := list(islice(records, 256)):
        characters = sum(len(text) for record in chunk for text in record)
        while (
            len(chunk) < MAX_CHUNK_RECORDS
            and characters < MAX_CHUNK_CHARACTERS
            and (more := list(islice(records, 256)))
        ):
            chunk += more
            characters += sum(len(text) for record in more for text in record)
        yield chunk


def _fit_rows(
    fields: list[list[bytes]],
    encoded_fields: Sequence[EncodedField],
    chunk: list[Record],
    counts: Counts,
    itemsize: int,
) -> list[list[bytes]]:
    """The rows to write, field by field: too long ones handled, prefix and suffix added."""
    counts.records += len(chunk)
    if (
        len(encoded_fields) == 1
        and encoded_fields[0].max_length is not None
        and encoded_fields[0].overlong in ("break", "flow")
    ):
        split_rows = [
            part
            for row, (text,) in zip(fields[0], chunk, strict=True)
            if text and not text.isspace()
            for part in _split_row(row, encoded_fields[0], itemsize)
        ]
        counts.empty += sum(not text or text.isspace() for (text,) in chunk)
        counts.written += len(split_rows)
        return [split_rows]
    limited = any(field.max_length is not None for field in encoded_fields)
    valid = [not limited or all(text and not text.isspace() for text in record) for record in chunk]
    counts.empty += len(valid) - sum(valid)
    for rows, field in zip(fields, encoded_fields, strict=True):
        max_bytes = (
            None
            if field.max_length is None
            else field.max_length * itemsize - len(field.prefix) - len(field.suffix)
        )
        for n, row in enumerate(rows):
            if max_bytes is not None and len(row) > max_bytes and valid[n]:
                if field.overlong == "cut":
                    counts.truncated += 1
                else:
                    valid[n] = False
                    counts.overlong += 1
        rows[:] = [field.prefix + row[:max_bytes] + field.suffix for row in rows]
    counts.written += sum(valid)
    return [[row for row, is_valid in zip(rows, valid, strict=True) if is_valid] for rows in fields]


def _split_row(row: bytes, field: EncodedField, itemsize: int) -> list[bytes]:
    """The pieces of a row longer than its limit."""
    assert field.max_length is not None
    if field.overlong == "flow":
        row, size = field.prefix + row + field.suffix, field.max_length * itemsize
        return [row[start : start + size] for start in range(0, len(row), size)]
    size = field.max_length * itemsize - len(field.prefix) - len(field.suffix)
    return [field.prefix + row[start : start + size] + field.suffix for start in range(0, len(row), size)]
