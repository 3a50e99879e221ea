"""Record sources: iterables of string tuples that can be read again and again."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from keepleft.data.text_file import TextFile

Record = tuple[str, ...]
StrPath = str | os.PathLike[str]


class RecordSource(ABC):
    """Each iteration reads the files anew, in order, with little of them in memory."""

    fields: tuple[str, ...]  # names of a record's strings: ("text",), ("src", "tgt"), ("text", "label")
    name: str  # for messages: "a.en + a.fr", "data.tsv"
    size: int | None  # bytes on disk, as compressed there; None where that is not known

    @property
    def is_running_text(self) -> bool:
        """Whether the records are consecutive pieces of running text."""
        return False

    @abstractmethod
    def __iter__(self) -> Iterator[Record]: ...

    @abstractmethod
    def location(self, n: int) -> str:
        """Where record n, counted from 0, is found: "data.tsv line 18"."""


@dataclass(frozen=True)
class FileSource(RecordSource):
    """The records of one file."""

    file: TextFile

    @property
    def name(self) -> str:  # type: ignore[override]
        return basename(self.file.name)

    @property
    def size(self) -> int | None:  # type: ignore[override]
        return self.file.size


@dataclass(frozen=True)
class ConcatSource(RecordSource):
    """Sources with the same fields, one after the other."""

    sources: tuple[RecordSource, ...]

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.sources[0].fields

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.sources[0].name} and {len(self.sources) - 1} more"

    @property
    def size(self) -> int | None:  # type: ignore[override]
        return total(source.size for source in self.sources)

    @property
    def is_running_text(self) -> bool:
        return all(source.is_running_text for source in self.sources)

    def __iter__(self) -> Iterator[Record]:
        return chain.from_iterable(self.sources)

    def location(self, n: int) -> str:
        for source in self.sources[:-1]:
            count = sum(1 for _ in islice(source, n + 1))
            if count > n:
                return source.location(n)
            n -= count
        return self.sources[-1].location(n)


def open_each(
    paths: StrPath | Sequence[StrPath], open_one: Callable[[StrPath], RecordSource]
) -> RecordSource:
    """The source of one path, or of several, concatenated."""
    if isinstance(paths, str | os.PathLike):
        return open_one(paths)
    return concat([open_one(path) for path in paths])


def concat(sources: Sequence[RecordSource]) -> RecordSource:
    if not sources:
        raise ValueError("the list of files is empty: name at least one")
    return sources[0] if len(sources) == 1 else ConcatSource(tuple(sources))


def total(sizes: Iterable[int | None]) -> int | None:
    """The sum; None if any size is unknown."""
    known_sizes = []
    for size in sizes:
        if size is None:
            return None
        known_sizes.append(size)
    return sum(known_sizes)


def basename(name: str) -> str:
    """The last part of a path."""
    return Path(name).name or name
