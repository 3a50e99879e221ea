"""What GPU races are run on: a mask, and batches of one text a row or of many, as the models meet them."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask, causal, window
from keepleft.models.stack import positions_from_segments


class Scene(NamedTuple):
    name: str
    batch: int
    length: int
    window: int | None = None  # besides causal
    segments: Tensor | None = None  # (B, T); 0 is padding

    @property
    def mask(self) -> Mask:
        return causal if self.window is None else causal & window(self.window)

    def grid(self, backend: str | None, device: str) -> Grid:
        """Plain where there is one text a row; variable-length attention is told so by segments."""
        length, segments = self.length, self.segments
        if segments is None and backend != "varlen":
            return Grid(length, length)
        if segments is None:
            segments = torch.ones(self.batch, length, dtype=torch.long, device=device)
            return Grid(length, length, q_seg=segments, k_seg=segments)
        places = positions_from_segments(segments)
        return Grid(length, length, 0, places, places, segments, segments)


def scenes(batch: int, length: int, device: str) -> list[Scene]:
    full, part = (packed(batch, length, padding).to(device) for padding in (0, length // 10))
    return [
        Scene("causal", batch, length),
        Scene("causal & window(512)", batch, length, 512),
        Scene("packed", batch, length, segments=full),
        Scene("packed and padded", batch, length, segments=part),
    ]


def packed(batch: int, length: int, padding: int, short: int = 300, long: int = 900) -> Tensor:
    """(B, T) segments: documents of mixed lengths that fill each row but for the padding at its end."""
    chance = random.Random(0)
    rows = []
    for _ in range(batch):
        row: list[int] = []
        left = length - padding
        while left:
            size = left if left <= long else chance.randint(short, min(long, left - short))
            row += [1 + (row[-1] if row else 0)] * size
            left -= size
        rows.append(row + [0] * padding)
    return torch.tensor(rows)
