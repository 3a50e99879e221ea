"""The verdict of an audit as a small SVG picture, for a README."""

from __future__ import annotations

from math import ceil

from keepleft.auditing.report import CLEAN, LEAK, UNCHECKED
from keepleft.svg import PAPER, escape_attribute, text, title_tag, width

LABEL = "no peeking"
COLORS = {CLEAN: "#1b7a3d", LEAK: "#b8340a", UNCHECKED: "#8a5a00"}  # with 4.5 : 1 contrast to white
LABEL_COLOR = "#3d464f"
HEIGHT = 20
PADDING = 7
FONT_SIZE = 11


def badge(verdict: str) -> str:
    """The picture for clean, leak or unchecked. It needs no font and no file of its own."""
    left = ceil(width(LABEL, FONT_SIZE)) + 2 * PADDING
    right = ceil(width(verdict, FONT_SIZE)) + 2 * PADDING
    name = f"{LABEL}: {verdict}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{HEIGHT}" '
            f'viewBox="0 0 {left + right} {HEIGHT}" font-family="sans-serif" role="img" '
            f'aria-label="{escape_attribute(name)}">',
            title_tag(name),
            f'<rect width="{left + right}" height="{HEIGHT}" rx="3" fill="{LABEL_COLOR}"/>',
            f'<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v{HEIGHT - 6}a3 3 0 0 1 -3 3h-{right - 3}z" '
            f'fill="{COLORS[verdict]}"/>',
            text(left / 2, 14, LABEL, anchor="middle", fill=PAPER, size=FONT_SIZE),
            text(left + right / 2, 14, verdict, anchor="middle", bold=True, fill=PAPER, size=FONT_SIZE),
            "</svg>\n",
        ]
    )
