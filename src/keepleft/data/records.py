"""A source: records of strings, read again and again."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from keepleft.data.reading import File

Record = tuple[str, ...]
Given = str | os.PathLike[str]


class Source(ABC):
    """What is iterated anew for every pass; a pass goes through the files in order and holds little of them in memory."""

    fields: tuple[str, ...]  # what a record's strings are: ("text",), ("src", "tgt"), ("text", "label")
    name: str                # for messages: "a.en + a.fr", "data.tsv"
    size: int | None         # bytes on disk, packed ones as they lie there; None where that is not known

    @property
    def running(self) -> bool:
        """Is it running text, of which a record is just the next piece?"""
        return False

    @abstractmethod
    def __iter__(self) -> Iterator[Record]: ...

    @abstractmethod
    def where(self, n: int) -> str:
        """Where record n, counted from 0, is to be found: "data.tsv line 18"."""


@dataclass(frozen=True)
class Filed(Source):
    """What one file holds; what is a record is for its kinds to say."""

    file: File

    @property
    def name(self) -> str:  # type: ignore[override]
        return short(self.file.name)

    @property
    def size(self) -> int | None:  # type: ignore[override]
        return self.file.size


@dataclass(frozen=True)
class Joined(Source):
    """Sources of the same fields, one after the other."""

    parts: tuple[Source, ...]

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.parts[0].fields

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.parts[0].name} and {len(self.parts) - 1} more"

    @property
    def size(self) -> int | None:  # type: ignore[override]
        return total(part.size for part in self.parts)

    @property
    def running(self) -> bool:
        return all(part.running for part in self.parts)

    def __iter__(self) -> Iterator[Record]:
        return chain.from_iterable(self.parts)

    def where(self, n: int) -> str:
        for part in self.parts[:-1]:
            count = sum(1 for _ in islice(part, n + 1))
            if count > n:
                return part.where(n)
            n -= count
        return self.parts[-1].where(n)


def each(given: Given | Sequence[Given], make: Callable[[Given], Source]) -> Source:
    """The source of one place, or of several, joined."""
    if isinstance(given, str | os.PathLike):
        return make(given)
    return joined([make(one) for one in given])


def joined(parts: Sequence[Source]) -> Source:
    if not parts:
        raise ValueError("the list of files is empty: name at least one")
    return parts[0] if len(parts) == 1 else Joined(tuple(parts))


def total(sizes: Iterable[int | None]) -> int | None:
    """Of all together; None if one is not known."""
    known = list(sizes)
    return None if None in known else sum(size for size in known if size is not None)


def short(name: str) -> str:
    """The last part of a path."""
    return Path(name).name or name
