"""Open a record source by its file ending."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from keepleft.data.columnar import dataset, is_dataset, parquet_file
from keepleft.data.columns import Columns, check_columns
from keepleft.data.records import Record, RecordSource, StrPath, open_each
from keepleft.data.tables import READERS, TableSource, tsv
from keepleft.data.text_file import open_text
from keepleft.data.text_sources import LineSource, documents, lines, parallel_text, running_text

__all__ = [
    "Record",
    "RecordSource",
    "count_records",
    "documents",
    "lines",
    "open_source",
    "open_table",
    "parallel_text",
    "running_text",
]


def open_source(
    paths: StrPath | Sequence[StrPath], fields: tuple[str, ...], columns: Columns | None = None
) -> RecordSource:
    """The records of a file by its ending: .tsv, .csv, .jsonl, .ndjson, .json or .parquet, optionally .gz.

    Any other file, and "-" for stdin, is plain text: a record a line, with tabs between columns where several
    fields or columns are asked for. "hf:NAME[:CONFIG][:SPLIT]" and folders written by save_to_disk() are
    Hugging Face datasets. Columns are names, or numbers from 0; without them the header decides, or the first
    columns are taken.
    """
    check_columns(columns, fields)
    return open_each(paths, partial(_open, fields=tuple(fields), columns=columns))


def open_table(
    paths: StrPath | Sequence[StrPath], columns: Columns | None, fields: tuple[str, ...]
) -> RecordSource:
    """The records of a table, as open_source() reads it; a file with any other ending is tab-separated."""
    check_columns(columns, fields)
    return open_each(paths, partial(_open, fields=tuple(fields), columns=columns, tab_separated=True))


def count_records(source: RecordSource) -> int:
    """Read all records once, so that an error in any of them is raised now, and count them."""
    last = deque(enumerate(source, 1), maxlen=1)
    return last[0][0] if last else 0


def _open(
    path: StrPath, *, fields: tuple[str, ...], columns: Columns | None, tab_separated: bool = False
) -> RecordSource:
    name = os.fspath(path)
    if is_dataset(name):
        return dataset(name, columns, fields)
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    suffix = next((suffix for suffix in reversed(suffixes) if suffix != ".gz"), "")
    if suffix == ".parquet":
        return parquet_file(name, columns, fields)
    reader = READERS.get(suffix)
    if reader is None and (tab_separated or columns is not None or len(fields) > 1):
        reader = tsv
    if reader is None:
        return LineSource(open_text(name), fields)
    return TableSource(open_text(name), reader, None if columns is None else tuple(columns), fields)
