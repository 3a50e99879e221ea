"""Reading text files: found, decompressed and decoded block by block."""

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
from itertools import chain, islice
from pathlib import Path
from typing import IO

from keepleft.disk.missing_file import missing_file_message
from keepleft.disk.regular_file import file_kind, open_regular_file

BLOCK_BYTES = 1 << 16  # bytes read at a time
MAX_LINE_BYTES = 1 << 26  # of a line that must be in memory as a whole
NUL_RUN = bytes(64)  # no text has so many in a row; a file system may leave them after a crash
OPEN_FILES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # of this process
BOM = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
BINARY_MAGIC = {
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
}


@dataclass(frozen=True)
class TextFile:
    """One file of UTF-8 text, gzipped or not, that can be read again and again."""

    path: Path
    name: str  # as given by the user, for messages
    size: int | None  # bytes on disk; None for a pipe

    def blocks(self, *, allow_partial_lines: bool = False) -> Iterator[str]:
        """Blocks of about 64 KiB that end with a line, or with `allow_partial_lines` with a character.

        Joined they are the file, but for a byte order mark. A file without text is an error at its end.
        """
        blank = True
        line = 1
        offset = 0  # of the next block, in bytes
        for data in _rechunk(self._read_bytes(), allow_partial_lines):
            if len(data) > MAX_LINE_BYTES and not allow_partial_lines:
                raise ValueError(
                    f"{self.name} line {line} is longer than {MAX_LINE_BYTES >> 20} MiB: put each text on a "
                    "line of its own, and look for a quote or bracket that was left open"
                )
            if (nul := data.find(NUL_RUN)) >= 0:
                line += data.count(b"\n", 0, nul)
                raise ValueError(
                    f"{self.name} line {line} holds a run of NUL bytes at offset "
                    f"{offset + nul:,}: it is not text, or a crash damaged it; copy or download it again"
                )
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                line += data.count(b"\n", 0, error.start)
                raise ValueError(self._decode_error_message(data, line, offset, error)) from error
            if offset == 0 and data.startswith(BOM):
                text = text[1:]
            line += data.count(b"\n")
            offset += len(data)
            if text:
                blank = blank and text.isspace()
                yield text
        if blank:
            raise ValueError(
                f"{self.name} holds no text: it is {'empty' if offset == 0 else 'all white space'}"
            )

    def line_blocks(self) -> Iterator[list[str]]:
        """The lines of each block, without line endings."""
        return map(_split_lines, self.blocks())

    def lines(self) -> Iterator[str]:
        """Line by line. Only a line feed, alone or after a carriage return, ends a line."""
        return chain.from_iterable(self.line_blocks())

    def _read_bytes(self) -> Iterator[bytes]:
        with open_regular_file(self.path, name=self.name) as file:
            is_gzip = file.read(2) == GZIP_MAGIC
            file.seek(0)
            if self.name.lower().endswith(".gz") and not is_gzip and self.size != 0:
                raise ValueError(
                    f"{self.name} ends in .gz, but is not gzip: take .gz from its name if it is unpacked "
                    "already, or copy or download it again"
                )
            stream: IO[bytes] = gzip.GzipFile(fileobj=file) if is_gzip else file  # type: ignore[assignment]
            bytes_read = 0
            try:
                while data := stream.read(BLOCK_BYTES):
                    bytes_read += len(data)
                    yield data
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(
                    f"{self.name} is broken gzip, {bytes_read:,} bytes of text into it ({error}): "
                    "copy or download it again"
                ) from error

    def _decode_error_message(self, data: bytes, line: int, offset: int, error: UnicodeDecodeError) -> str:
        for magic, format_name in BINARY_MAGIC.items():
            if offset == 0 and data.startswith(magic):
                remedy = "unpack it, or end its name as such files do"
                return f"{self.name} is a {format_name} file, not text: {remedy}"
        encoding = "utf16" if offset == 0 and data.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
        with open(self.path, "rb") as file:
            is_gzip = file.read(2) == GZIP_MAGIC
        command = (
            f"zcat {self.name} | iconv -f {encoding} -t utf8"
            if is_gzip
            else f"iconv -f {encoding} -t utf8 {self.name}"
        )
        return (
            f"{self.name} line {line} is not UTF-8: byte 0x{data[error.start]:02x} "
            f"at offset {offset + error.start:,}{' of the unpacked text' if is_gzip else ''} "
            f"({error.reason}). If it is {encoding}, convert it: {command} > NEW"
        )


def open_text(name: str | os.PathLike[str]) -> TextFile:
    """The file of that name; "-" is stdin, and /dev/fd/N a pipe that a shell has opened, as for <(command).

    Both can be read only once, so they are copied to a temporary file. Named pipes and devices are refused:
    to open one may block forever.
    """
    if str(name) == "-":
        return _spool(getattr(sys.stdin, "buffer", None), "stdin")
    path = Path(name).expanduser()
    if path.is_file():
        return TextFile(path, str(name), path.stat().st_size)
    if path.is_dir():
        entries = sorted(entry.name for entry in islice(path.iterdir(), 1000))
        contents = (
            f"it holds {', '.join(entries[:5])}{', …' if len(entries) > 5 else ''}"
            if entries
            else "it is empty"
        )
        raise IsADirectoryError(f"{name} is a directory: name the files in it ({contents})")
    if not path.exists():
        raise FileNotFoundError(missing_file_message(path))
    if not str(path).startswith(OPEN_FILES):
        raise ValueError(
            f"{name} is {file_kind(path.stat().st_mode)}, not a file that can be read again and again: give "
            f"a regular file, or - and its content as stdin"
        )
    with open(path, "rb") as pipe:
        return _spool(pipe, str(name))


def _spool(pipe: IO[bytes] | None, name: str) -> TextFile:
    descriptor, path = tempfile.mkstemp(prefix="keepleft-")
    with open(descriptor, "wb") as file:
        if pipe is not None:
            shutil.copyfileobj(pipe, file, BLOCK_BYTES)
        elif sys.stdin is not None:
            file.write(sys.stdin.read().encode())  # stdin replaced by a stream of text only
    text_file = TextFile(Path(path), name, None)
    weakref.finalize(text_file, Path(path).unlink, missing_ok=True)
    return text_file


def _rechunk(stream: Iterator[bytes], allow_partial_lines: bool) -> Iterator[bytes]:
    """Cut blocks so that none splits a character nor, unless `allow_partial_lines`, a line.

    A line beyond MAX_LINE_BYTES is the last block, and not complete.
    """
    pending: list[bytes] = []
    pending_bytes = 0
    for data in stream:
        cut = data.rfind(b"\n") + 1
        if not cut and allow_partial_lines:
            cut = data.rfind(b" ") + 1 or _boundary(data)
        if not cut:
            pending.append(data)
            pending_bytes += len(data)
            if pending_bytes > MAX_LINE_BYTES:
                break
            continue
        yield b"".join([*pending, data[:cut]])
        pending = [data[cut:]] if cut < len(data) else []
        pending_bytes = len(data) - cut
    if pending:
        yield b"".join(pending)


def _boundary(data: bytes) -> int:
    """The offset of the last character, whose last bytes may be missing."""
    cut = len(data) - 1
    while cut > len(data) - 4 and cut > 0 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return max(cut, 0)


def _split_lines(text: str) -> list[str]:
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines
