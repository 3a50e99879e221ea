"""Questions about training runs on disk: their list, the metrics of one, and what `keepleft compare` found.

A run is named by an entry of our own list, never by a path from outside.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from keepleft.auditing.report import json_safe
from keepleft.runs.metrics import METRICS_FILE
from keepleft.serving.explorer.params import Params

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

CONFIG_FILE = "config.yaml"
COMPARE_FILE = "compare.json"
MAX_RUNS = 500  # listed, the newest first
MAX_LINES = 5_000  # of one answer
MAX_READ_BYTES = 1 << 16  # of a configuration, or at the end of the metrics
MAX_COMPARE_BYTES = 1 << 23


@dataclass(frozen=True)
class FileCursor:
    """Where the last answer about a run ended."""

    inode: int  # a resumed run writes a new file
    line: int
    offset: int

    def seek(self, file: BinaryIO) -> bool:
        """Seek to the offset; False if it is no longer at the start of a line."""
        file.seek(max(0, self.offset - 1))
        return self.offset == 0 or file.read(1) == b"\n"


class RunFolder:
    """The run directories directly in a folder."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.cursors: dict[str, FileCursor] = {}

    def find_runs(self) -> dict[str, Path]:
        """Run directories by name, the newest first; links that lead out of the folder are not followed."""
        if self.folder is None or not self.folder.is_dir():
            return {}
        runs = {}
        for entry in os.scandir(self.folder):
            if entry.is_dir(follow_symlinks=False) and _is_printable(entry.name):
                run_folder = Path(entry.path)
                if _is_regular_file(run_folder / METRICS_FILE) or _is_regular_file(run_folder / CONFIG_FILE):
                    runs[entry.name] = run_folder
        newest_names = sorted(runs, key=lambda name: (-_modified_time(runs[name]), name))
        return {name: runs[name] for name in newest_names[:MAX_RUNS]}

    def describe_runs(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "steps": _last_step(run_folder),
                "modified": _modified_time(run_folder),
                "task": _task(run_folder),
            }
            for name, run_folder in self.find_runs().items()
        ]

    def read_lines(self, name: str, from_line: int) -> dict[str, Any]:
        """The metrics from a line on; an incomplete last line is left for later."""
        runs = self.find_runs()
        if name not in runs:
            raise ValueError(
                f"there is no run called {name[:60]!r}: "
                + (f"there are {', '.join(list(runs)[:8])}" if runs else "the folder of runs is empty")
            )
        lines, begin, end = self._read_from(name, runs[name] / METRICS_FILE, from_line)
        config = _read_head(runs[name] / CONFIG_FILE) if from_line == 0 else ""
        last = lines[-1] if lines else _last_record(runs[name])  # "tired": stopped early
        return {
            "lines": lines,
            "first_line": begin,
            "next_line": end,
            "config": config,
            "finished": bool(last.get("last") or last.get("tired")) if last else False,
        }

    def _read_from(self, name: str, path: Path, from_line: int) -> tuple[list[dict[str, Any]], int, int]:
        """The records, and the numbers of the first line and of the one after the last."""
        if not _is_regular_file(path):
            return [], 0, 0
        with path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            cursor = self.cursors.get(name)
            if cursor is None or cursor.inode != inode or cursor.line != from_line or not cursor.seek(file):
                cursor = _skip_lines(file, inode, from_line)
            begin = cursor.line
            line = cursor.line
            offset = cursor.offset
            records = []
            for raw in file:
                if not raw.endswith(b"\n") or line - begin >= MAX_LINES:
                    break
                line += 1
                offset += len(raw)
                records.append(_parse_object(raw))
        self.cursors[name] = FileCursor(inode, line, offset)
        return [record for record in records if record], begin, line


def _skip_lines(file: BinaryIO, inode: int, from_line: int) -> FileCursor:
    """The start of line `from_line`; of the file if there are fewer lines: it was rewritten."""
    file.seek(0)
    for _ in range(from_line):
        if not file.readline().endswith(b"\n"):
            file.seek(0)
            return FileCursor(inode, 0, 0)
    return FileCursor(inode, from_line, file.tell())


def list_runs(explorer: Explorer, params: Params) -> dict[str, Any]:
    """All runs, the newest first."""
    return {"runs": explorer.run_folder.describe_runs()}


def run_metrics(explorer: Explorer, params: Params) -> dict[str, Any]:
    """The new metrics of one run, and its configuration."""
    return explorer.run_folder.read_lines(
        params.text("name", max_characters=300), params.integer("from_line", 0, 1 << 40, 0)
    )


def compare(explorer: Explorer, params: Params) -> dict[str, Any]:
    """The results of `keepleft compare`; empty if there are none."""
    if explorer.compare_folder is None:
        return {}
    path = Path(explorer.compare_folder) / COMPARE_FILE
    if not _is_regular_file(path):
        return {}
    if path.stat().st_size > MAX_COMPARE_BYTES:
        raise ValueError(
            f"{COMPARE_FILE} has {path.stat().st_size:,} bytes: at most {MAX_COMPARE_BYTES:,} are shown"
        )
    return _parse_object(path.read_bytes())


def _is_regular_file(path: Path) -> bool:
    """True for a file itself, not for a link to one."""
    return path.is_file() and not path.is_symlink()


def _is_printable(name: str) -> bool:
    return name.isprintable() and not name.startswith(".") and len(name) <= 200


def _modified_time(run_folder: Path) -> float:
    return max(
        (
            path.stat().st_mtime
            for path in (run_folder / METRICS_FILE, run_folder / CONFIG_FILE)
            if _is_regular_file(path)
        ),
        default=0.0,
    )


def _last_step(run_folder: Path) -> int:
    step = _last_record(run_folder).get("step", 0)
    return step if isinstance(step, int) else 0


def _task(run_folder: Path) -> str:
    match = re.search(r"^task: *['\"]?([\w-]{1,40})", _read_head(run_folder / CONFIG_FILE), re.M)
    return match[1] if match else ""


def _last_record(run_folder: Path) -> dict[str, Any]:
    """The last complete line of the metrics."""
    path = run_folder / METRICS_FILE
    if not _is_regular_file(path):
        return {}
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_READ_BYTES))
        lines = file.read().splitlines(keepends=True)
    return next(
        (record for raw in reversed(lines) if raw.endswith(b"\n") and (record := _parse_object(raw))), {}
    )


def _read_head(path: Path) -> str:
    if not _is_regular_file(path):
        return ""
    with path.open("rb") as file:
        return file.read(MAX_READ_BYTES).decode("utf-8", "replace")


def _parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object without NaN, which browsers reject; {} if it is none."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return json_safe(value) if isinstance(value, dict) else {}
