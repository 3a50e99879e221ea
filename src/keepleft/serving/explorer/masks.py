"""A mask to play with: what it lets be seen in a padded or packed row, what is wrong with it, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.attention.backends.sdpa import Whole, known
from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask, window_size
from keepleft.attention.picture import faults
from keepleft.attention.reading import LONGEST
from keepleft.attention.reading import mask as read
from keepleft.models.stack import positions_of
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.given import Given

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

LENGTH = 512  # slots of a row
FAULTS = 5    # that are told one by one


def mask(explorer: Explorer, given: Given) -> dict[str, Any]:
    found = _read(given.text("expression", most=LONGEST))
    length = given.whole("length", 1, LENGTH)
    segments = _laid(given, length)
    positions = positions_of(segments)
    grid = Grid(length, length, 0, positions, positions, segments, segments)
    seen = grid.table(found, batch=1, heads=1, device=torch.device("cpu"))[0, 0]
    return {"mask": str(found), "seen_bits": wire.bits(seen), "rows": length, "columns": length,
            "faults": _faults(found, int(positions.max()) + 1), "cost": _cost(found, seen, segments)}


def _read(expression: str) -> Mask:
    try:
        out = read(expression)
    except TypeError as error:
        raise ValueError(f"{expression!r} is not a mask: {error}") from error
    if out.rows is not None:
        raise ValueError(f"{out} speaks of {out.rows} rows, and one is drawn here: give one number, such as prefix(3)")
    return out


def _laid(given: Given, length: int) -> Tensor:
    """(1, length) segments: padding on the left, texts, padding on the right. What the packing leaves over is one more text."""
    around = given.object("padding", ("left", "right"))
    left, right = around.whole("left", 0, length, 0), around.whole("right", 0, length, 0)
    texts = given.numbers("packing", LENGTH + 1, LENGTH, [])
    if 0 in texts:
        raise ValueError("packing holds 0: each text must have at least 1 token")
    over = length - left - right - sum(texts)
    if over < 0 or left + right >= length:
        raise ValueError(f"padding {left} + {right} and texts of {sum(texts)} tokens do not fit a row of {length}: make it "
                         "longer, or one of them shorter")
    out = [0] * left
    for number, size in enumerate([*texts, *([over] if over else [])], 1):
        out += [number] * size
    return torch.tensor([out + [0] * right])


def _faults(found: Mask, length: int) -> list[str]:
    told = faults(found, length)
    return told[:FAULTS] + ([f"and {len(told) - FAULTS:,} more"] if len(told) > FAULTS else [])


def _cost(found: Mask, seen: Tensor, segments: Tensor) -> dict[str, Any]:
    length, count = len(seen), int(seen.sum())
    return {"seen": count, "all": seen.numel(), "share": count / seen.numel(),
            "words": _kernel(found, length, segments)}


def _kernel(found: Mask, length: int, segments: Tensor) -> str:
    """What a fused kernel makes of it."""
    if bool((segments != 1).any()):
        return "Texts are attended one by one, and padding costs nothing, where the mask looks at distances alone."
    near = window_size(found)
    match known(found, Grid(length, length)):
        case Whole.EVERYTHING:
            return "A fused kernel does this without a table; twice the tokens cost four times as much."
        case Whole.TRIANGLE:
            return "A fused kernel does this without a table, and skips the half that is hidden."
    if near is not None:
        return f"Each token looks at {near} at most: twice the tokens cost twice as much, not four times."
    return f"No fused kernel knows this mask: it gets a table of {length:,} × {length:,}, or one compiled for it on a GPU."
