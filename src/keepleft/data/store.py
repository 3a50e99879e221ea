"""Records of integers on disk or in memory: for each field one long array, and where each record ends."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from keepleft.data.ragged import Ragged, Whole, spread
from keepleft.disk import atomic
from keepleft.disk.atomic import explained

ABOUT = "store.json"
TYPES: dict[str, np.dtype] = {"uint16": np.dtype(np.uint16), "uint32": np.dtype(np.uint32)}


class Column:
    """One field of all records."""

    def __init__(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        self.tokens, self.ends = tokens, ends

    def take(self, rows: Whole) -> Ragged:
        """These records, copied out."""
        ends = self.ends[rows].astype(np.int64)
        begins = np.where(rows > 0, self.ends[np.maximum(rows - 1, 0)], 0).astype(np.int64)
        lengths = ends - begins
        return Ragged(self.tokens[spread(begins, lengths)].astype(np.int64), lengths)

    def lengths(self) -> Whole:
        return np.diff(self.ends, prepend=0).astype(np.int64)


class Chosen(Column):
    """Some rows of a column, as a column. Its tokens are those of all rows, and its ends mean nothing but their number."""

    def __init__(self, column: Column, rows: Whole) -> None:
        self.column, self.rows = column, rows
        super().__init__(column.tokens, rows)

    def take(self, rows: Whole) -> Ragged:
        return self.column.take(self.rows[rows])

    def lengths(self) -> Whole:
        return self.column.lengths()[self.rows]


class Store:
    """All records of one source, field by field. Opened from disk it is mapped, not read."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = dict(columns)
        counts = {name: len(column.ends) for name, column in self.columns.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"a store needs as many records in each field, not {counts}")
        self.count = next(iter(counts.values()))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, field: str) -> Column:
        return self.columns[field]

    @classmethod
    def of(cls, **fields: list[list[int]]) -> Store:
        """A small one in memory."""
        return cls({name: Column(np.array([t for text in texts for t in text], np.int64),
                                 np.cumsum([len(text) for text in texts], dtype=np.int64)) for name, texts in fields.items()})

    def held(self, n: int, seed: int = 0) -> tuple[Store, Store]:
        """All records but n drawn by chance, and these: what is trained on, and what is held out."""
        held = np.zeros(len(self), bool)
        held[np.random.Generator(np.random.Philox([seed, 0x68656C64])).permutation(len(self))[:n]] = True
        parts = [{name: Chosen(column, np.flatnonzero(rows)) for name, column in self.columns.items()}
                 for rows in (~held, held)]
        return Store(parts[0]), Store(parts[1])

    def cut(self, share: float) -> tuple[Store, Store]:
        """Running text in two: the last part, of this share of the tokens, is held out. Borders of records are forgotten."""
        first, last = {}, {}
        for name, column in self.columns.items():
            border = round(len(column.tokens) * (1.0 - share))
            first[name], last[name] = (Column(part, np.array([len(part)])) for part in np.split(column.tokens, [border]))
        return Store(first), Store(last)

    @classmethod
    def open(cls, folder: Path) -> Store:
        try:
            about = json.loads((folder / ABOUT).read_text("utf-8"))
            fields = {name: (int(entry["tokens"]), int(entry["records"]), TYPES[entry["type"]])
                      for name, entry in about["fields"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder} is not a whole token store ({error}): remove it, and it is made again") from error
        return cls({name: Column(_mapped(folder / f"{name}.tokens", kind, tokens), _mapped(folder / f"{name}.ends",
                    np.dtype(np.int64), records)) for name, (tokens, records, kind) in fields.items()})


class Writer:
    """Adds records, a piece at a time; memory stays flat."""

    def __init__(self, files: dict[str, tuple[BinaryIO, BinaryIO]], kind: np.dtype) -> None:
        self.files, self.kind = files, kind
        self.totals = dict.fromkeys(files, 0)
        self.records = dict.fromkeys(files, 0)

    def add(self, field: str, rows: Sequence[bytes]) -> None:
        """Many records of one field, each the bytes of integers of the store's type."""
        if not rows:
            return
        ends = self.totals[field] + np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)) // self.kind.itemsize)
        data, marks = self.files[field]
        data.write(b"".join(rows))
        marks.write(ends.tobytes())
        self.totals[field] = int(ends[-1])
        self.records[field] += len(ends)


@contextmanager
def writing(folder: Path, fields: Iterable[str], *, vocab: int) -> Iterator[Writer]:
    """Fill a new store; it appears under its name when it is complete."""
    kind = kind_of(vocab)
    with explained(f"the token store {folder}"), atomic.made(folder) as part:
        with ExitStack() as open_files:
            writer = Writer({name: (open_files.enter_context((part / f"{name}.tokens").open("wb")),
                                    open_files.enter_context((part / f"{name}.ends").open("wb"))) for name in fields}, kind)
            yield writer
        entries = {name: {"tokens": writer.totals[name], "records": writer.records[name], "type": kind.name}
                   for name in writer.files}
        (part / ABOUT).write_text(json.dumps({"fields": entries}, indent=2) + "\n", "utf-8")


def kind_of(vocab: int) -> np.dtype:
    """The smallest type of integer that has room for a vocabulary."""
    return np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)


def _mapped(path: Path, kind: np.dtype, count: int) -> np.ndarray:
    if not path.exists() or path.stat().st_size != count * kind.itemsize:
        raise ValueError(f"{path} does not hold the {count} numbers that {ABOUT} promises: remove {path.parent}, and it is "
                         "made again")
    return np.memmap(path, kind, "r", shape=(count,)) if count else np.empty(0, kind)
