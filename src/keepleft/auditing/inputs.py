"""The inputs of a call, before they become arguments of a model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """The inputs of a call, before they become arguments of this model."""

    tokens: Tensor  # (B, T) token ids, or (B, T, D) features
    source: Tensor | None = None  # (B, S) or (B, S, D): the sequence that is attended to
    keep_mask: Tensor | None = None  # (B, T) True: a real token
    source_keep_mask: Tensor | None = None  # (B, S)
    positions: Tensor | None = None  # (B, T)
    segments: Tensor | None = None  # (B, T) 0: padding
    labels: Tensor | None = None  # (B, T)
    sides: Mapping[str, Tensor] = field(default_factory=dict)  # (B, T, …) arguments aligned with the tokens
    extra: Mapping[str, Any] = field(default_factory=dict)  # further arguments, by name

    def but(self, **changes: Any) -> Inputs:
        return replace(self, **changes)

    @cached_property
    def fingerprint(self) -> Hashable:
        """The same for inputs that hold the same."""
        return tuple(_fingerprint(getattr(self, each.name)) for each in fields(self))

    def select_rows(self, rows: Tensor | slice) -> Inputs:
        """Tokens and source of some rows, or of all rows in another order."""
        return self.but(
            tokens=self.tokens[rows],
            source=None if self.source is None else self.source[rows],
            sides={name: side[rows] for name, side in self.sides.items()},
        )

    def select_positions(self, positions: Tensor | slice) -> Inputs:
        """Some of the tokens of each row, and what is aligned with them."""
        return self.but(
            tokens=self.tokens[:, positions],
            sides={name: side[:, positions] for name, side in self.sides.items()},
        )

    def blend(self, other: Inputs, mask: Tensor) -> Inputs:
        """With the tokens of another call, and their sides, where a mask (B, T) or (1, T) is True."""

        def choose(ours: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(mask.view(*mask.shape, *[1] * (ours.dim() - 2)), theirs.to(ours.dtype), ours)

        return self.but(
            tokens=choose(self.tokens, other.tokens),
            sides={name: choose(side, other.sides[name]) for name, side in self.sides.items()},
        )

    def mask_at(self, row: int, position: int | None = None) -> Tensor:
        """(B, T): True in one row, or at one position of it."""
        mask = torch.zeros(self.tokens.shape[:2], dtype=torch.bool)
        mask[row, slice(None) if position is None else position] = True
        return mask

    def append(self, other: Inputs) -> Inputs:
        """With the tokens of another call, and what is aligned with them, behind its own."""
        return self.but(
            tokens=torch.cat([self.tokens, other.tokens], 1),
            sides={name: torch.cat([side, other.sides[name]], 1) for name, side in self.sides.items()},
        )


def _fingerprint(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        return (
            str(plain.dtype),
            tuple(plain.shape),
            hash(plain.reshape(-1).view(torch.uint8).numpy().tobytes()),
        )
    if isinstance(value, Mapping):
        return tuple((name, _fingerprint(item)) for name, item in value.items())
    return repr(value)
