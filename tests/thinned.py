"""Long lists of cases: every few of them in each run, all of them in `make long`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def thinned(cases: Sequence[Any], every: int, name: Callable[[Any], str] = str) -> list[Any]:
    """One of `every` so many is run each time; the others are marked long."""
    return [
        pytest.param(case, id=name(case), marks=[pytest.mark.long] if n % every else [])
        for n, case in enumerate(cases)
    ]
