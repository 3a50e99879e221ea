"""Records of plain text files: lines, documents, running text, pairs of lines."""

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
    """A record is a line, blank ones too."""

    def __iter__(self) -> Iterator[Record]:
        return zip(self.file.lines(), strict=False)  # of one iterator: tuples of one string

    def location(self, n: int) -> str:
        return f"{self.file.name} line {n + 1}"


@dataclass(frozen=True)
class DocumentSource(TextSource):
    """A record is what stands between lines that hold only the separator, its own line breaks kept."""

    separator: str = ""

    def __iter__(self) -> Iterator[Record]:
        return ((document,) for _, document in self._numbered_documents())

    def location(self, n: int) -> str:
        line = next(islice((line for line, _ in self._numbered_documents()), n, None), 0)
        return f"{self.file.name} line {line}"

    def _numbered_documents(self) -> Iterator[tuple[int, str]]:
        """Each document with its first line's number."""
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
    """The running text itself, in pieces of about 64 KiB that end with a line where lines are not longer than
    that.
    """

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
    """Two files of which line n of the one goes with line n of the other."""

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
            deque(side.lines, maxlen=0)  # to its end, so that it is counted
        if src.count == tgt.count:
            return
        longer = self.src if src.count > tgt.count else self.tgt
        raise ValueError(
            f"{self.src.name} has {src.count:,} lines, {self.tgt.name} has {tgt.count:,}: they must have as many. "
            f"The first line without a partner is {longer.name} line {min(src.count, tgt.count) + 1}; "
            "the files may be out of step long before it"
        )

    def location(self, n: int) -> str:
        return f"{self.src.name} line {n + 1} and {self.tgt.name} line {n + 1}"


class _CountedLines:
    """Lines that know, at their end, how many they were."""

    def __init__(self, file: TextFile) -> None:
        self.count = 0
        self.lines = chain.from_iterable(self._count_blocks(file))

    def _count_blocks(self, file: TextFile) -> Iterator[list[str]]:
        for lines in file.line_blocks():
            self.count += len(lines)
            yield lines


def lines(paths: StrPath | Sequence[StrPath]) -> RecordSource:
    """A text file, a record for each line."""
    return open_each(paths, lambda path: LineSource(open_text(path)))


def documents(paths: StrPath | Sequence[StrPath], *, separator: str = "\n\n") -> RecordSource:
    """A text file, a record for each document; between them stand lines that hold only the separator: blank
    ones.
    """
    return open_each(paths, lambda path: DocumentSource(open_text(path), separator=separator.strip()))


def running_text(paths: StrPath | Sequence[StrPath]) -> RecordSource:
    """A text file as it runs: the records, joined, are the file to the letter, carriage returns included."""
    return open_each(paths, lambda path: RunningTextSource(open_text(path)))


def parallel_text(src: StrPath | Sequence[StrPath], tgt: StrPath | Sequence[StrPath]) -> RecordSource:
    """Two line-aligned text files, a pair of strings for each line; or two lists, the first file with the
    first.
    """
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
