"""Open files that others have made: regular files of bounded size, without links out of their directory.

A FIFO would block forever, a device may never end, and a link may lead to any file of this machine.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_JSON_BYTES = 64 << 20  # of configurations and indices
KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO (named pipe)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
# of a hub cache: models--OWNER--NAME/snapshots/COMMIT/FILE is a link to a file in blobs, of the repository or
# of the whole cache
SNAPSHOTS_FOLDER = "snapshots"
BLOBS_FOLDER = "blobs"
REPOSITORY_PREFIX = "models--"


def file_kind(mode: int) -> str | None:
    """What a file is, by its st_mode; None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    return next((kind for is_kind, kind in KINDS if is_kind(mode)), "a special file")


def open_regular_file(path: Path, *, name: object = None) -> BinaryIO:
    """Open a file, wherever links lead. Raises ValueError, naming `name` or the path, if it is special."""
    _check_kind(os.stat(path).st_mode, name or path)  # before opening: that alone can rewind a tape
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        _check_kind(os.fstat(descriptor).st_mode, name or path)  # it may have been replaced in between
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_file_in(folder: Path, name: str) -> BinaryIO:
    """Open a file of a directory.

    Raises FileNotFoundError if it is missing, and ValueError if it is not a regular file, or a symbolic link
    that leads out of the directory. In a snapshot of a hub cache, links may also lead to the cache's blobs.
    """
    path = folder / name
    return open_regular_file(resolve_file_in(folder, name), name=path)


def resolve_file_in(folder: Path, name: str) -> Path:
    """The path of a file of a directory, links resolved. Raises as `open_file_in` does, for links."""
    path = folder / name
    try:
        target = path.resolve(strict=True)
    except FileNotFoundError as error:
        if not path.is_symlink():
            raise
        raise ValueError(
            f"{path} is a symbolic link to {os.readlink(path)}, which does not exist: copy or download the "
            "file again"
        ) from error
    except (OSError, RuntimeError) as error:  # a loop of links
        raise ValueError(f"{path} cannot be followed ({error}): copy or download the file again") from error
    if not any(target.is_relative_to(root) for root in _allowed_roots(folder)):
        raise ValueError(
            f"{path} is a symbolic link out of its directory, to {target}: if you trust that file, put a "
            "copy of it, or a hard link, in the place of the link"
        )
    return target


def check_files_in(folder: Path) -> None:
    """Raise ValueError if opening a file of a directory would, for a program that opens them itself."""
    for path in sorted(folder.iterdir()):
        mode = resolve_file_in(folder, path.name).stat().st_mode
        if not stat.S_ISDIR(mode):
            _check_kind(mode, path)


def exists_in(folder: Path, name: str) -> bool:
    """Whether a directory has an entry of that name; a link counts even if it leads nowhere."""
    return os.path.lexists(folder / name)


def read_file_in(folder: Path, name: str, *, max_bytes: int) -> bytes:
    """The content of a file of a directory. Raises as `open_file_in`, and ValueError if it is larger."""
    with open_file_in(folder, name) as file:
        return read_bounded(file, folder / name, max_bytes)


def read_regular_file(path: Path, *, max_bytes: int) -> bytes:
    """The content of a file that was named itself. Raises ValueError if it is not regular, or larger."""
    with open_regular_file(path) as file:
        return read_bounded(file, path, max_bytes)


def read_bounded(file: BinaryIO, name: object, max_bytes: int) -> bytes:
    """All of a file. Raises ValueError, before reading it, if it has more than `max_bytes`."""
    size = os.fstat(file.fileno()).st_size
    if size <= max_bytes:
        content = file.read(max_bytes + 1)  # it may have grown
        size = len(content)
    if size > max_bytes:
        raise ValueError(
            f"{name} has {size:,} bytes, and at most {max_bytes:,} are read: it is not what its name says; "
            "copy or download it again"
        )
    return content


def snapshot_commit(folder: Path) -> str | None:
    """The commit that a snapshot of a hub cache holds; None for any other directory."""
    resolved = folder.resolve()
    is_snapshot = resolved.parent.name == SNAPSHOTS_FOLDER
    return resolved.name if is_snapshot and resolved.parents[1].name.startswith(REPOSITORY_PREFIX) else None


def _allowed_roots(folder: Path) -> list[Path]:
    """The directories that the files of a directory may lie in, links resolved."""
    resolved = folder.resolve()
    if snapshot_commit(folder) is None:
        return [resolved]
    repository = resolved.parents[1]
    return [resolved, repository / BLOBS_FOLDER, repository.parent / BLOBS_FOLDER]


def _check_kind(mode: int, name: object) -> None:
    if kind := file_kind(mode):
        raise ValueError(f"{name} is {kind}, not a regular file: put the file itself in its place")
