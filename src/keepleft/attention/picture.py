"""A mask to look at: as a table, as text, as a picture, and in words where it is suspicious."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from torch import Tensor

from keepleft.attention.masks import Mask

SEEN, HIDDEN, LINE, INK = "#1f5fa8", "#eef2f6", "#ffffff", "#222222"  # blue on pale grey: told apart without colour too


def table(mask: Mask, n: int, *, row: int = 0, head: int = 0) -> Tensor:
    """The mask over the first n positions, as an (n, n) boolean matrix; True is "may look"."""
    if not isinstance(mask, Mask):
        raise TypeError(f"{mask!r} is no mask: give one such as causal & window(3)")
    if n < 1:
        raise ValueError(f"a table of {n} positions is none: ask for at least 1")
    i = torch.arange(n)
    return mask(torch.tensor(row), torch.tensor(head), i[:, None], i[None, :]).expand(n, n)


def draw(mask: Mask, n: int, *, row: int = 0, head: int = 0) -> str:
    """The table as text: a line for each query, ■ where it may look."""
    return "\n".join(" ".join("■" if seen else "·" for seen in line) for line in table(mask, n, row=row, head=head).tolist())


def faults(mask: Mask, n: int, *, row: int = 0, head: int = 0) -> list[str]:
    """What a reader should know before trusting this mask on n positions to keep to the left."""
    seen = table(mask, n, row=row, head=head)
    out = [f"position {q} sees position {k}, its future" for q, k in seen.triu(1).nonzero().tolist()]
    return out + [f"position {q} sees nothing" for q in (~seen.any(1)).nonzero().flatten().tolist()]


def picture(mask: Mask, n: int, path: str | Path, *, labels: list[str] | None = None, row: int = 0, head: int = 0) -> Path:
    """Draw the table into an .svg or .png file; labels name the positions (in the .svg)."""
    path = Path(path)
    seen = table(mask, n, row=row, head=head)
    if labels is not None and len(labels) != n:
        raise ValueError(f"{len(labels)} labels for {n} positions: give one for each")
    if path.suffix == ".svg":
        data = _svg(seen, repr(mask), labels or [str(i) for i in range(n)]).encode()
    elif path.suffix == ".png":
        data = _png(seen)
    else:
        raise ValueError(f"{path.name!r} is neither .svg nor .png")
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)
    return path


def _svg(seen: Tensor, title: str, labels: list[str]) -> str:
    n, cell, size = len(seen), 22, 12
    if n > 64:
        labels, cell = [""] * n, max(2, 1400 // n)
    left = 14 + max((len(label) for label in labels), default=0) * 8
    top = 40 + left
    width, height = left + n * cell + 20, top + n * cell + 20
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           f'font-family="sans-serif" font-size="{size}" fill="{INK}" role="img">',
           f"<title>{escape(title)}</title>", f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="10" y="22" font-size="14" font-weight="bold">{escape(title)}</text>']
    for i, label in enumerate(labels):
        if label:
            middle = i * cell + cell / 2
            out.append(f'<text x="{left - 6}" y="{top + middle + 4:g}" text-anchor="end">{escape(label)}</text>')
            out.append(f'<text transform="translate({left + middle + 4:g} {top - 6}) rotate(-90)">{escape(label)}</text>')
    for q, line in enumerate(seen.tolist()):
        for k, on in enumerate(line):
            out.append(f'<rect x="{left + k * cell}" y="{top + q * cell}" width="{cell - 1}" height="{cell - 1}" '
                       f'fill="{SEEN if on else HIDDEN}"/>')
    return "\n".join([*out, "</svg>\n"])


def _png(seen: Tensor) -> bytes:
    n = len(seen)
    cell = max(1, min(24, 1440 // n))
    on, off, line = (torch.tensor([int(colour[i:i + 2], 16) for i in (1, 3, 5)], dtype=torch.uint8)
                     for colour in (SEEN, HIDDEN, LINE))
    pixels = torch.where(seen[..., None], on, off).repeat_interleave(cell, 0).repeat_interleave(cell, 1).contiguous()
    if cell > 3:
        pixels[cell - 1::cell] = line
        pixels[:, cell - 1::cell] = line
    rows = torch.cat([torch.zeros(n * cell, 1, dtype=torch.uint8), pixels.flatten(1)], 1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", n * cell, n * cell, 8, 2, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.numpy().tobytes(), 9))
            + chunk(b"IEND", b""))
