"""Atomic files and folders: written under a temporary name, synced to the disk, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepleft.disk.regular_file import open_regular_file

PART_SUFFIX = ".part"
IS_WINDOWS = os.name == "nt"
NOT_WRITTEN = "could not be written"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


@contextmanager
def atomic_file(path: Path, *, owner: str = "") -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` on success and is removed on an error.

    `owner`: part of its name, where several processes may write the same file. Raises OSError, which names
    `path`, if it cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written, as there is no folder {path.parent}: create it, or name another"
        )
    temporary = path.with_name(path.name + owner + PART_SUFFIX)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)
        raise


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill; it replaces `folder` on success and is removed on an error."""
    temporary = folder.with_name(folder.name + PART_SUFFIX)
    shutil.rmtree(temporary, ignore_errors=True)  # a crash may have left one
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            sync(path)
        sync(temporary)
        remove_folder(folder)
        temporary.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def explain_os_error(description: str) -> Iterator[None]:
    """Make an OSError of a full or read-only disk say what could not be written, and what to do."""
    try:
        yield
    except OSError as error:
        is_explained = NOT_WRITTEN in str(error.strerror)  # by a block within this one
        if is_explained or error.errno not in DISK_ERRORS:
            raise
        raise OSError(
            error.errno,
            f"{description} {NOT_WRITTEN} ({error.strerror}): free some space, or give another folder",
        ) from error


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes; the lock ends with the block, or with the process.

    Raises ValueError if another process holds it. Does nothing where the system has no fcntl.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"another process is at work in {folder}: wait for it, or give another folder"
            ) from error
        yield


def write_text(path: Path, content: str) -> None:
    """Write a small file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(content, "utf-8")


def remove_folder(folder: Path) -> None:
    """Remove a folder, renaming it first, so that nobody sees it half removed."""
    if folder.exists():
        trash = folder.with_name(folder.name + ".gone")
        shutil.rmtree(trash, ignore_errors=True)
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def sync(path: Path) -> None:
    """fsync a file or folder. Windows has no fsync for folders, and for files only if they are writable."""
    if IS_WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if IS_WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> int:
    """CRC-32 of a file, a few megabytes at a time."""
    crc = 0
    with open_regular_file(path) as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc
