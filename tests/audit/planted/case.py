"""What a planted leak is: a model with one bug, and what an audit should say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Planted:
    """One leak: build() gives (target, example) or (target, example, options of the audit)."""

    name: str
    build: Callable[[], tuple]
    kind: str  # future, padding, packing, cache, batch, nan or labels
    module: str | None  # where it enters; '' is the whole, None where nothing sensible can be asked for
    claim: Any = None  # None means causal
    options: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()  # kinds that this very leak cannot help showing too

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def seeded(
    make: Callable[[], Any],
    example: Callable[[], Any] | None = None,
    options: Callable[[Any], dict] | None = None,
) -> Callable[[], tuple]:
    """A build() with the same weights and example every time; options are made from the target."""

    def build() -> tuple:
        torch.manual_seed(0)
        target = make()
        shown = None if example is None else example()
        return (target, shown) if options is None else (target, shown, options(target))

    return build
