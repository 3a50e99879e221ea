"""Argument checks. Each raises ValueError with the name, the value and what it must be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def check_int(name: str, value: Any, minimum: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} is {value!r}: it must be a whole number of at least {minimum}")


def check_number(name: str, value: Any, *, above: float | None = None) -> None:
    """A finite number of at least 0, or greater than `above`."""
    is_finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_finite or (value < 0 if above is None else value <= above):
        wanted = "of at least 0" if above is None else f"above {above:g}"
        raise ValueError(f"{name} is {value!r}: it must be a number {wanted}")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it must be true or false")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"no {name} is called {value!r}: there are {', '.join(choices)}")
