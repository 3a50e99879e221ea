"""Records of tables in text files: TSV, CSV, JSON and JSONL readers."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

from keepleft.data.columns import Columns, extract, header, keys, nested_names, picker
from keepleft.data.records import FileSource, Record
from keepleft.data.text_file import TextFile

MAX_CELL_CHARACTERS = 1 << 24  # of a cell or JSON value; beyond, a quote or bracket was left open

NumberedRecords = Iterator[tuple[int, Record]]  # with the line that each begins in
Reader = Callable[[TextFile, Columns | None, tuple[str, ...]], NumberedRecords]


@dataclass(frozen=True)
class TableSource(FileSource):
    """One file of rows; a record is the requested columns of a row."""

    reader: Reader
    columns: tuple[str | int, ...] | None
    fields: tuple[str, ...]

    def __iter__(self) -> Iterator[Record]:
        rows = self._numbered_records()
        first = next(rows, None)
        if first is None:
            raise ValueError(f"{self.file.name} holds no text: it has no rows")
        yield first[1]
        yield from map(itemgetter(1), rows)

    def location(self, n: int) -> str:
        line, _ = next(islice(self._numbered_records(), n, None), (0, ()))
        return f"{self.file.name} line {line}"

    def _numbered_records(self) -> NumberedRecords:
        return self.reader(self.file, self.columns, self.fields)


def tsv(file: TextFile, columns: Columns | None, fields: tuple[str, ...]) -> NumberedRecords:
    """A row a line, tabs between cells, no quoting.

    Empty lines are skipped, unless only the first column is wanted.
    """
    numbered_lines = enumerate(file.lines(), 1)
    line_number, line = next(numbered_lines)
    indices, is_header = header(line.split("\t"), columns, fields, f"{file.name} line 1")
    pick, skip_blank_lines = picker(indices), max(indices) > 0
    if not is_header and (line or not skip_blank_lines):
        yield line_number, _pick_cells(pick, line.split("\t"), indices, file, line_number, "\t")
    for line_number, line in numbered_lines:
        try:
            yield line_number, pick(line.split("\t"))
        except IndexError:
            if line:
                _pick_cells(pick, line.split("\t"), indices, file, line_number, "\t")


def csv_rows(file: TextFile, columns: Columns | None, fields: tuple[str, ...]) -> NumberedRecords:
    """Commas between cells, double quotes around those with commas, quotes or line breaks; no empty lines."""
    # the csv module's own limit, 128 KiB, is less than a long article
    csv.field_size_limit(max(csv.field_size_limit(), MAX_CELL_CHARACTERS))
    rows = csv.reader(_lines_with_ends(file), strict=True)
    indices: tuple[int, ...] = ()
    pick, first_line = None, 1
    try:
        for cells in rows:
            if pick is None and cells:
                indices, is_header = header(cells, columns, fields, f"{file.name} line {first_line}")
                pick = picker(indices)
                if is_header:
                    cells = []
            if cells and pick:
                yield first_line, _pick_cells(pick, cells, indices, file, first_line, ",")
            first_line = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{file.name} line {first_line} is not CSV: {error}. Cells that hold quotes are written "
            '"in ""quotes"", doubled", and every quote is closed'
        ) from error


def jsonl(file: TextFile, columns: Columns | None, fields: tuple[str, ...]) -> NumberedRecords:
    """One JSON object a line."""
    return _extract_records(_jsonl_objects(file), file, columns, fields)


def json_or_jsonl(file: TextFile, columns: Columns | None, fields: tuple[str, ...]) -> NumberedRecords:
    """A JSON list of objects, or one object a line."""
    start = next(file.blocks(allow_partial_lines=True), "").lstrip()
    return _extract_records(
        _json_list_items(file) if start.startswith("[") else _jsonl_objects(file), file, columns, fields
    )


READERS: dict[str, Reader] = {
    ".tsv": tsv,
    ".tab": tsv,
    ".csv": csv_rows,
    ".jsonl": jsonl,
    ".ndjson": jsonl,
    ".json": json_or_jsonl,
}


def _pick_cells(
    pick: Callable[[list[str]], Record],
    cells: list[str],
    indices: tuple[int, ...],
    file: TextFile,
    line_number: int,
    separator: str,
) -> Record:
    try:
        return pick(cells)
    except IndexError:
        separators = {",": "commas", "\t": "tabs"}[separator]
        column_count = "1 column" if len(cells) == 1 else f"{len(cells)} columns"
        raise ValueError(
            f"{file.name} line {line_number} has {column_count}, column {max(indices) + 1} is wanted "
            f"({separators} stand between columns): {_preview(separator.join(cells))}"
        ) from None


def _lines_with_ends(file: TextFile) -> Iterator[str]:
    """Lines with their endings, which within quotes belong to the cell."""
    for block in file.blocks():
        lines = block.split("\n")
        last = lines.pop()
        for line in lines:
            yield line + "\n"
        if last:
            yield last


def _extract_records(
    objects: Iterable[tuple[int, Any]], file: TextFile, columns: Columns | None, fields: tuple[str, ...]
) -> NumberedRecords:
    names: tuple[str, ...] = ()
    for line_number, row in objects:
        locate = partial(_location, file, line_number)
        if type(row) is not dict:
            example = json.dumps(dict.fromkeys(fields, "…"), ensure_ascii=False)
            raise ValueError(f"{locate()} is JSON, but not an object such as {example}")
        if not names:
            names = keys(list(dict.fromkeys([*row, *nested_names(row)])), columns, fields, locate())
        yield line_number, extract(row, names, locate)


def _location(file: TextFile, line_number: int) -> str:
    return f"{file.name} line {line_number}"


def _jsonl_objects(file: TextFile) -> Iterator[tuple[int, Any]]:
    for line_number, line in enumerate(file.lines(), 1):
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{file.name} line {line_number} is not JSON ({error}): {_preview(line)}"
            ) from error
        if "\\ud" in line or "\\uD" in line:
            _check_surrogates(row, _location(file, line_number))
        yield line_number, row


def _json_list_items(file: TextFile) -> Iterator[tuple[int, Any]]:
    """The items of one list, each with the line it begins in, parsed block by block."""
    blocks, decode = file.blocks(allow_partial_lines=True), json.JSONDecoder().raw_decode
    text = next(blocks)
    position = 0
    line = 1
    whitespace, expected = re.compile(r"\s*"), "["
    while True:
        end = whitespace.match(text, position).end()  # type: ignore[union-attr]
        line += text.count("\n", position, end)
        position = end
        if position == len(text):
            text, position = next(blocks, ""), 0
            if not text:
                raise ValueError(
                    f"{file.name} ends in the middle of its JSON list: copy or download it again"
                )
        elif text[position] == "]" and expected != "[":
            return
        elif expected:
            if text[position] != expected:
                preview = _preview(text[position : position + 60])
                raise ValueError(
                    f"{file.name} line {line} is not JSON: {expected!r} is expected before {preview}"
                )
            position, expected = position + 1, ""
        else:
            row, end, text, position = _decode_item(file, text, position, line, blocks, decode)
            if text.find("\\ud", position, end) >= 0 or text.find("\\uD", position, end) >= 0:
                _check_surrogates(row, _location(file, line))
            yield line, row
            line += text.count("\n", position, end)
            position, expected = end, ","


def _decode_item(
    file: TextFile,
    text: str,
    position: int,
    line: int,
    blocks: Iterator[str],
    decode: Callable[[str, int], tuple[Any, int]],
) -> tuple[Any, int, str, int]:
    """One value, its end, the text it lies in and where it begins in that.

    More blocks are appended until it is complete, twice as many each time.
    """
    while True:
        try:
            row, end = decode(text, position)
            return row, end, text, position
        except (ValueError, RecursionError) as error:
            more_blocks = list(islice(blocks, 1 + (len(text) - position) // (1 << 16)))
            if not more_blocks or len(text) - position > MAX_CELL_CHARACTERS:
                preview = _preview(text[position : position + 60])
                raise ValueError(f"{file.name} line {line} is not JSON ({error}): {preview}") from error
            text, position = "".join([text[position:], *more_blocks]), 0


def _check_surrogates(row: Any, location: str) -> None:
    """Refuse half of a surrogate pair, which JSON can escape but UTF-8 cannot encode."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{location} holds half a character (a lone \\u{ord(error.object[error.start]):x}): "
            "write the text anew"
        ) from error


def _preview(line: str) -> str:
    return repr(line if len(line) <= 60 else line[:60] + "…")
