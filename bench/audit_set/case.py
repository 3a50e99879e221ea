"""One case of the audit's test set: a model, what is wrong with it if anything, and a proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Build = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """What a user would pass to the audit, and what is true of it."""

    name: str  # unique, snake_case
    leaks: bool
    kinds: tuple[str, ...]  # the kinds under which it may be reported; () for honest
    modules: tuple[str, ...]  # the submodules that would be a right place to point at, "" for the root
    after: str  # the public report or common mistake
    build: Build  # arguments of kl.audit: target and, where needed, example, claim, layers, vocab, time, …
    prove: Callable[[], float]  # size of the forbidden influence, by brute force and without the audit


CASES: list[Case] = []


def case(
    *,
    leaks: bool,
    kinds: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
    after: str,
    prove: Callable[[], float],
) -> Callable[[Build], Build]:
    """Register a build function as a case named like it."""

    def register(build: Build) -> Build:
        if any(known.name == build.__name__ for known in CASES):
            raise ValueError(f"two cases are named {build.__name__}")
        CASES.append(Case(build.__name__, leaks, kinds, modules, after, build, prove))
        return build

    return register
