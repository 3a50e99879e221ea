"""Rows of text, JSON Lines and Parquet files: how many there are, and any range of them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, NamedTuple, cast

from keepleft.batch import storage

GZIP_SUFFIX = ".gz"
TEXT_SUFFIX = ".txt"
JSON_SUFFIX = ".jsonl"
PARQUET_SUFFIX = ".parquet"
SUFFIXES = (TEXT_SUFFIX, JSON_SUFFIX, PARQUET_SUFFIX)
BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20  # a file without line breaks must not fill the memory
PARQUET_BATCH_ROWS = 1024
CHECKED_ROWS = 100  # of a file, for the field that is asked for
MAX_SHOWN_BYTES = 400  # of a line that is no row
TEXT_FIELD = "text"
ID_FIELD = "id"


class Row(NamedTuple):
    """A row: its text; or what it is instead, and why that is no text."""

    id: str | int | None  # None: it has none of its own
    text: str
    error: str | None = None


def check_file_name(path: str) -> None:
    """Raise ValueError for a file of another kind."""
    if file_suffix(path) not in SUFFIXES:
        raise ValueError(
            f"{path} is no file of rows: there are .txt (a text on each line), .jsonl (an object"
            " on each line) and .parquet, the first two also as .gz"
        )


def file_suffix(path: str) -> str:
    """.txt, .jsonl, .parquet or whatever it is, without .gz"""
    name = path.removesuffix(GZIP_SUFFIX)
    _, dot, suffix = name[name.rfind("/") + 1 :].rpartition(".")
    is_compressed_parquet = suffix == PARQUET_SUFFIX[1:] and name != path
    return dot + suffix + (GZIP_SUFFIX if is_compressed_parquet else "")


def count_rows(path: str, field: str = TEXT_FIELD) -> int:
    """How many rows a file has. Raises ValueError, naming the file, if it cannot be read."""
    check_file_name(path)
    if file_suffix(path) == PARQUET_SUFFIX:
        with storage.open_file(path) as file:
            return int(_open_parquet(path, file, field).metadata.num_rows)
    count = 0
    last = b"\n"
    with _open_lines(path) as stream:
        for block in _read_blocks(path, stream):
            count += block.count(b"\n")
            last = block
    return count + (not last.endswith(b"\n"))


def check_field(path: str, field: str) -> None:
    """Raise ValueError if none of the first objects of a .jsonl file has the field."""
    if file_suffix(path) != JSON_SUFFIX:
        return
    names: set[str] = set()
    for line in islice(_read_lines(path), CHECKED_ROWS):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            if field in record:
                return
            names.update(map(str, record))
    if names:
        shown = ", ".join(sorted(names))
        raise ValueError(f"{path} has no field {field!r}, but {shown}: name one with --field")


class RowReader:
    """Reads ranges of rows of files. Going forwards through one file, it reads on where it was."""

    def __init__(self, field: str = TEXT_FIELD, id_field: str = ID_FIELD) -> None:
        self.field = field
        self.id_field = id_field
        self.path: str | None = None
        self.records: Iterator[Any] = iter(())
        self.to_row: Callable[[Any], Row] = _text_row
        self.position = 0

    def read(self, path: str, start: int, count: int) -> list[Row]:
        """Rows `start` to `start + count` of a file. Raises ValueError if it has become shorter."""
        if path != self.path or start < self.position:
            self._open(path)
        skipped = sum(1 for _ in islice(self.records, start - self.position))  # without a look into them
        rows = [self.to_row(record) for record in islice(self.records, count)]
        self.position += skipped + len(rows)
        if len(rows) < count:
            raise ValueError(f"{path} has only {self.position} rows now: it was changed while the job ran")
        return rows

    def _open(self, path: str) -> None:
        # nothing here refers to the reader: without a cycle the file is closed as soon as the reader is gone
        suffix = file_suffix(path)
        is_parquet = suffix == PARQUET_SUFFIX
        to_row = partial(_record_row, field=self.field, id_field=self.id_field)
        self.path, self.position = path, 0
        self.records = _parquet_records(path, self.field, self.id_field) if is_parquet else _read_lines(path)
        json_row = partial(_json_row, to_row=to_row)
        self.to_row = to_row if is_parquet else json_row if suffix == JSON_SUFFIX else _text_row


def _parquet_records(path: str, field: str, id_field: str) -> Iterator[dict[str, Any]]:
    with storage.open_file(path) as file:
        parquet = _open_parquet(path, file, field)
        columns = [name for name in (id_field, field) if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(PARQUET_BATCH_ROWS, columns=columns):
            yield from batch.to_pylist()


def _json_row(line: bytes, to_row: Callable[[dict[str, Any]], Row]) -> Row:
    if not line.strip():
        return Row(None, "", "the line is empty")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Row(None, _shown(line), f"the line is not JSON: {error}")
    if not isinstance(record, dict):
        return Row(None, _shown(line), "the line is JSON, but no object with a text in it")
    return to_row(record)


def _record_row(record: dict[str, Any], field: str, id_field: str) -> Row:
    row_id = record.get(id_field)
    if isinstance(row_id, bool) or not isinstance(row_id, str | int) or not _is_unicode(row_id):
        row_id = None
    text = record.get(field)
    if isinstance(text, str):
        if not _is_unicode(text):
            return Row(row_id, _shown(text.encode(errors="replace")), "the text is not Unicode")
        return Row(row_id, text)
    problem = f"is {type(text).__name__}, no text" if field in record else "is missing"
    shown = _shown(json.dumps(record, ensure_ascii=False, default=str).encode(errors="replace"))
    return Row(row_id, shown, f"the field {field!r} {problem}: name it with --field")


def _shown(line: bytes) -> str:
    """The beginning of a line that cannot be read, for whoever looks for it."""
    text = line[:MAX_SHOWN_BYTES].decode(errors="replace")
    return text if len(line) <= MAX_SHOWN_BYTES else f"{text}…"


def _is_unicode(value: object) -> bool:
    """Not so for half of a surrogate pair, which JSON may have and no file."""
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_row(line: bytes) -> Row:
    try:
        return Row(None, line.decode())
    except UnicodeDecodeError as error:
        return Row(None, _shown(line), f"the line is not UTF-8 ({error.reason} at byte {error.start})")


def _read_lines(path: str) -> Iterator[bytes]:
    with _open_lines(path) as stream:
        pending = b""
        for block in _read_blocks(path, stream):
            *lines, pending = (pending + block).split(b"\n")
            for line in lines:
                yield line.removesuffix(b"\r")
            if len(pending) > MAX_LINE_BYTES:
                raise ValueError(f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes: cut it first")
        if pending:
            yield pending.removesuffix(b"\r")


@contextmanager
def _open_lines(path: str) -> Iterator[BinaryIO]:
    with storage.open_file(path) as file:
        if path.endswith(GZIP_SUFFIX):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield file


def _read_blocks(path: str, stream: BinaryIO) -> Iterator[bytes]:
    try:
        while block := stream.read(BLOCK_BYTES):
            yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}): is it complete, and gzip?") from error


def _open_parquet(path: str, file: BinaryIO, field: str) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ImportError(f"{path} is read with pyarrow: pip install 'keepleft[parquet]'") from error
    try:
        out = parquet.ParquetFile(file)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} is no Parquet file that pyarrow reads: {error}") from error
    names = out.schema_arrow.names
    if field not in names:
        raise ValueError(f"{path} has no column {field!r}, but {', '.join(names)}: name one with --field")
    return out
