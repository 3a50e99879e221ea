"""A planted leak: a model with one bug, and what an audit must report about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Planted:
    """One leak; build() returns (target, example) or (target, example, options of the audit)."""

    name: str
    build: Callable[[], tuple]
    kind: str  # future, padding, packing, cache, batch, nan or labels
    module: str | None  # where it enters; '': the model itself, None: any
    claim: Any = None  # None: causal
    options: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()  # further kinds that this leak shows

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def seeded(
    make: Callable[[], Any],
    example: Callable[[], Any] | None = None,
    options: Callable[[Any], dict] | None = None,
) -> Callable[[], tuple]:
    """A build() with the same weights and example every time; options are computed from the target."""

    def build() -> tuple:
        torch.manual_seed(0)
        target = make()
        inputs = None if example is None else example()
        return (target, inputs) if options is None else (target, inputs, options(target))

    return build
