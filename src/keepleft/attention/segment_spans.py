"""Sequence packing and padding as contiguous spans of tokens: what kernels without a dense mask work on.

A row of segments [1 1 1 2 2 0 0] is two packed sequences and padding. Where every sequence lies in one piece
and the mask depends on relative positions alone, each span can be attended by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.masks import And, Causal, Full, Mask, Window


class Run(NamedTuple):
    """Adjacent tokens of one row: a sequence, or padding."""

    length: int
    real: bool


def is_relative(mask: Mask) -> bool:
    """Does the mask depend only on the distance between two positions?"""
    return isinstance(mask, Full | Causal | Window) or (
        isinstance(mask, And) and all(map(is_relative, mask.parts))
    )


def segment_spans(mask: Mask, grid: Grid) -> Tensor | None:
    """(n, 3): row, begin and end of each packed sequence.

    None where a sequence is in several pieces or out of order, or where the mask is not relative.
    """
    if not (grid.is_square and is_relative(mask)) or grid.q_seg is None:
        return None
    segments, positions = grid.q_seg, grid.q_pos
    real = segments != 0
    is_start, is_end = real.clone(), real.clone()
    same = segments[:, 1:] == segments[:, :-1]
    is_start[:, 1:] &= ~same
    is_end[:, :-1] &= ~same
    begin, end = is_start.nonzero(), is_end.nonzero()
    spans = torch.cat([begin, end[:, 1:] + 1], 1)
    row_segments = torch.stack([segments[begin[:, 0], begin[:, 1]], begin[:, 0]], 1)
    if len(row_segments.unique(dim=0)) != len(begin):  # a segment starts twice: it is in several pieces
        return None
    if positions is not None and not bool((positions.diff(dim=1) == 1)[same & real[:, 1:]].all()):
        return None
    return spans


def split_rows(mask: Mask, grid: Grid) -> list[list[Run]] | None:
    """The sequences of each row and the padding between them, end to end; None where `segment_spans` is."""
    spans = segment_spans(mask, grid)
    if spans is None or grid.q_seg is None:
        return None
    rows: list[list[Run]] = [[] for _ in grid.q_seg]
    covered = [0] * len(rows)
    # an empty span closes every row
    row_ends = [[row, grid.queries, grid.queries] for row in range(len(rows))]
    for row, begin, end in spans.tolist() + row_ends:
        if begin > covered[row]:
            rows[row].append(Run(begin - covered[row], False))
        if end > begin:
            rows[row].append(Run(end - begin, True))
        covered[row] = end
    return rows
