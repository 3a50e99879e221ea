"""Records of plain text files: lines, documents, running text, pairs of lines."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from keepleft.data.reading import File, found
from keepleft.data.records import Filed, Given, Record, Source, each, joined, short, total

TEXT = ("text",)


@dataclass(frozen=True)
class Text(Filed):
    """One text file."""

    fields: tuple[str, ...] = TEXT


class Lines(Text):
    """A record is a line, blank ones too."""

    def __iter__(self) -> Iterator[Record]:
        return zip(self.file.lines(), strict=False)  # of one iterator: tuples of one string

    def where(self, n: int) -> str:
        return f"{self.file.name} line {n + 1}"


@dataclass(frozen=True)
class Documents(Text):
    """A record is what stands between lines that hold only the separator, its own line breaks kept."""

    separator: str = ""

    def __iter__(self) -> Iterator[Record]:
        return ((document,) for _, document in self._numbered())

    def where(self, n: int) -> str:
        line = next(islice((line for line, _ in self._numbered()), n, None), 0)
        return f"{self.file.name} line {line}"

    def _numbered(self) -> Iterator[tuple[int, str]]:
        """Each document with its first line's number."""
        found: list[str] = []
        number = 0
        for number, line in enumerate(self.file.lines(), 1):
            if line.strip() != self.separator:
                found.append(line)
            elif found:
                yield from self._document(number - len(found), found)
                found = []
        if found:
            yield from self._document(number + 1 - len(found), found)

    @staticmethod
    def _document(number: int, lines: list[str]) -> Iterator[tuple[int, str]]:
        document = "\n".join(lines)
        if document and not document.isspace():
            yield number, document


class Whole(Text):
    """The running text itself, in pieces of about 64 KiB that end with a line where lines are not longer than that."""

    @property
    def running(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Record]:
        return zip(self.file.blocks(loose=True), strict=False)

    def where(self, n: int) -> str:
        before = sum(piece.count("\n") for piece in islice(self.file.blocks(loose=True), n))
        return f"{self.file.name} line {before + 1}"


@dataclass(frozen=True)
class Aligned(Source):
    """Two files of which line n of the one goes with line n of the other."""

    src: File
    tgt: File
    fields: tuple[str, ...] = ("src", "tgt")

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{short(self.src.name)} + {short(self.tgt.name)}"

    @property
    def size(self) -> int | None:  # type: ignore[override]
        return total((self.src.size, self.tgt.size))

    def __iter__(self) -> Iterator[Record]:
        src, tgt = _Counted(self.src), _Counted(self.tgt)
        yield from zip(src.lines, tgt.lines, strict=False)
        for side in (src, tgt):
            deque(side.lines, maxlen=0)  # to its end, so that it is counted
        if src.count == tgt.count:
            return
        longer = self.src if src.count > tgt.count else self.tgt
        raise ValueError(f"{self.src.name} has {src.count:,} lines, {self.tgt.name} has {tgt.count:,}: they must have as many. "
                         f"The first line without a partner is {longer.name} line {min(src.count, tgt.count) + 1}; "
                         "the files may be out of step long before it")

    def where(self, n: int) -> str:
        return f"{self.src.name} line {n + 1} and {self.tgt.name} line {n + 1}"


class _Counted:
    """Lines that know, at their end, how many they were."""

    def __init__(self, file: File) -> None:
        self.count = 0
        self.lines = chain.from_iterable(self._lists(file))

    def _lists(self, file: File) -> Iterator[list[str]]:
        for lines in file.lists():
            self.count += len(lines)
            yield lines


def lines(place: Given | Sequence[Given]) -> Source:
    """A text file, a record for each line."""
    return each(place, lambda one: Lines(found(one)))


def documents(place: Given | Sequence[Given], *, separator: str = "\n\n") -> Source:
    """A text file, a record for each document; between them stand lines that hold only the separator: blank ones."""
    return each(place, lambda one: Documents(found(one), separator=separator.strip()))


def whole(place: Given | Sequence[Given]) -> Source:
    """A text file as it runs: the records, joined, are the file to the letter, carriage returns included."""
    return each(place, lambda one: Whole(found(one)))


def aligned(src: Given | Sequence[Given], tgt: Given | Sequence[Given]) -> Source:
    """Two line-aligned text files, a pair of strings for each line; or two lists, the first file with the first."""
    left, right = ([side] if isinstance(side, str | os.PathLike) else list(side) for side in (src, tgt))
    if len(left) != len(right):
        raise ValueError(f"{len(left)} source files, but {len(right)} target files: they are aligned one to one")
    if [*left, *right].count("-") > 1:
        raise ValueError("stdin cannot be both files of a pair: give one by its name, or give pairs separated by tabs")
    return joined([Aligned(found(a), found(b)) for a, b in zip(left, right, strict=True)])
