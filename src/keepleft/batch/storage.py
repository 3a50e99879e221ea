"""Files of a batch job: on this machine, or in an object store that pyarrow reads (s3://, gs://)."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterable
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, cast

from keepleft.disk import atomic
from keepleft.disk.fingerprint import fingerprint as file_fingerprint
from keepleft.disk.regular_file import open_regular_file

FILE_SCHEME = "file://"
WILDCARDS = "*?["


def is_remote(path: str) -> bool:
    """Whether it is a URI, such as s3://bucket/texts.parquet."""
    return "://" in path and not path.startswith(FILE_SCHEME)


def has_wildcard(path: str) -> bool:
    """Whether the path stands for several files: texts/*.jsonl"""
    return any(character in path for character in WILDCARDS)


def join(folder: str, name: str) -> str:
    """The path of a file in a folder."""
    return f"{folder.rstrip('/')}/{name}" if is_remote(folder) else str(_local(folder) / name)


def list_files(pattern: str) -> list[str]:
    """The files that a path or a pattern stands for, in the order of their names.

    Raises FileNotFoundError if there is none.
    """
    if is_remote(pattern):
        paths = _list_remote_files(pattern)
    else:
        local_pattern = str(_local(pattern))
        exists = os.path.exists(local_pattern)  # a name may have brackets in it
        paths = [local_pattern] if exists else sorted(glob.glob(local_pattern, recursive=True))
        if folders := [path for path in paths if os.path.isdir(path)]:
            raise IsADirectoryError(f"{folders[0]} is a folder: name files, as in {folders[0]}/*.jsonl")
    if not paths:
        raise FileNotFoundError(f"there is no file {pattern}: look at --input")
    return paths


def names_in(folder: str) -> list[str]:
    """The names of the files in a folder, sorted; none if there is no such folder."""
    if is_remote(folder):
        from pyarrow.fs import FileSelector

        filesystem, path = _filesystem(folder)
        selector = FileSelector(path, allow_not_found=True)
        return sorted(info.base_name for info in filesystem.get_file_info(selector))
    local_folder = _local(folder)
    names = os.listdir(local_folder) if local_folder.exists() else []
    return sorted(name for name in names if not name.endswith(atomic.PART_SUFFIX))  # of a process that died


def open_file(path: str) -> BinaryIO:
    """Open a file to read its bytes."""
    if is_remote(path):
        filesystem, remote_path = _filesystem(path)
        return cast(BinaryIO, filesystem.open_input_file(remote_path))
    return open_regular_file(_local(path))


def read_file(path: str) -> bytes:
    with open_file(path) as file:
        return file.read()


def write_file(path: str, data: Iterable[bytes]) -> None:
    """Write a file completely or not at all. In an object store, a file is there once it is closed.

    Two processes may write the same file: one of them wins.
    """
    if is_remote(path):
        filesystem, remote_path = _filesystem(path)
        with filesystem.open_output_stream(remote_path) as stream:
            for piece in data:
                stream.write(piece)
        return
    local_path = _local(path)
    owner = f".{os.getpid()}-{token_hex(4)}"
    with (
        atomic.explain_os_error(str(local_path)),
        atomic.atomic_file(local_path, owner=owner) as temporary,
        temporary.open("wb") as file,
    ):
        file.writelines(data)


def absolute(path: str, *, may_be_missing: bool = False) -> str:
    """The path from the root of this machine; a URI, and the name of a model on the hub, as it is."""
    if is_remote(path) or not (may_be_missing or _local(path).exists()):
        return path
    return os.path.abspath(_local(path))


def fingerprint(path: str) -> str:
    """Size and checksum of a file, or what an object store says of it instead."""
    if is_remote(path):
        filesystem, remote_path = _filesystem(path)
        info = filesystem.get_file_info(remote_path)
        return f"{info.size}:{info.mtime_ns}"
    return file_fingerprint(_local(path))


def make_folder(folder: str) -> None:
    """Make a folder, and those above it. Object stores have none. Raises NotADirectoryError for a file."""
    if is_remote(folder):
        return
    local_folder = _local(folder)
    if local_folder.exists() and not local_folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, and --output of a batch job is a folder: name another")
    with atomic.explain_os_error(folder):
        local_folder.mkdir(parents=True, exist_ok=True)


def _local(path: str) -> Path:
    return Path(path.removeprefix(FILE_SCHEME)).expanduser()


def _list_remote_files(pattern: str) -> list[str]:
    if not has_wildcard(pattern):
        return [pattern]
    from pyarrow.fs import FileSelector, FileType

    start = min(pattern.index(character) for character in WILDCARDS if character in pattern)
    folder_uri = pattern[: pattern.rindex("/", 0, start)]
    filesystem, folder = _filesystem(folder_uri)
    names = pattern[len(folder_uri) + 1 :]
    infos = filesystem.get_file_info(FileSelector(folder, recursive="/" in names, allow_not_found=True))
    relative = [info.path[len(folder) :].lstrip("/") for info in infos if info.type == FileType.File]
    return [
        f"{folder_uri}/{name}"
        for name in sorted(relative)
        if fnmatch.fnmatchcase(name, names) and name.count("/") == names.count("/")
    ]


def _filesystem(uri: str) -> tuple[Any, str]:
    """The file system of a URI, and the path in it."""
    try:
        from pyarrow.fs import FileSystem
    except ImportError as error:
        raise ImportError(f"{uri} is read with pyarrow: pip install 'keepleft[parquet]'") from error
    try:
        return FileSystem.from_uri(uri)  # type: ignore[no-any-return]
    except (ValueError, OSError) as error:
        raise ValueError(f"{uri} cannot be opened: {error}; give a path, s3://… or gs://…") from error
