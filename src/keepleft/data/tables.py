"""Records of tables written as text: tab-separated, comma-separated, JSON."""

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

from keepleft.data.columns import Columns, header, keys, paths, picker, taken
from keepleft.data.reading import File
from keepleft.data.records import Filed, Record

LONGEST = 1 << 24  # characters of one cell, or one JSON value, before a quote or bracket must have been left open

Numbered = Iterator[tuple[int, Record]]
Reader = Callable[[File, Columns | None, tuple[str, ...]], Numbered]


@dataclass(frozen=True)
class Table(Filed):
    """One file of rows; a record is the columns asked for of one row."""

    reader: Reader
    columns: tuple[str | int, ...] | None
    fields: tuple[str, ...]

    def __iter__(self) -> Iterator[Record]:
        rows = self._numbered()
        first = next(rows, None)
        if first is None:
            raise ValueError(f"{self.file.name} holds no text: it has no rows")
        yield first[1]
        yield from map(itemgetter(1), rows)

    def where(self, n: int) -> str:
        line, _ = next(islice(self._numbered(), n, None), (0, ()))
        return f"{self.file.name} line {line}"

    def _numbered(self) -> Numbered:
        """Each record with the number of the line it begins in."""
        return self.reader(self.file, self.columns, self.fields)


def tsv(file: File, columns: Columns | None, fields: tuple[str, ...]) -> Numbered:
    """A row a line, a tab between cells, no quoting; empty lines are no rows where more than the first cell is wanted."""
    numbered = enumerate(file.lines(), 1)
    number, line = next(numbered)
    spots, named = header(line.split("\t"), columns, fields, f"{file.name} line 1")
    pick, sparse = picker(spots), max(spots) > 0
    if not named and (line or not sparse):
        yield number, _cells(pick, line.split("\t"), spots, file, number, "\t")
    for number, line in numbered:
        try:
            yield number, pick(line.split("\t"))
        except IndexError:
            if line:
                _cells(pick, line.split("\t"), spots, file, number, "\t")


def comma(file: File, columns: Columns | None, fields: tuple[str, ...]) -> Numbered:
    """Commas between cells, double quotes around those that hold commas, quotes or line breaks; empty lines are no rows."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST))  # the module's own, 128 KiB, is less than a long article
    rows = csv.reader(_ended(file), strict=True)
    spots: tuple[int, ...] = ()
    pick, begin = None, 1
    try:
        for cells in rows:
            if pick is None and cells:
                spots, named = header(cells, columns, fields, f"{file.name} line {begin}")
                pick = picker(spots)
                if named:
                    cells = []
            if cells and pick:
                yield begin, _cells(pick, cells, spots, file, begin, ",")
            begin = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{file.name} line {begin} is not CSV: {error}. Cells that hold quotes are written "
                         '"in ""quotes"", doubled", and every quote is closed') from error


def jsons(file: File, columns: Columns | None, fields: tuple[str, ...]) -> Numbered:
    """A JSON object a line."""
    return _picked(_objects(file), file, columns, fields)


def json_or_jsons(file: File, columns: Columns | None, fields: tuple[str, ...]) -> Numbered:
    """One JSON list of objects, or an object a line."""
    start = next(file.blocks(loose=True), "").lstrip()
    return _picked(_listed(file) if start.startswith("[") else _objects(file), file, columns, fields)


READERS: dict[str, Reader] = {
    ".tsv": tsv, ".tab": tsv, ".csv": comma, ".jsonl": jsons, ".ndjson": jsons, ".json": json_or_jsons,
}


def _cells(pick: Callable[[list[str]], Record], cells: list[str], spots: tuple[int, ...], file: File, number: int,
           separator: str) -> Record:
    try:
        return pick(cells)
    except IndexError:
        separators = {",": "commas", "\t": "tabs"}[separator]
        has = "1 column" if len(cells) == 1 else f"{len(cells)} columns"
        raise ValueError(f"{file.name} line {number} has {has}, column {max(spots) + 1} is wanted ({separators} stand between "
                         f"columns): {_start(separator.join(cells))}") from None


def _ended(file: File) -> Iterator[str]:
    """Lines with their ends, which within quotes belong to the cell."""
    for block in file.blocks():
        lines = block.split("\n")
        last = lines.pop()
        for line in lines:
            yield line + "\n"
        if last:
            yield last


def _picked(objects: Iterable[tuple[int, Any]], file: File, columns: Columns | None, fields: tuple[str, ...]) -> Numbered:
    names: tuple[str, ...] = ()
    for number, row in objects:
        spot = partial(_spot, file, number)
        if type(row) is not dict:
            example = json.dumps(dict.fromkeys(fields, "…"), ensure_ascii=False)
            raise ValueError(f"{spot()} is JSON, but not an object such as {example}")
        if not names:
            names = keys(list(dict.fromkeys([*row, *paths(row)])), columns, fields, spot())
        yield number, taken(row, names, spot)


def _spot(file: File, number: int) -> str:
    return f"{file.name} line {number}"


def _objects(file: File) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file.lines(), 1):
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file.name} line {number} is not JSON ({error}): {_start(line)}") from error
        if "\\ud" in line or "\\uD" in line:
            _paired(row, _spot(file, number))
        yield number, row


def _listed(file: File) -> Iterator[tuple[int, Any]]:
    """The members of one list, each with the line it begins in, without the whole file in memory."""
    blocks, decode = file.blocks(loose=True), json.JSONDecoder().raw_decode
    text, at, line = next(blocks), 0, 1
    between, due = re.compile(r"\s*"), "["
    while True:
        end = between.match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", at, end)
        at = end
        if at == len(text):
            text, at = next(blocks, ""), 0
            if not text:
                raise ValueError(f"{file.name} ends in the middle of its JSON list: copy or download it again")
        elif text[at] == "]" and due != "[":
            return
        elif due:
            if text[at] != due:
                raise ValueError(f"{file.name} line {line} is not JSON: {due!r} is expected before {_start(text[at:at + 60])}")
            at, due = at + 1, ""
        else:
            row, end, text, at = _member(file, text, at, line, blocks, decode)
            if text.find("\\ud", at, end) >= 0 or text.find("\\uD", at, end) >= 0:
                _paired(row, _spot(file, line))
            yield line, row
            line += text.count("\n", at, end)
            at, due = end, ","


def _member(file: File, text: str, at: int, line: int, blocks: Iterator[str],
            decode: Callable[[str, int], tuple[Any, int]]) -> tuple[Any, int, str, int]:
    """One value, its end, the text it lies in and where it begins; as many more blocks as it takes, twice as many each time."""
    while True:
        try:
            row, end = decode(text, at)
            return row, end, text, at
        except (ValueError, RecursionError) as error:
            more = list(islice(blocks, 1 + (len(text) - at) // (1 << 16)))
            if not more or len(text) - at > LONGEST:
                raise ValueError(f"{file.name} line {line} is not JSON ({error}): {_start(text[at:at + 60])}") from error
            text, at = "".join([text[at:], *more]), 0


def _paired(row: Any, spot: str) -> None:
    """Half of a surrogate pair, which JSON can escape, is no character."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{spot} holds half a character (a lone \\u{ord(error.object[error.start]):x}): "
                         "write the text anew") from error


def _start(line: str) -> str:
    return repr(line if len(line) <= 60 else line[:60] + "…")
