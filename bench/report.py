"""Results: a table on the screen, the same numbers as JSON, and the machine they belong to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def print_table(title: str, rows: list[Row]) -> None:
    """A table whose columns are the keys of the rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([format_cell(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for number, line in enumerate(cells):
        print(
            "  "
            + "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
        )
        if not number:
            print("  " + "  ".join("-" * width for width in widths))
    print(flush=True)


def format_cell(value: Any) -> str:
    """Floats with about four significant digits."""
    if not isinstance(value, float):
        return str(value)
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:.{digits}f}"


def write_json(path: Path | None, numbers: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(numbers, indent=2) + "\n", "utf-8")


def environment() -> dict[str, Any]:
    """The versions and the machine that the numbers belong to."""
    import platform

    import torch

    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "threads": torch.get_num_threads(),
        "load": system_load(),
    }


def system_load() -> str:
    """The load average. Above the number of cores, threads wait for each other and times mean little."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def token_agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """The share of tokens that two implementations generated alike, position by position."""
    matches = [x == y for row, other in zip(a, b, strict=True) for x, y in zip(row, other, strict=True)]
    return sum(matches) / len(matches)
