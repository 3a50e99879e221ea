"""Workloads of the attention benchmarks: a mask, and batches with one or several documents in a row."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask, causal, window
from keepleft.models.stack import positions_from_segments


class Workload(NamedTuple):
    name: str
    batch: int
    length: int
    window: int | None = None  # besides causal
    segments: Tensor | None = None  # (B, T); 0 is padding

    @property
    def mask(self) -> Mask:
        return causal if self.window is None else causal & window(self.window)

    def grid(self, backend: str | None, device: str) -> Grid:
        """Without segments where a row is one document; variable-length attention always needs them."""
        length, segments = self.length, self.segments
        if segments is None and backend != "varlen":
            return Grid(length, length)
        if segments is None:
            segments = torch.ones(self.batch, length, dtype=torch.long, device=device)
            return Grid(length, length, q_seg=segments, k_seg=segments)
        positions = positions_from_segments(segments)
        return Grid(length, length, 0, positions, positions, segments, segments)


def make_workloads(batch: int, length: int, device: str) -> list[Workload]:
    is_toy = length < 1000
    document_lengths = (length // 4, length // 2) if is_toy else (300, 900)
    unpadded, padded = (
        packed_segments(batch, length, padding, *document_lengths).to(device) for padding in (0, length // 10)
    )
    window_size = length // 2 if is_toy else 512
    return [
        Workload("causal", batch, length),
        Workload(f"causal & window({window_size})", batch, length, window_size),
        Workload("packed", batch, length, segments=unpadded),
        Workload("packed and padded", batch, length, segments=padded),
    ]


def packed_segments(batch: int, length: int, padding: int, min_length: int, max_length: int) -> Tensor:
    """(B, T) segments: documents of mixed lengths that fill each row but for the padding at its end."""
    rng = random.Random(0)
    rows = []
    for _ in range(batch):
        row: list[int] = []
        remaining = length - padding
        while remaining:
            size = (
                remaining
                if remaining <= max_length
                else rng.randint(min_length, min(max_length, remaining - min_length))
            )
            row += [1 + (row[-1] if row else 0)] * size
            remaining -= size
        rows.append(row + [0] * padding)
    return torch.tensor(rows)
