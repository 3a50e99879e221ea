"""Hints: lines of a file that often make a model leak. The file is parsed and never run."""

from __future__ import annotations

import io
import os
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepleft.auditing.static.rule_table import RULES
from keepleft.auditing.static.syntax import SourceFile
from keepleft.disk.missing_file import missing_file_message
from keepleft.disk.regular_file import read_regular_file

MAX_SOURCE_BYTES = 8 << 20
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
IGNORE_COMMENT = re.compile(r"#\s*keepleft:\s*ignore\[([\w\s,-]*)\]\s*$")


@dataclass(frozen=True, order=True)
class Hint:
    """A suspicious expression of a source file. It is no verdict."""

    path: str
    line: int  # from 1
    column: int  # in characters, from 1
    rule: str  # the id of the rule
    message: str  # why it is suspicious, and what to check
    level: Literal["warning", "note"]
    code: str  # the line


def find_hints(path: Path) -> list[Hint]:
    """The hints for one file, in the order of its lines.

    Raises FileNotFoundError or another OSError if it cannot be read, ValueError if it is not Python.
    """
    try:
        content = read_regular_file(path, max_bytes=MAX_SOURCE_BYTES)
    except FileNotFoundError as error:
        raise FileNotFoundError(missing_file_message(path)) from error
    return hints_of_source(content, str(path))


def hints_of_source(content: bytes, path: str) -> list[Hint]:
    """The hints for the content of a file. Raises ValueError if it is not Python."""
    text = _decode(content, path)
    file = _parse(text, path)
    lines = text.split("\n")
    hints: set[Hint] = set()
    for function in file.functions:
        for rule in RULES:
            for node, value in rule.find(function):
                start, end = getattr(node, "lineno", 1), getattr(node, "end_lineno", None)
                if rule.id in _ignored_rules(lines[start - 1 : end or start]):
                    continue
                line = lines[start - 1]
                column = len(line.encode()[: getattr(node, "col_offset", 0)].decode(errors="replace")) + 1
                message = rule.message.replace("{value}", value)
                hints.add(Hint(path, start, column, rule.id, message, rule.level, line.strip()))
    return sorted(hints)


def python_files(path: Path) -> Iterator[Path]:
    """The file itself, or all Python files of a folder, without hidden folders and virtual environments."""
    if not path.is_dir():
        yield path
        return
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(name for name in subfolders if _is_searched(Path(folder, name)))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _is_searched(folder: Path) -> bool:
    is_hidden = folder.name.startswith(".") or folder.name in SKIPPED_FOLDERS
    return not is_hidden and not (folder / "pyvenv.cfg").exists()


def _decode(content: bytes, path: str) -> str:
    """The text, by its byte order mark or coding comment, with \\n at the end of lines."""
    content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise ValueError(
            f"{path} is not Python: it cannot be decoded ({error}); check its encoding"
        ) from error


def _parse(text: str, path: str) -> SourceFile:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's own strings and comparisons
            return SourceFile.parse(text)
    except SyntaxError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ValueError(f"{path}:{error.lineno or 1} is not Python {version}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError | MemoryError) else str(error)
        raise ValueError(f"{path} cannot be parsed as Python: {reason}") from error


def _ignored_rules(lines: list[str]) -> set[str]:
    """The rules that comments at the end of these lines name."""
    matches = (IGNORE_COMMENT.search(line) for line in lines)
    return {name for match in matches if match for name in re.split(r"[\s,]+", match[1]) if name}
