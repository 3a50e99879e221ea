"""Masks made visible: as text, as an SVG or PNG, and their faults in words."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from keepleft import svg
from keepleft.attention.masks import Mask, mask_table
from keepleft.disk import atomic

VISIBLE_COLOUR = svg.BLUE
HIDDEN_COLOUR = "#eef2f6"
GRID_COLOUR = svg.PAPER  # blue on pale grey: distinguishable in black and white too


def draw(mask: Mask, n: int, *, row: int = 0, head: int = 0) -> str:
    """The mask as text: a line for each query, ■ where it may attend."""
    return "\n".join(
        " ".join("■" if visible else "·" for visible in line)
        for line in mask_table(mask, n, row=row, head=head).tolist()
    )


def faults(mask: Mask, n: int, *, row: int = 0, head: int = 0) -> list[str]:
    """What is wrong with this mask as a causal one on n positions: futures seen, queries that see nothing."""
    visible = mask_table(mask, n, row=row, head=head)
    out = [f"position {q} sees position {k}, its future" for q, k in visible.triu(1).nonzero().tolist()]
    return out + [f"position {q} sees nothing" for q in (~visible.any(1)).nonzero().flatten().tolist()]


def picture(
    mask: Mask, n: int, path: str | Path, *, labels: list[str] | None = None, row: int = 0, head: int = 0
) -> Path:
    """Write the mask to an .svg or .png file; labels name the positions (in the .svg)."""
    path = Path(path)
    visible = mask_table(mask, n, row=row, head=head)
    if labels is not None and len(labels) != n:
        raise ValueError(f"{len(labels)} labels for {n} positions: give one for each")
    if path.suffix == ".svg":
        return _write_svg(path, visible, repr(mask), labels or [str(i) for i in range(n)])
    if path.suffix != ".png":
        raise ValueError(f"{path.name!r} is neither .svg nor .png")
    with atomic.atomic_file(path) as temporary:
        temporary.write_bytes(_encode_png(visible))
    return path


def _write_svg(path: Path, visible: Tensor, title: str, labels: list[str]) -> Path:
    n = len(visible)
    cell = 22
    if n > 64:
        labels = [""] * n
        cell = max(2, 1400 // n)
    left = 14 + max((len(label) for label in labels), default=0) * 8
    top = 40 + left
    out = []
    for i, label in enumerate(labels):
        if label:
            middle = i * cell + cell / 2
            out.append(svg.text(left - 6, top + middle + 4, label, anchor="end"))
            out.append(svg.text(left + middle + 4, top - 6, label, vertical=True))
    for q, line in enumerate(visible.tolist()):
        for k, is_visible in enumerate(line):
            out.append(
                f'<rect x="{left + k * cell}" y="{top + q * cell}" width="{cell - 1}" height="{cell - 1}" '
                f'fill="{VISIBLE_COLOUR if is_visible else HIDDEN_COLOUR}"/>'
            )
    return svg.write_svg(path, title, left + n * cell + 20, top + n * cell + 20, out)


def _encode_png(visible: Tensor) -> bytes:
    n = len(visible)
    cell = max(1, min(24, 1440 // n))
    visible_colour, hidden_colour, grid_colour = (
        torch.tensor([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=torch.uint8)
        for colour in (VISIBLE_COLOUR, HIDDEN_COLOUR, GRID_COLOUR)
    )
    pixels = (
        torch.where(visible[..., None], visible_colour, hidden_colour)
        .repeat_interleave(cell, 0)
        .repeat_interleave(cell, 1)
        .contiguous()
    )
    if cell > 3:
        pixels[cell - 1 :: cell] = grid_colour
        pixels[:, cell - 1 :: cell] = grid_colour
    scanlines = torch.cat([torch.zeros(n * cell, 1, dtype=torch.uint8), pixels.flatten(1)], 1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", n * cell, n * cell, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(scanlines.numpy().tobytes(), 9))
        + chunk(b"IEND", b"")
    )
