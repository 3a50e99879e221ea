"""What a case of the set is, and the list of all cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Build = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    name: str  # unique, snake_case
    leaks: bool
    kinds: tuple[str, ...]  # the kinds under which it may be reported; () for an honest model
    modules: tuple[str, ...]  # names as in named_modules() that are right to point at; "" for the root
    after: str  # the public report or common mistake
    build: Build  # arguments of keepleft.audit
    prove: Callable[[], float]  # size of the forbidden influence, by brute force


CASES: list[Case] = []


def case(
    *,
    leaks: bool,
    kinds: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
    after: str,
    prove: Callable[[], float],
) -> Callable[[Build], Build]:
    """Register the decorated function, which builds the arguments of an audit, under its name."""

    def register(build: Build) -> Build:
        name = build.__name__
        if any(name == other.name for other in CASES):
            raise ValueError(f"two cases are called {name}")
        CASES.append(Case(name, leaks, tuple(kinds), tuple(modules), after, build, prove))
        return build

    return register
