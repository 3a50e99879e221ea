"""Token store: for each field one array of all tokens, memory-mapped, and where each record ends."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from keepleft.data.ragged import IntArray, Ragged, ranges
from keepleft.disk import atomic
from keepleft.disk.atomic import explain_os_error

METADATA_FILE = "store.json"
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype(np.uint16), "uint32": np.dtype(np.uint32)}


class Column:
    """One field of all records: its tokens, and the end of each record in them."""

    def __init__(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        self.tokens = tokens
        self.ends = ends

    def take(self, rows: IntArray) -> Ragged:
        """A copy of these records."""
        ends = self.ends[rows].astype(np.int64)
        starts = np.where(rows > 0, self.ends[np.maximum(rows - 1, 0)], 0).astype(np.int64)
        lengths = ends - starts
        return Ragged(self.tokens[ranges(starts, lengths)].astype(np.int64), lengths)

    def lengths(self) -> IntArray:
        return np.diff(self.ends, prepend=0).astype(np.int64)


class ColumnSubset(Column):
    """A selection of a column's rows, as a column.

    `tokens` are still those of all rows, and only the length of `ends` has a meaning.
    """

    def __init__(self, column: Column, rows: IntArray) -> None:
        self.column = column
        self.rows = rows
        super().__init__(column.tokens, rows)

    def take(self, rows: IntArray) -> Ragged:
        return self.column.take(self.rows[rows])

    def lengths(self) -> IntArray:
        return self.column.lengths()[self.rows]


class TokenStore:
    """All records of a dataset, field by field; memory-mapped when opened from disk."""

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
    def from_lists(cls, **fields: list[list[int]]) -> TokenStore:
        """A small store in memory."""
        return cls(
            {
                name: Column(
                    np.array([t for sequence in sequences for t in sequence], np.int64),
                    np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64),
                )
                for name, sequences in fields.items()
            }
        )

    def split_random(self, n: int, seed: int = 0) -> tuple[TokenStore, TokenStore]:
        """All records but n drawn at random, and those n: training and validation set."""
        held_out = np.zeros(len(self), bool)
        held_out[np.random.Generator(np.random.Philox([seed, 0x68656C64])).permutation(len(self))[:n]] = True
        parts = [
            {name: ColumnSubset(column, np.flatnonzero(rows)) for name, column in self.columns.items()}
            for rows in (~held_out, held_out)
        ]
        return TokenStore(parts[0]), TokenStore(parts[1])

    def split_tail(self, fraction: float) -> tuple[TokenStore, TokenStore]:
        """Running text split at the tail: the last `fraction` of the tokens is held out.

        Record boundaries are dropped.
        """
        head_columns, tail_columns = {}, {}
        for name, column in self.columns.items():
            split_index = round(len(column.tokens) * (1.0 - fraction))
            head_columns[name], tail_columns[name] = (
                Column(part, np.array([len(part)])) for part in np.split(column.tokens, [split_index])
            )
        return TokenStore(head_columns), TokenStore(tail_columns)

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Map a store from disk; an incomplete one is a ValueError."""
        try:
            metadata = json.loads((folder / METADATA_FILE).read_text("utf-8"))
            fields = {
                name: (int(entry["tokens"]), int(entry["records"]), DTYPES[entry["type"]])
                for name, entry in metadata["fields"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder} is not a complete token store ({error}): remove it, and it is made again"
            ) from error
        return cls(
            {
                name: Column(
                    _memmap(folder / f"{name}.tokens", dtype, tokens),
                    _memmap(folder / f"{name}.ends", np.dtype(np.int64), records),
                )
                for name, (tokens, records, dtype) in fields.items()
            }
        )


class StoreWriter:
    """Appends records to the files of a store, in constant memory."""

    def __init__(self, files: dict[str, tuple[BinaryIO, BinaryIO]], dtype: np.dtype) -> None:
        self.files = files
        self.dtype = dtype
        self.token_counts = dict.fromkeys(files, 0)
        self.record_counts = dict.fromkeys(files, 0)

    def add(self, field: str, rows: Sequence[bytes]) -> None:
        """Append records of one field, each the bytes of its tokens in the store's dtype."""
        if not rows:
            return
        ends = self.token_counts[field] + np.cumsum(
            np.fromiter(map(len, rows), np.int64, len(rows)) // self.dtype.itemsize
        )
        tokens_file, ends_file = self.files[field]
        tokens_file.write(b"".join(rows))
        ends_file.write(ends.tobytes())
        self.token_counts[field] = int(ends[-1])
        self.record_counts[field] += len(ends)


@contextmanager
def store_writer(folder: Path, fields: Iterable[str], *, vocab: int) -> Iterator[StoreWriter]:
    """Write a new store; the folder appears when it is complete."""
    dtype = token_dtype(vocab)
    with explain_os_error(f"the token store {folder}"), atomic.atomic_folder(folder) as temp_folder:
        with ExitStack() as open_files:
            writer = StoreWriter(
                {
                    name: (
                        open_files.enter_context((temp_folder / f"{name}.tokens").open("wb")),
                        open_files.enter_context((temp_folder / f"{name}.ends").open("wb")),
                    )
                    for name in fields
                },
                dtype,
            )
            yield writer
        entries = {
            name: {
                "tokens": writer.token_counts[name],
                "records": writer.record_counts[name],
                "type": dtype.name,
            }
            for name in writer.files
        }
        (temp_folder / METADATA_FILE).write_text(json.dumps({"fields": entries}, indent=2) + "\n", "utf-8")


def token_dtype(vocab: int) -> np.dtype:
    """The smallest integer type that holds every token of a vocabulary."""
    return np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)


def _memmap(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not path.exists() or path.stat().st_size != count * dtype.itemsize:
        raise ValueError(
            f"{path} does not hold the {count} numbers that {METADATA_FILE} promises: remove {path.parent}, "
            "and it is made again"
        )
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)
