"""A file becomes text: found, unpacked, decoded, block by block."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import IO

BLOCK = 1 << 16  # bytes read at a time
BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"
PACKED = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"PAR1": "Parquet"}


@dataclass(frozen=True)
class File:
    """One file of UTF-8 text, gzipped or not, that can be read again and again."""

    path: Path
    name: str         # as it was given: what messages call it
    size: int | None  # bytes on disk; None for what came through a pipe

    def blocks(self, *, loose: bool = False) -> Iterator[str]:
        """The text in pieces of about 64 KiB that end with a line, or where `loose`, at least between two characters.

        Joined they are the file, but for a byte order mark. A file without text is an error, once it is read.
        """
        blank, line, offset = True, 1, 0  # of the first byte of the next piece
        for data in _pieces(self._bytes(), loose):
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                line += data.count(b"\n", 0, error.start)
                raise ValueError(self._undecodable(data, line, offset, error)) from error
            if offset == 0 and data.startswith(BOM):
                text = text[1:]
            line += data.count(b"\n")
            offset += len(data)
            if text:
                blank = blank and text.isspace()
                yield text
        if blank:
            raise ValueError(f"{self.name} holds no text: it is {'empty' if offset == 0 else 'all white space'}")

    def lists(self) -> Iterator[list[str]]:
        """The lines of each block, without their ends."""
        return map(_split, self.blocks())

    def lines(self) -> Iterator[str]:
        """Line by line; a line ends with a line feed, or carriage return and line feed, and with nothing else."""
        return chain.from_iterable(self.lists())

    def _bytes(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            packed = file.read(2) == GZIP
            file.seek(0)
            stream: IO[bytes] = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
            done = 0
            try:
                while data := stream.read(BLOCK):
                    done += len(data)
                    yield data
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{self.name} is broken gzip, {done:,} bytes of text into it ({error}): "
                                 "copy or download it again") from error

    def _undecodable(self, data: bytes, line: int, offset: int, error: UnicodeDecodeError) -> str:
        for magic, kind in PACKED.items():
            if offset == 0 and data.startswith(magic):
                return f"{self.name} is a {kind} file, not text: unpack it, or end its name as such files do"
        encoding = "utf16" if offset == 0 and data.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
        with open(self.path, "rb") as file:
            packed = file.read(2) == GZIP
        command = f"zcat {self.name} | iconv -f {encoding} -t utf8" if packed else f"iconv -f {encoding} -t utf8 {self.name}"
        return (f"{self.name} line {line} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start:,}"
                f"{' of the unpacked text' if packed else ''} ({error.reason}). "
                f"If it is {encoding}, convert it: {command} > NEW")


def found(given: str | os.PathLike[str]) -> File:
    """The file of that name. "-" is stdin; it and other pipes are copied to a temporary file, for they flow only once."""
    if str(given) == "-":
        return _spooled(getattr(sys.stdin, "buffer", None), "stdin")
    path = Path(given).expanduser()
    if path.is_file():
        return File(path, str(given), path.stat().st_size)
    if path.is_dir():
        inside = sorted(entry.name for entry in islice(path.iterdir(), 1000))
        holds = f"it holds {', '.join(inside[:5])}{', …' if len(inside) > 5 else ''}" if inside else "it is empty"
        raise IsADirectoryError(f"{given} is a directory: name the files in it ({holds})")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {given}{_suggestion(path)}")
    with open(path, "rb") as pipe:
        return _spooled(pipe, str(given))


def _suggestion(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no folder {path.parent}"
    names = [entry.name for entry in islice(path.parent.iterdir(), 10_000)]
    if path.name + ".gz" in names:
        return f": did you mean {path.with_name(path.name + '.gz')}?"
    close = get_close_matches(path.name, sorted(names), n=1)
    return f": did you mean {path.with_name(close[0])}?" if close else ""


def _spooled(pipe: IO[bytes] | None, name: str) -> File:
    number, path = tempfile.mkstemp(prefix="keepleft-")
    with open(number, "wb") as file:
        if pipe is not None:
            shutil.copyfileobj(pipe, file, BLOCK)
        elif sys.stdin is not None:
            file.write(sys.stdin.read().encode())  # a stand-in for stdin that knows only text
    spooled = File(Path(path), name, None)
    weakref.finalize(spooled, Path(path).unlink, missing_ok=True)
    return spooled


def _pieces(stream: Iterator[bytes], loose: bool) -> Iterator[bytes]:
    """Cut again so that no character, and unless `loose` no line, is torn."""
    begun: list[bytes] = []
    for data in stream:
        cut = data.rfind(b"\n") + 1
        if not cut and loose:
            cut = data.rfind(b" ") + 1 or _boundary(data)
        if not cut:
            begun.append(data)
            continue
        yield b"".join([*begun, data[:cut]])
        begun = [data[cut:]] if cut < len(data) else []
    if begun:
        yield b"".join(begun)


def _boundary(data: bytes) -> int:
    """Before the last character, which may lack its last bytes."""
    cut = len(data) - 1
    while cut > len(data) - 4 and cut > 0 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return max(cut, 0)


def _split(text: str) -> list[str]:
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines
