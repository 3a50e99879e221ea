"""Line and bar charts as .svg files. Dashes and hatching tell the series apart without colour too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepleft import svg
from keepleft.svg import BLUE, FAINT, INK, LETTER_WIDTH, PAPER, text, title_tag

COLOURS = (BLUE, "#c2410c", "#2e7d32", "#7b3fa0", "#8a6d00", "#444444")
DASHES = ("", "7 4", "2 3", "10 3 2 3", "4 2", "1 2")
WIDTH = 720  # of the picture
HEIGHT = 300  # of the plot area
# the margins around the plot area
LEFT = 74
RIGHT = 24
TOP = 66
BOTTOM = 52
LABEL_ROOM = 1.05  # how far above the highest bar the axis reaches, for the label of the bar

Point = tuple[float, float]


def line_chart(
    path: str | Path,
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_y: bool = False,
    captions: Sequence[tuple[str, str]] = (),
) -> Path:
    """Draw a curve for each series of (x, y) into an .svg file; `captions` are (name, text) lines below it.

    A point that has no place on its axis (not finite, or not above 0 where the axis is logarithmic) is left
    out. Raises ValueError if no point is left.
    """
    finite_series = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log_y)]
        for name, points in series.items()
    }
    xs = [x for points in finite_series.values() for x, _ in points]
    ys = [y for points in finite_series.values() for _, y in points]
    x_axis = _axis(xs, LEFT, WIDTH - RIGHT, log=False, title=title)
    y_axis = _axis(ys, TOP + HEIGHT, TOP, log=log_y, title=title)
    out = [
        *_draw_y_ticks(y_axis, y_label),
        text((LEFT + WIDTH - RIGHT) / 2, TOP + HEIGHT + 38, x_label, anchor="middle"),
        *(
            text(x_axis.to_pixels(tick), TOP + HEIGHT + 18, _format_number(tick), anchor="middle")
            for tick in x_axis.ticks
        ),
    ]
    for n, (name, points) in enumerate(finite_series.items()):
        pixels = [f"{x_axis.to_pixels(x):.1f},{y_axis.to_pixels(y):.1f}" for x, y in points]
        if len(pixels) == 1:
            pixels *= 2  # a single point is a dot: a line to itself with round ends
        out.append(
            f'<polyline points="{" ".join(pixels)}" fill="none" {_stroke(n)}>{title_tag(name)}</polyline>'
        )
    legend_keys = [
        f'<line x1="{{x:g}}" y1="{{y:g}}" x2="{{to:g}}" y2="{{y:g}}" {_stroke(n)}/>'
        for n in range(len(finite_series))
    ]
    return _write_chart(path, title, [*out, *_legend(list(finite_series), legend_keys)], captions)


def bar_chart(
    path: str | Path,
    series: Mapping[str, Sequence[float]],
    groups: Sequence[str],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_y: bool = False,
    captions: Sequence[tuple[str, str]] = (),
) -> Path:
    """Draw a group of bars for each name in `groups` into an .svg file: one bar for each series, labelled.

    Bars stand on 0; on a logarithmic axis they stand on 1 or, if some value is smaller, on a round number
    below it. Raises ValueError if a series has another number of values, or a value no place on the axis.
    """
    if wrong_counts := {name: len(values) for name, values in series.items() if len(values) != len(groups)}:
        raise ValueError(
            f"the chart {title!r} has {len(groups)} groups, but {wrong_counts} values: give one for each "
            "group"
        )
    values = [value for heights in series.values() for value in heights]
    for value in values:
        if not math.isfinite(value) or value < 0 or (log_y and value == 0):
            raise ValueError(
                f"a bar of the chart {title!r} is {value}: it must be {'above' if log_y else 'at least'} 0"
            )
    label_room = max(values, default=0.0) * LABEL_ROOM
    y_axis = _axis([*values, label_room, 1.0 if log_y else 0.0], TOP + HEIGHT, TOP, log=log_y, title=title)
    group_width = (WIDTH - LEFT - RIGHT) / len(groups)
    bar_width = min(64.0, 0.8 * group_width / len(series))
    out = [
        *_draw_y_ticks(y_axis, y_label),
        text((LEFT + WIDTH - RIGHT) / 2, TOP + HEIGHT + 38, x_label, anchor="middle"),
    ]
    for g, group in enumerate(groups):
        center = LEFT + (g + 0.5) * group_width
        out.append(text(center, TOP + HEIGHT + 18, group, anchor="middle"))
        for n, (name, heights) in enumerate(series.items()):
            bar_left = center + (n - len(series) / 2) * bar_width
            bar_top = y_axis.to_pixels(heights[g])
            tooltip = title_tag(f"{name}, {group}: {heights[g]:g}")
            out.append(
                f'<rect x="{bar_left + 1:.1f}" y="{bar_top:.1f}" width="{bar_width - 2:.1f}" '
                f'height="{TOP + HEIGHT - bar_top:.1f}" {_fill(n)}>{tooltip}</rect>'
            )
            out.append(
                text(
                    bar_left + bar_width / 2,
                    bar_top - 5,
                    _format_number(float(f"{heights[g]:.3g}")),
                    anchor="middle",
                )
            )
    legend_keys = [
        f'<rect x="{{x:g}}" y="{{above:g}}" width="26" height="11" {_fill(n)}/>' for n in range(len(series))
    ]
    return _write_chart(
        path, title, [_hatching(len(series)), *out, *_legend(list(series), legend_keys)], captions
    )


# axes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Maps values between `low` and `high` to pixels between `begin` and `end`."""

    low: float
    high: float
    begin: float
    end: float
    ticks: list[float]
    log: bool

    def to_pixels(self, value: float) -> float:
        low, high, scaled_value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.begin + (scaled_value - low) / (high - low) * (self.end - self.begin)


def _axis(values: Sequence[float], begin: float, end: float, *, log: bool, title: str) -> Axis:
    if not values:
        raise ValueError(f"the chart {title!r} has no point to draw: give at least one number")
    ticks = (log_ticks if log else nice_ticks)(min(values), max(values))
    return Axis(ticks[0], ticks[-1], begin, end, ticks, log)


def nice_ticks(low: float, high: float) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, from at most low to at least high."""
    if low == high:
        low, high = min(low, 0.0), max(high, 0.0) or low + 1.0
    if 0 < low < 0.5 * high:
        low = 0.0  # a curve that falls far is shown down to zero
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    return [n * spacing for n in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from at most low to at least high, nine at most.

    Over two decades or fewer also 2 and 5 times each power.
    """
    first = math.floor(math.log10(low) + 1e-9)
    last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
    if last - first > 2:
        spacing = -(-(last - first) // 8)
        return [10.0**power for power in range(first, last + spacing, spacing)]
    candidates = [n * 10.0**power for power in range(first, last + 1) for n in (1, 2, 5)]
    begin = max(n for n, tick in enumerate(candidates) if tick <= low * (1 + 1e-9))
    end = min(n for n, tick in enumerate(candidates) if tick >= high * (1 - 1e-9))
    return candidates[begin : max(end, begin + 1) + 1]


def _draw_y_ticks(y_axis: Axis, y_label: str) -> list[str]:
    out = []
    for tick in y_axis.ticks:
        level = y_axis.to_pixels(tick)
        out.append(
            f'<line x1="{LEFT}" y1="{level:.1f}" x2="{WIDTH - RIGHT}" y2="{level:.1f}" '
            f'stroke="{INK if tick == y_axis.ticks[0] else FAINT}"/>'
        )
        out.append(text(LEFT - 8, level + 4, _format_number(tick), anchor="end"))
    return [*out, text(18, TOP + HEIGHT / 2, y_label, anchor="middle", vertical=True)]


def _format_number(number: float) -> str:
    """A number in few characters: 20,000 and 0.05 and 1e-07."""
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e7 else f"{number:.6g}"


# the picture --------------------------------------------------------------------------------


def _stroke(n: int) -> str:
    colour = COLOURS[n % len(COLOURS)]
    dash = DASHES[n % len(DASHES)]
    dash_style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{colour}" stroke-width="2.2" stroke-linejoin="round" stroke-linecap="round"{dash_style}'


def _fill(n: int) -> str:
    colour = COLOURS[n % len(COLOURS)]
    return f'fill="{colour if n == 0 else f"url(#hatch{n})"}" stroke="{colour}"'


def _hatching(count: int) -> str:
    """Definitions of stripes at a different angle for each series; the first is filled plainly."""
    out = []
    for n in range(1, count):
        angle = (90, 45, -45, 0)[n % 4]
        out.append(
            f'<pattern id="hatch{n}" width="7" height="7" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate({angle})"><rect width="7" height="7" fill="{PAPER}"/>'
            f'<rect width="3.5" height="7" fill="{COLOURS[n % len(COLOURS)]}"/></pattern>'
        )
    return f"<defs>{''.join(out)}</defs>"


def _legend(names: list[str], keys: list[str]) -> list[str]:
    """`keys` are the samples of line or fill: SVG with {x}, {to}, {y} and {above} to be filled in."""
    out = []
    x = float(LEFT)
    for name, key in zip(names, keys, strict=True):
        out += [key.format(x=x, to=x + 26, y=48, above=42), text(x + 33, 52, name)]
        x += 33 + len(name) * LETTER_WIDTH + 26
    return out


def _write_chart(
    path: str | Path, title: str, elements: list[str], captions: Sequence[tuple[str, str]]
) -> Path:
    height = TOP + HEIGHT + BOTTOM
    name_width = max((len(name) for name, _ in captions), default=0) * (LETTER_WIDTH + 1.2)  # names are bold
    caption_left = 16 + name_width + 14
    for name, caption in captions:
        height += 19
        if name:
            elements = [
                *elements,
                text(16, height - 6, name, bold=True),
                text(caption_left, height - 6, svg.truncate(caption, WIDTH - caption_left - 10)),
            ]
    return svg.write_svg(path, title, WIDTH, height + (14 if captions else 0), elements)
