"""Files and folders that are whole or not there: written under another name, brought to the disk, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART = ".part"


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A place to write a file; it becomes `path` when all went well, and vanishes otherwise."""
    part = path.with_name(path.name + PART)
    try:
        yield part
        sync(part)
        part.replace(path)
        sync(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def made(folder: Path) -> Iterator[Path]:
    """A folder to fill; it becomes `folder`, in place of what was there, when all went well, and vanishes otherwise."""
    part = folder.with_name(folder.name + PART)
    shutil.rmtree(part, ignore_errors=True)  # a crash may have left one
    part.mkdir(parents=True)
    try:
        yield part
        for path in sorted(part.rglob("*")):
            sync(path)
        sync(part)
        removed(folder)
        part.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextmanager
def explained(what: str) -> Iterator[None]:
    """What goes wrong with the disk says what could not be written, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO):
            raise
        raise OSError(error.errno, f"{what} could not be written ({error.strerror}): free some space, or give another folder") \
            from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder to oneself for a while; where another process has it, that is an error. It ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            import fcntl
        except ImportError:  # not on this system
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process is at work in {folder}: wait for it, or give another folder") from error
        yield


def text(path: Path, content: str) -> None:
    """A small file, at once or not at all."""
    with written(path) as part:
        part.write_text(content, "utf-8")


def removed(folder: Path) -> None:
    """Take a folder away so that no one meets it half gone: its name goes first."""
    if folder.exists():
        gone = folder.with_name(folder.name + ".gone")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> int:
    """CRC-32 of a file, a few megabytes at a time."""
    total = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(1 << 22):
            total = zlib.crc32(piece, total)
    return total
