"""A rule: a row with the hint's sentence, an example, a counter-example, and the function that looks."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from keepleft.auditing.static.syntax import Function


class Match(NamedTuple):
    """A suspicious expression, and what the hint's sentence says in place of {value}."""

    node: ast.AST
    value: str = ""


@dataclass(frozen=True)
class HintRule:
    """A suspicious pattern; `find` looks for it in one function."""

    id: str
    looks_for: str  # for the table in docs/audit.md
    message: str  # why it is suspicious, and what to check
    example: str  # a file that has it
    counter_example: str  # a similar file that does not
    find: Callable[[Function], Iterator[Match]]
    level: Literal["warning", "note"] = "warning"  # a note is right in most programs


def format_number(number: float) -> str:
    """As a programmer would write it: -100, -1e9."""
    return f"{number:g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
