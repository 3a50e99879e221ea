"""Read the tables in bench/results/: plain text, columns two spaces or more apart, empty cells left out."""

from __future__ import annotations

import re
from pathlib import Path

Row = dict[str, str]
_CELL = re.compile(r"\S+(?: \S+)*")


def read_table(path: Path, heading: str, columns: tuple[str, ...], *, occurrence: int = 0) -> list[Row]:
    """The rows of the first table behind a line that contains `heading`, as column → cell.

    Its header must have all the columns. The table ends at a line with fewer than two cells.
    Raises ValueError if there is no such table.
    """
    lines = path.read_text("utf-8").splitlines()
    starts = [n for n, line in enumerate(lines) if heading in line]
    if occurrence >= len(starts):
        raise ValueError(f"{path.name} has no line {occurrence + 1} with {heading!r}")
    for n in range(starts[occurrence], len(lines)):
        header = [(match[0], match.start(), match.end()) for match in _CELL.finditer(lines[n])]
        if set(columns) <= {name for name, _, _ in header}:
            return [row for row in _read_rows(lines[n + 1 :], header) if set(row) & set(columns)]
    raise ValueError(f"{path.name} has no table with {', '.join(columns)} behind {heading!r}")


def _read_rows(lines: list[str], header: list[tuple[str, int, int]]) -> list[Row]:
    rows = []
    for line in lines:
        if set(line) <= set("- ") and line.strip():
            continue
        cells = list(_CELL.finditer(line))
        if len(cells) < 2:
            break
        row = {}
        for cell in cells:
            distance = lambda column, cell=cell: min(
                abs(column[1] - cell.start()), abs(column[2] - cell.end())
            )
            row[min(header, key=distance)[0]] = cell[0]
        rows.append(row)
    return rows


def number(cell: str) -> float:
    return float(cell.replace(",", ""))
