"""From texts to a token store, a few thousand records at a time; what cannot be learned from is left out and counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from keepleft.data.encoding import Encode
from keepleft.data.records import Record
from keepleft.data.store import Store, kind_of, writing

PIECE = 1 << 12   # records at a time
WEIGHT = 1 << 22  # and, where records are long, characters



Long = Literal["leave", "cut", "break", "flow"]


@dataclass(frozen=True)
class Column:
    """One field: how its texts become integers, what goes around each, and what becomes of those that are too long.

    They are left out; cut; broken into several texts, each with its own marks; or flow on in several pieces of one text.
    """

    name: str
    encode: Encode
    longest: int | None = None  # tokens, marks included; None: any number
    before: bytes = b""
    after: bytes = b""
    long: Long = "leave"


@dataclass
class Counts:
    """What became of the records."""

    records: int = 0   # read
    kept: int = 0      # written (pieces of one record count each)
    empty: int = 0     # left out: nothing in one of the fields
    overlong: int = 0  # left out
    cut: int = 0       # shortened


def labels(known: Sequence[str], name: str, vocab: int) -> Encode:
    """Labels as numbers, by their place in a list."""
    kind = kind_of(vocab)
    rows = {label: np.array([n], kind).tobytes() for n, label in enumerate(known)}

    def encode(texts: Sequence[str]) -> list[bytes]:
        try:
            return [rows[text] for text in texts]
        except KeyError as error:
            raise ValueError(f"{name} has the label {error.args[0]!r}, which was never seen in training: there are "
                             f"{', '.join(map(repr, list(known)[:20]))}") from None
    return encode


def prepare(parts: Iterable[tuple[Iterable[Record], Sequence[Column]]], folder: Path, *,
            vocab: int) -> tuple[Store, Counts]:
    """Write the records of several sources, each with its own columns, into one store."""
    counts, width = Counts(), kind_of(vocab).itemsize
    parts = list(parts)
    names = [column.name for column in parts[0][1]]
    with writing(folder, names, vocab=vocab) as writer:
        for source, columns in parts:
            for piece in _pieces(source):
                fields = [column.encode(texts) for column, texts in zip(columns, zip(*piece, strict=True), strict=True)]
                for column, rows in zip(columns, _fitting(fields, columns, piece, counts, width), strict=True):
                    writer.add(column.name, rows)
        if not counts.kept:
            raise ValueError(f"of {counts.records} records none is left to train on: {counts.empty} are empty, "
                             f"{counts.overlong} are longer than the model takes")
    return Store.open(folder), counts


def _pieces(source: Iterable[Record]) -> Iterable[list[Record]]:
    """Some records at a time, by number and by weight."""
    records = iter(source)
    while piece := list(islice(records, 256)):
        weight = sum(len(text) for record in piece for text in record)
        while len(piece) < PIECE and weight < WEIGHT and (more := list(islice(records, 256))):
            piece += more
            weight += sum(len(text) for record in more for text in record)
        yield piece


def _fitting(fields: list[list[bytes]], columns: Sequence[Column], piece: list[Record], counts: Counts,
             width: int) -> list[list[bytes]]:
    """The rows to be written, field by field."""
    counts.records += len(piece)
    if len(columns) == 1 and columns[0].longest is not None and columns[0].long in ("break", "flow"):
        out = [part for row, (text,) in zip(fields[0], piece, strict=True) if text and not text.isspace()
               for part in _parts(row, columns[0], width)]
        counts.empty += sum(not text or text.isspace() for text, in piece)
        counts.kept += len(out)
        return [out]
    limited = any(column.longest is not None for column in columns)
    good = [not limited or all(text and not text.isspace() for text in record) for record in piece]
    counts.empty += len(good) - sum(good)
    for rows, column in zip(fields, columns, strict=True):
        room = None if column.longest is None else column.longest * width - len(column.before) - len(column.after)
        for n, row in enumerate(rows):
            if room is not None and len(row) > room and good[n]:
                if column.long == "cut":
                    counts.cut += 1
                else:
                    good[n] = False
                    counts.overlong += 1
        rows[:] = [column.before + row[:room] + column.after for row in rows]
    counts.kept += sum(good)
    return [[row for row, fits in zip(rows, good, strict=True) if fits] for rows in fields]


def _parts(row: bytes, column: Column, width: int) -> list[bytes]:
    """A long text in pieces."""
    assert column.longest is not None
    if column.long == "flow":
        row, size = column.before + row + column.after, column.longest * width
        return [row[at:at + size] for at in range(0, len(row), size)]
    size = column.longest * width - len(column.before) - len(column.after)
    return [column.before + row[at:at + size] + column.after for at in range(0, len(row), size)]
