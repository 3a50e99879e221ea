"""An honest model: its name, how it is built, and what it claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Honest:
    """A model without a leak under its claim, where None is causal. build() returns (target, example) or
    (target, example, options); the example may be None. Options are further arguments of the audit; those
    that build() returns depend on the target, and override those given here.
    """

    name: str
    build: Callable[[], tuple]
    claim: Any = None
    options: dict[str, Any] = field(default_factory=dict)
