"""Runs as they lie on the disk: which there are, how one of them goes, and what `keepleft compare` found.

A name comes from our own list, never a path from elsewhere.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from keepleft.auditing.report import plain
from keepleft.runs.metrics import METRICS
from keepleft.serving.explorer.given import Given

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

CONFIG, COMPARE = "config.yaml", "compare.json"
RUNS = 500             # that are listed, the newest first
LINES = 5_000          # of one answer
TAIL = 1 << 16         # bytes at the end of a file, or of a configuration
LARGEST = 1 << 23      # bytes of what `keepleft compare` left


@dataclass(frozen=True)
class Mark:
    """Where the last answer about a run ended."""

    file: int    # its number on the disk: a run that goes on writes a new one
    line: int
    offset: int

    def found(self, file: BinaryIO) -> bool:
        """Go there, if there still is such a place: the end of a line."""
        file.seek(max(0, self.offset - 1))
        return self.offset == 0 or file.read(1) == b"\n"


class Runs:
    """The run directories right below a folder."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.marks: dict[str, Mark] = {}

    def found(self) -> dict[str, Path]:
        """By name, the newest first; nothing that leads out of the folder."""
        if self.folder is None or not self.folder.is_dir():
            return {}
        out = {}
        for entry in os.scandir(self.folder):
            if entry.is_dir(follow_symlinks=False) and _printable(entry.name):
                place = Path(entry.path)
                if _own(place / METRICS) or _own(place / CONFIG):
                    out[entry.name] = place
        newest = sorted(out, key=lambda name: (-_modified(out[name]), name))
        return {name: out[name] for name in newest[:RUNS]}

    def listed(self) -> list[dict[str, Any]]:
        return [{"name": name, "steps": _steps(place), "modified": _modified(place), "task": _task(place)}
                for name, place in self.found().items()]

    def lines(self, name: str, after: int) -> dict[str, Any]:
        """What was written after so many lines; a last line that is not whole yet is left for later."""
        found = self.found()
        if name not in found:
            raise ValueError(f"there is no run called {name[:60]!r}: " + (
                f"there are {', '.join(list(found)[:8])}" if found else "the folder of runs is empty"))
        lines, begin, end = self._read(name, found[name] / METRICS, after)
        config = _head(found[name] / CONFIG) if after == 0 else ""
        last = lines[-1] if lines else _last(found[name])
        return {"lines": lines, "from": begin, "next": end, "config": config,
                "ended": bool(last.get("last") or last.get("tired")) if last else False}

    def _read(self, name: str, path: Path, after: int) -> tuple[list[dict[str, Any]], int, int]:
        """The lines, the number of the first and of the one after the last."""
        if not _own(path):
            return [], 0, 0
        with path.open("rb") as file:
            number, mark = os.fstat(file.fileno()).st_ino, self.marks.get(name)
            if mark is None or mark.file != number or mark.line != after or not mark.found(file):
                mark = _skipped(file, number, after)
            begin, line, offset, out = mark.line, mark.line, mark.offset, []
            for raw in file:
                if not raw.endswith(b"\n") or line - begin >= LINES:
                    break
                line, offset = line + 1, offset + len(raw)
                out.append(_object(raw))
        self.marks[name] = Mark(number, line, offset)
        return [one for one in out if one], begin, line


def _skipped(file: BinaryIO, number: int, after: int) -> Mark:
    """The place after so many lines; the beginning where there are fewer, for then the file was written anew."""
    file.seek(0)
    for _ in range(after):
        if not file.readline().endswith(b"\n"):
            file.seek(0)
            return Mark(number, 0, 0)
    return Mark(number, after, file.tell())


def runs(explorer: Explorer, given: Given) -> dict[str, Any]:
    return {"runs": explorer.runs.listed()}


def run(explorer: Explorer, given: Given) -> dict[str, Any]:
    return explorer.runs.lines(given.text("name", most=300), given.whole("after", 0, 1 << 40, 0))


def compare(explorer: Explorer, given: Given) -> dict[str, Any]:
    if explorer.compared is None or not _own(path := Path(explorer.compared) / COMPARE):
        return {}
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{COMPARE} has {path.stat().st_size:,} bytes: at most {LARGEST:,} are shown")
    return _object(path.read_bytes())


def _own(path: Path) -> bool:
    """A file that is there itself, not a link to one elsewhere."""
    return path.is_file() and not path.is_symlink()


def _printable(name: str) -> bool:
    return name.isprintable() and not name.startswith(".") and len(name) <= 200


def _modified(place: Path) -> float:
    return max((path.stat().st_mtime for path in (place / METRICS, place / CONFIG) if _own(path)), default=0.0)


def _steps(place: Path) -> int:
    step = _last(place).get("step", 0)
    return step if isinstance(step, int) else 0


def _task(place: Path) -> str:
    found = re.search(r"^task: *['\"]?([\w-]{1,40})", _head(place / CONFIG), re.M)
    return found[1] if found else ""


def _last(place: Path) -> dict[str, Any]:
    """The last whole line of the metrics."""
    path = place / METRICS
    if not _own(path):
        return {}
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        lines = file.read().splitlines(keepends=True)
    return next((found for raw in reversed(lines) if raw.endswith(b"\n") and (found := _object(raw))), {})


def _head(path: Path) -> str:
    if not _own(path):
        return ""
    with path.open("rb") as file:
        return file.read(TAIL).decode("utf-8", "replace")


def _object(raw: bytes) -> dict[str, Any]:
    """A JSON object; nothing where it is not one. JSON elsewhere knows no NaN."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return plain(found) if isinstance(found, dict) else {}
