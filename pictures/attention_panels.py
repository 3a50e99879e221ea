"""Self-attention, masked self-attention and cross-attention of one translation, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepleft import svg

CELL_SIZE = 22
GAP = 26  # between panels
TOP = 86  # of the panels, below title and subtitle
LEGEND = (
    "rows are queries (in the decoder, the word being written), columns are keys;",
    "the stronger the colour, the larger the weight;  hatched: hidden by the mask",
)


@dataclass(frozen=True)
class Panel:
    """One attention matrix."""

    name: str
    meaning: str  # what is attended to, in words
    place: str  # layer and head
    queries: Sequence[str]
    keys: Sequence[str]
    weights: Sequence[Sequence[float]]
    visible: Sequence[Sequence[bool]]


def draw_panels(panels: Sequence[Panel], subtitle: str) -> tuple[float, float, list[str]]:
    """(width, height, elements) of the panels, from left to right."""
    out = [
        svg.text(svg.MARGIN, 47, subtitle, size=14),
        f'<defs><pattern id="hidden" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="1.2" height="6" fill="{svg.FAINT}"/></pattern></defs>',
    ]
    column_height = max(svg.width(key, 14) for panel in panels for key in panel.keys) + 12
    top = TOP + 36 + column_height
    x = float(svg.MARGIN)
    for panel in panels:
        left = x + max(svg.width(query, 14) for query in panel.queries) + 10
        out += _draw_panel(panel, x, left, top)
        words = max(svg.width(panel.name, 15), svg.width(panel.meaning, 13), svg.width(panel.place, 13))
        x = max(left + CELL_SIZE * len(panel.keys), x + words) + GAP
    bottom = top + CELL_SIZE * max(len(panel.queries) for panel in panels)
    for n, line in enumerate(LEGEND):
        out.append(svg.text(svg.MARGIN, bottom + 30 + 19 * n, line, fill=svg.DIM, size=13))
    return x - GAP + svg.MARGIN, bottom + 67, out


def _draw_panel(panel: Panel, x: float, left: float, top: float) -> list[str]:
    out = [
        svg.text(x, TOP - 10, panel.name, bold=True, size=15),
        svg.text(x, TOP + 8, panel.meaning, fill=svg.DIM, size=13),
        svg.text(x, TOP + 25, panel.place, fill=svg.DIM, size=13),
    ]
    for m, key in enumerate(panel.keys):
        out.append(svg.text(left + m * CELL_SIZE + CELL_SIZE / 2 + 4, top - 8, key, size=14, vertical=True))
    for n, query in enumerate(panel.queries):
        y = top + n * CELL_SIZE
        out.append(svg.text(left - 8, y + CELL_SIZE / 2 + 4, query, anchor="end", size=14))
        for m, key in enumerate(panel.keys):
            weight = panel.weights[n][m]
            fill = f'fill="{svg.BLUE}" fill-opacity="{max(0.05, weight):.3f}"'
            if not panel.visible[n][m]:
                fill = 'fill="url(#hidden)"'
            out.append(
                f'<rect x="{left + m * CELL_SIZE:.1f}" y="{y:.1f}" width="{CELL_SIZE - 2}" '
                f'height="{CELL_SIZE - 2}" {fill}>'
                f"{svg.title_tag(f'{query} ← {key}: {weight:.2f}')}</rect>"
            )
    return out
