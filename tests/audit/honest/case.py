"""One honest model: what it is called, how it is made and what it claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Honest:
    """A model without a leak under its claim; None claims what the audit takes for granted, causal.

    build() makes (target, example) or (target, example, options); the example may be None. Options are
    further arguments of the audit; those that build() returns belong to the very target that it made, and go
    above those given here.
    """

    name: str
    build: Callable[[], tuple]
    claim: Any = None
    options: dict[str, Any] = field(default_factory=dict)
