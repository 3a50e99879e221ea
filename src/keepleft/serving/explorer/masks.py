"""Mask playground: what a mask shows in a padded or packed row, its faults, and its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.attention.backends.sdpa import BuiltinMask, builtin_mask
from keepleft.attention.grid import Grid
from keepleft.attention.mask_plot import faults
from keepleft.attention.masks import MAX_CHARACTERS, Mask, parse_mask, window_size
from keepleft.models.stack import positions_from_segments
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.params import Params

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

MAX_LENGTH = 512  # slots of a row
MAX_FAULTS = 5  # listed one by one


def mask(explorer: Explorer, params: Params) -> dict[str, Any]:
    """The table of a mask expression over one row, its faults, and what it costs."""
    parsed_mask = _parse(params.text("expression", max_characters=MAX_CHARACTERS))
    length = params.integer("length", 1, MAX_LENGTH)
    segments = _segments(params, length)
    positions = positions_from_segments(segments)
    grid = Grid(length, length, 0, positions, positions, segments, segments)
    visible = grid.table(parsed_mask, batch=1, heads=1, device=torch.device("cpu"))[0, 0]
    return {
        "mask": str(parsed_mask),
        "visible_bits": wire.bits(visible),
        "rows": length,
        "columns": length,
        "faults": _faults(parsed_mask, int(positions.max()) + 1),
        "cost": _cost(parsed_mask, visible, segments),
    }


def _parse(expression: str) -> Mask:
    try:
        parsed_mask = parse_mask(expression)
    except TypeError as error:
        raise ValueError(f"{expression!r} is not a mask: {error}") from error
    if parsed_mask.rows is not None:
        raise ValueError(
            f"{parsed_mask} is for {parsed_mask.rows} rows, and one is drawn here: give one number, such as "
            "prefix(3)"
        )
    return parsed_mask


def _segments(params: Params, length: int) -> Tensor:
    """(1, length) segments: padding, packed texts, padding.

    Where the texts do not fill the row, the rest is one more text.
    """
    padding = params.object("padding", ("left", "right"))
    left, right = padding.integer("left", 0, length, 0), padding.integer("right", 0, length, 0)
    text_lengths = params.integers("packing", MAX_LENGTH + 1, MAX_LENGTH, [])
    if 0 in text_lengths:
        raise ValueError("packing holds 0: each text must have at least 1 token")
    leftover = length - left - right - sum(text_lengths)
    if leftover < 0 or left + right >= length:
        raise ValueError(
            f"padding {left} + {right} and texts of {sum(text_lengths)} tokens do not fit a row of {length}: "
            "make it longer, or one of them shorter"
        )
    row = [0] * left
    for segment, size in enumerate([*text_lengths, *([leftover] if leftover else [])], 1):
        row += [segment] * size
    return torch.tensor([row + [0] * right])


def _faults(parsed_mask: Mask, length: int) -> list[str]:
    messages = faults(parsed_mask, length)
    if len(messages) > MAX_FAULTS:
        return [*messages[:MAX_FAULTS], f"and {len(messages) - MAX_FAULTS:,} more"]
    return messages


def _cost(parsed_mask: Mask, visible: Tensor, segments: Tensor) -> dict[str, Any]:
    length, num_visible = len(visible), int(visible.sum())
    return {
        "visible": num_visible,
        "total": visible.numel(),
        "fraction": num_visible / visible.numel(),
        "note": _kernel_note(parsed_mask, length, segments),
    }


def _kernel_note(parsed_mask: Mask, length: int, segments: Tensor) -> str:
    """How a fused kernel computes it, in a sentence."""
    if bool((segments != 1).any()):
        return (
            "Texts are attended one by one, and padding costs nothing, "
            "where the mask looks at distances alone."
        )
    window_length = window_size(parsed_mask)
    match builtin_mask(parsed_mask, Grid(length, length)):
        case BuiltinMask.FULL:
            return "A fused kernel does this without a table; twice the tokens cost four times as much."
        case BuiltinMask.CAUSAL:
            return "A fused kernel does this without a table, and skips the half that is hidden."
    if window_length is not None:
        return (
            f"Each token looks at {window_length} at most: twice the tokens cost twice as much, "
            "not four times."
        )
    return (
        f"No fused kernel knows this mask: it gets a table of {length:,} × {length:,}, "
        "or one compiled for it on a GPU."
    )
