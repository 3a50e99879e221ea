"""The report of an audit as a picture: the verdict, who may see whom, who does, and the finding in words."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from keepleft import svg
from keepleft.attention.mask_plot import HIDDEN_COLOUR
from keepleft.auditing.report import KINDS
from theme import GREEN, RED

CELL_SIZE = 21
LEFT = 62  # of the first matrix
TOP = 142
WIDTH = 860
LETTERS_PER_LINE = 140
DrawCell = Callable[[float, float, bool, float], list[str]]
MIN_SIZE = 1e-3  # smaller influences are drawn like this one


def draw_report(report: Mapping[str, Any]) -> tuple[float, float, list[str]]:
    """(width, height, elements) of a report with a finding."""
    finding = report["findings"][0]
    side = CELL_SIZE * len(report["claimed"])
    right = LEFT + side + 74
    out = [
        svg.text(svg.MARGIN, 54, "✗ leak", bold=True, fill=RED, size=15),
        svg.text(svg.MARGIN + 62, 54, f"does not keep to its claim, {report['claim']}", size=15),
        *_draw_checks(report),
        *_draw_matrix("who may influence whom (the claim)", LEFT, report, _draw_claimed),
        *_draw_matrix("who does (measured)", right, report, _draw_measured),
        *_draw_legend(right + side + 30),
    ]
    y = TOP + side + 40.0
    out.append(
        svg.text(svg.MARGIN, y, f"1. {finding['kind']} in {finding['module']}", bold=True, fill=RED, size=13)
    )
    for line in textwrap.wrap(finding["message"], LETTERS_PER_LINE):
        y += 19
        out.append(svg.text(svg.MARGIN + 18, y, line))
    for field in ("path", "line"):
        y += 19
        out.append(svg.text(svg.MARGIN + 18, y, field, fill=svg.DIM))
        out.append(svg.text(svg.MARGIN + 58, y, finding[field]))
    return WIDTH, y + 24, out


def _draw_checks(report: Mapping[str, Any]) -> list[str]:
    """One badge for each kind of leak: found, not found, not checked."""
    leaking = {finding["kind"] for finding in report["findings"]}
    out, x = [], float(svg.MARGIN)
    for kind in KINDS:
        if kind in leaking:
            symbol, colour = "✗", RED
        else:
            symbol, colour = ("✓", GREEN) if kind in report["checked"] else ("–", svg.DIM)
        width = 34 + svg.width(kind)
        out.append(
            f'<rect x="{x:.1f}" y="68" width="{width:.1f}" height="24" rx="5" fill="none" '
            f'stroke="{RED if kind in leaking else svg.FAINT}"/>'
        )
        out.append(svg.text(x + 9, 84, symbol, bold=True, fill=colour))
        out.append(svg.text(x + 24, 84, kind, fill=svg.INK if colour != svg.DIM else svg.DIM))
        x += width + 7
    return [*out, svg.text(x + 8, 84, "✗ leaks   ✓ nothing found   – not checked", fill=svg.DIM)]


def _draw_legend(left: float) -> list[str]:
    entries = [
        (_draw_claimed, True, 0.0, "may influence"),
        (_draw_measured, True, 0.5, "does, as it may"),
        (_draw_measured, False, 0.5, "does, and may not"),
        (_draw_measured, False, 0.0, "does not"),
    ]
    out = []
    for n, (draw_cell, allowed, size, label) in enumerate(entries):
        y = TOP + 30 * n
        out += [*draw_cell(left, y, allowed, size), svg.text(left + CELL_SIZE + 8, y + 14, label)]
    return out


def _draw_matrix(name: str, left: float, report: Mapping[str, Any], draw_cell: DrawCell) -> list[str]:
    """Readers from top to bottom, sources from left to right."""
    size = len(report["claimed"])
    middle = left + CELL_SIZE * size / 2
    out = [svg.text(middle, TOP - 22, name, anchor="middle", bold=True)]
    for n in range(0, size, 2):
        center = CELL_SIZE * (n + 0.5)
        out.append(svg.text(left + center, TOP - 6, str(n), anchor="middle", fill=svg.DIM, size=10))
        out.append(svg.text(left - 6, TOP + center + 4, str(n), anchor="end", fill=svg.DIM, size=10))
    for q in range(size):
        for k in range(size):
            x, y = left + k * CELL_SIZE, TOP + q * CELL_SIZE
            out += draw_cell(x, y, report["claimed"][q][k], report["measured"][q][k])
    return [
        *out,
        svg.text(
            left - 34, TOP + CELL_SIZE * size / 2, "reader", anchor="middle", fill=svg.DIM, vertical=True
        ),
    ]


def _draw_claimed(x: float, y: float, allowed: bool, _: float) -> list[str]:
    return [_square(x, y, svg.BLUE if allowed else HIDDEN_COLOUR, 0.55 if allowed else 1.0)]


def _draw_measured(x: float, y: float, allowed: bool, size: float) -> list[str]:
    """A cross where the claim is broken, so that shape tells it as well as colour."""
    level = 1 - math.log10(min(1.0, max(size, MIN_SIZE))) / math.log10(MIN_SIZE) if size else 0.0
    if not size:
        return [_square(x, y, HIDDEN_COLOUR, 1.0)]
    if allowed:
        return [_square(x, y, svg.BLUE, 0.25 + 0.75 * level)]
    near, far = 6, CELL_SIZE - 8
    way = far - near
    cross = (
        f'<path d="M{x + near:g} {y + near:g}l{way} {way}m0 {-way}l{-way} {way}" '
        f'stroke="{svg.PAPER}" stroke-width="2"/>'
    )
    return [_square(x, y, RED, 1.0), cross]


def _square(x: float, y: float, fill: str, opacity: float) -> str:
    shade = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    side = CELL_SIZE - 2
    return f'<rect x="{x:g}" y="{y:g}" width="{side}" height="{side}" rx="2" fill="{fill}"{shade}/>'
