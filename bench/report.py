"""What a race says: a table on the screen, and the same numbers as JSON where a path is given."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def arguments(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers there too")
    return parser


def show(title: str, rows: list[Row]) -> None:
    """A table whose columns are the keys of the rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([said(row.get(name, "")) for name in names] for row in rows)]
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


def said(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return (
        f"{value:.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3}f}"
    )


def write(path: Path | None, numbers: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(numbers, indent=2) + "\n", "utf-8")


def about() -> dict[str, Any]:
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
        "weather": weather(),
    }


def weather() -> str:
    """How many others want the machine: with more than cores, threads wait for each other and times say
    little.
    """
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
