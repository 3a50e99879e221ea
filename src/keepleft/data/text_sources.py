"""Records of plain text files: lines, documents, running text, parallel text."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from keepleft.data.records import (
    FileSource,
    Record,
    RecordSource,
    StrPath,
    basename,
    concat,
    open_each,
    total,
)
from keepleft.data.text_file import TextFile, open_text

TEXT_FIELDS = ("text",)


@dataclass(frozen=True)
class TextSource(FileSource):
    """One text file."""

    fields: tuple[str, ...] = TEXT_FIELDS


class LineSource(TextSource):
    """A record is a line, blank ones included."""

    def __iter__(self) -> Iterator[Record]:
        return zip(self.file.lines(), strict=False)  # tuples of one string

    def location(self, n: int) -> str:
        return f"{self.file.name} line {n + 1}"


@dataclass(frozen=True)
class DocumentSource(TextSource):
    """A record is a document, line breaks included; lines that hold only the separator end it."""

    separator: str = ""

    def __iter__(self) -> Iterator[Record]:
        return ((document,) for _, document in self._numbered_documents())

    def location(self, n: int) -> str:
        line = next(islice((line for line, _ in self._numbered_documents()), n, None), 0)
        return f"{self.file.name} line {line}"

    def _numbered_documents(self) -> Iterator[tuple[int, str]]:
        """Each document with the number of its first line."""
        pending: list[str] = []
        line_number = 0
        for line_number, line in enumerate(self.file.lines(), 1):
            if line.strip() != self.separator:
                pending.append(line)
            elif pending:
                yield from self._document(line_number - len(pending), pending)
                pending = []
        if pending:
            yield from self._document(line_number + 1 - len(pending), pending)

    @staticmethod
    def _document(line_number: int, lines: list[str]) -> Iterator[tuple[int, str]]:
        document = "\n".join(lines)
        if document and not document.isspace():
            yield line_number, document


class RunningTextSource(TextSource):
    """Running text in blocks of about 64 KiB, which end with a line unless a line is longer than that."""

    @property
    def is_running_text(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Record]:
        return zip(self.file.blocks(allow_partial_lines=True), strict=False)

    def location(self, n: int) -> str:
        line_breaks = sum(
            piece.count("\n") for piece in islice(self.file.blocks(allow_partial_lines=True), n)
        )
        return f"{self.file.name} line {line_breaks + 1}"


@dataclass(frozen=True)
class ParallelTextSource(RecordSource):
    """Two line-aligned files: line n of one is the translation of line n of the other."""

    src: TextFile
    tgt: TextFile
    fields: tuple[str, ...] = ("src", "tgt")

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{basename(self.src.name)} + {basename(self.tgt.name)}"

    @property
    def size(self) -> int | None:  # type: ignore[override]
        return total((self.src.size, self.tgt.size))

    def __iter__(self) -> Iterator[Record]:
        src, tgt = _CountedLines(self.src), _CountedLines(self.tgt)
        yield from zip(src.lines, tgt.lines, strict=False)
        for side in (src, tgt):
            deque(side.lines, maxlen=0)  # read the rest, to count it
        if src.count == tgt.count:
            return
        longer = self.src if src.count > tgt.count else self.tgt
        raise ValueError(
            f"{self.src.name} has {src.count:,} lines, {self.tgt.name} has {tgt.count:,}: they must have as "
            f"many. The first line without a partner is {longer.name} line "
            f"{min(src.count, tgt.count) + 1}; the files may be out of step long before it"
        )

    def location(self, n: int) -> str:
        return f"{self.src.name} line {n + 1} and {self.tgt.name} line {n + 1}"


class _CountedLines:
    """Lines, and at their end how many there were."""

    def __init__(self, file: TextFile) -> None:
        self.count = 0
        self.lines = chain.from_iterable(self._count_blocks(file))

    def _count_blocks(self, file: TextFile) -> Iterator[list[str]]:
        for lines in file.line_blocks():
            self.count += len(lines)
            yield lines


def lines(paths: StrPath | Sequence[StrPath]) -> RecordSource:
    """A record for each line of the text files."""
    return open_each(paths, lambda path: LineSource(open_text(path)))


def documents(paths: StrPath | Sequence[StrPath], *, separator: str = "\n\n") -> RecordSource:
    """A record for each document; lines that hold only the separator, by default blank ones, end it."""
    return open_each(paths, lambda path: DocumentSource(open_text(path), separator=separator.strip()))


def running_text(paths: StrPath | Sequence[StrPath]) -> RecordSource:
    """Running text: the records, joined, are the files character by character, carriage returns included."""
    return open_each(paths, lambda path: RunningTextSource(open_text(path)))


def parallel_text(src: StrPath | Sequence[StrPath], tgt: StrPath | Sequence[StrPath]) -> RecordSource:
    """A pair of strings for each line of two aligned text files, or of two lists of files, pair by pair."""
    src_paths, tgt_paths = (
        [side] if isinstance(side, str | os.PathLike) else list(side) for side in (src, tgt)
    )
    if len(src_paths) != len(tgt_paths):
        raise ValueError(
            f"{len(src_paths)} source files, but {len(tgt_paths)} target files: they are aligned one to one"
        )
    if [*src_paths, *tgt_paths].count("-") > 1:
        raise ValueError(
            "stdin cannot be both files of a pair: give one by its name, or give pairs separated by tabs"
        )
    return concat(
        [ParallelTextSource(open_text(a), open_text(b)) for a, b in zip(src_paths, tgt_paths, strict=True)]
    )
