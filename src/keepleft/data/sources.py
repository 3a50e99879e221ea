"""Which reader a file asks for: the door of everything that yields records."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from keepleft.data.columnar import dataset, is_dataset, parquet_file
from keepleft.data.columns import Columns, sensible
from keepleft.data.reading import found
from keepleft.data.records import Given, Record, Source, each
from keepleft.data.tables import READERS, Table, tsv
from keepleft.data.texts import Lines, aligned, documents, lines, whole

__all__ = ["Record", "Source", "aligned", "check", "documents", "lines", "open_source", "table", "whole"]


def open_source(place: Given | Sequence[Given], fields: tuple[str, ...], columns: Columns | None = None) -> Source:
    """The records of a file, by its ending: .tsv .csv .jsonl .ndjson .json .parquet, with .gz after it or not.

    Any other file, and "-", which is stdin, is plain text: a record a line, and where several fields or columns are
    asked for, tabs between them. "hf:NAME[:CONFIG][:SPLIT]" and a folder of save_to_disk() are Hugging Face datasets.
    Columns are names, or numbers from 0 on; without them a header is understood, or the first columns are taken.
    """
    sensible(columns, fields)
    return each(place, partial(_opened, fields=tuple(fields), columns=columns))


def table(place: Given | Sequence[Given], columns: Columns | None, fields: tuple[str, ...]) -> Source:
    """The records of a table, as open_source() reads it; a file whose ending says nothing is tab-separated."""
    sensible(columns, fields)
    return each(place, partial(_opened, fields=tuple(fields), columns=columns, tabs=True))


def check(source: Source) -> int:
    """How many records there are; whatever is wrong with one of them is raised now rather than in the middle of work."""
    last = deque(enumerate(source, 1), maxlen=1)
    return last[0][0] if last else 0


def _opened(given: Given, *, fields: tuple[str, ...], columns: Columns | None, tabs: bool = False) -> Source:
    name = os.fspath(given)
    if is_dataset(name):
        return dataset(name, columns, fields)
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    suffix = next((suffix for suffix in reversed(suffixes) if suffix != ".gz"), "")
    if suffix == ".parquet":
        return parquet_file(name, columns, fields)
    reader = READERS.get(suffix)
    if reader is None and (tabs or columns is not None or len(fields) > 1):
        reader = tsv
    if reader is None:
        return Lines(found(name), fields)
    return Table(found(name), reader, None if columns is None else tuple(columns), fields)
