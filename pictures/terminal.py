"""An animated terminal as SVG: CSS alone, so that it also plays where a forge shows it as an <img>.

It begins with the first command and its output, so that the screen is never blank. Without animation (a
printer, a reader who prefers no motion) it shows the last frame, which has everything.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from keepleft import svg
from theme import GREEN, PANEL, RED

COLUMNS = 97
FONT_SIZE = 14
LETTER_WIDTH = 8.43  # of a monospaced font of that size
LINE_HEIGHT = 20
MARGIN = 20
TITLE_HEIGHT = 38
SECONDS_PER_LETTER = 0.035
SECONDS_BEFORE_COMMAND = 0.4
SECONDS_BEFORE_OUTPUT = 0.5
SECONDS_PER_LINE = 0.06
SECONDS_TO_READ = 1.8  # after each output
SECONDS_AT_END = 7.0
PROMPT = "$ "
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
# what stands out in an output: a pattern, and the colour of what it matches
HIGHLIGHTS = (
    (re.compile(r"^(?:leak|✗)\b"), RED),
    (re.compile(r"^(?:clean|✓)\b"), GREEN),
    (re.compile(r"(?<=\d\. )(?:future|padding|cache) in [\w.]+"), RED),
    (re.compile(r"■"), svg.BLUE),
    (re.compile(r"^ +(?:path|line):"), svg.DIM),
)


@dataclass(frozen=True)
class Exchange:
    """A command and what it printed."""

    command: str
    output: str


class Timeline:
    """CSS rules for elements that appear, and for commands that are typed, at their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._rules: list[tuple[str, float, float | None, int]] = []

    def appear(self) -> str:
        """The class of an element that appears now."""
        return self._add(self.now, None, 0)

    def type_out(self, letters: int) -> str:
        """The class of a cover that gives the letters free, one by one, from now on; then it is over."""
        begin = self.now
        self.now += letters * SECONDS_PER_LETTER
        return self._add(begin, self.now, letters)

    def _add(self, begin: float, end: float | None, letters: int) -> str:
        self._rules.append((f"t{len(self._rules)}", begin, end, letters))
        return self._rules[-1][0]

    def css(self) -> str:
        percent = lambda second: f"{100 * second / self.now:.2f}%"
        out = [f"[class^=t]{{animation:{self.now:.1f}s step-end infinite}}"]
        for name, begin, end, letters in self._rules:
            if end is None:
                frames = f"0%{{opacity:0}}{percent(begin)},100%{{opacity:1}}"
            else:
                way = f"transform:translateX({letters * LETTER_WIDTH:.1f}px)"
                frames = (
                    f"0%{{opacity:0}}{percent(begin)}{{opacity:1;transform:none;"
                    f"animation-timing-function:steps({letters},end)}}"
                    f"{percent(end)}{{opacity:1;{way}}}{percent(end + 0.3)},100%{{opacity:0;{way}}}"
                )
            out.append(f"@keyframes {name}{{{frames}}}.{name}{{animation-name:{name}}}")
        out.append("@media (prefers-reduced-motion:reduce){[class^=t]{animation:none}}")
        return "\n".join(out)


def draw_terminal(exchanges: Sequence[Exchange], *, title: str) -> str:
    """The exchanges, one after the other, on one screen."""
    timeline = Timeline()
    elements: list[str] = []
    y = TITLE_HEIGHT + MARGIN + 4.0
    for n, exchange in enumerate(exchanges):
        if n:
            y += LINE_HEIGHT / 2
        elements += _draw_command(exchange.command, y, timeline if n else None)
        y += LINE_HEIGHT
        for line in _wrap(exchange.output):
            if n:
                elements.append(f'<g class="{timeline.appear()}">{_draw_line(line, y)}</g>')
                timeline.now += SECONDS_PER_LINE
            else:
                elements.append(_draw_line(line, y))
            y += LINE_HEIGHT
        timeline.now += SECONDS_TO_READ
    timeline.now += SECONDS_AT_END
    width = COLUMNS * LETTER_WIDTH + 2 * MARGIN
    height = y - LINE_HEIGHT + MARGIN
    dots = "".join(
        f'<circle cx="{MARGIN + 4 + 20 * n}" cy="{TITLE_HEIGHT / 2:g}" r="6" fill="{svg.FAINT}"/>'
        for n in range(3)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" font-family="{FONTS}" font-size="{FONT_SIZE}" '
            f'fill="{svg.INK}" role="img" aria-label="{svg.escape_attribute(title)}">',
            svg.title_tag(title),
            f"<style>text{{white-space:pre}}.cover{{opacity:0}}\n{timeline.css()}</style>",
            f'<clipPath id="screen"><rect x="1" y="{TITLE_HEIGHT}" width="{width - 2:.0f}" '
            f'height="{height - TITLE_HEIGHT - 2:.0f}"/></clipPath>',
            f'<rect x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="10" fill="{PANEL}" '
            f'stroke="{svg.FAINT}"/>',
            dots,
            f'<path d="M1 {TITLE_HEIGHT}H{width - 1:.0f}" stroke="{svg.FAINT}"/>',
            '<g clip-path="url(#screen)">',
            *elements,
            "</g>",
            "</svg>\n",
        ]
    )


def _draw_command(command: str, y: float, timeline: Timeline | None) -> list[str]:
    """The command behind a prompt, and a cover in the colour of the screen that moves away as it is typed.

    Without a timeline the command stands there from the beginning.
    """
    left = MARGIN + len(PROMPT) * LETTER_WIDTH
    top = y - FONT_SIZE
    prompt = _draw_text(MARGIN, y, "$", GREEN, bold=True)
    typed = prompt + _draw_text(left, y, command, svg.INK, bold=True)
    if timeline is None:
        return [typed]
    timeline.now += SECONDS_BEFORE_COMMAND
    line = f'<g class="{timeline.appear()}">{typed}</g>'
    cover = (
        f'<rect x="{left:.1f}" y="{top:g}" width="{COLUMNS * LETTER_WIDTH:.0f}" height="{LINE_HEIGHT}" '
        f'fill="{PANEL}"/>'
        f'<rect x="{left:.1f}" y="{top + 1:g}" width="{LETTER_WIDTH}" height="17" fill="{svg.DIM}"/>'
    )
    covered = f'<g class="{timeline.type_out(len(command))} cover">{cover}</g>'
    timeline.now += SECONDS_BEFORE_OUTPUT
    return [line, covered]


def _wrap(output: str) -> list[str]:
    """Lines no longer than the screen is wide; what is cut is indented like the beginning of its line."""
    lines = []
    for line in output.rstrip().splitlines():
        indent = re.match(r" *(?:\d+\. )?", line)
        assert indent is not None
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent=" " * len(indent[0])) or [""]
    return lines


def _draw_line(line: str, y: float) -> str:
    """A line of output, its highlights coloured."""
    spans = sorted(
        (match.start(), match.end(), colour)
        for pattern, colour in HIGHLIGHTS
        for match in pattern.finditer(line)
    )
    out, at = [], 0
    for begin, end, colour in [*spans, (len(line), len(line), svg.INK)]:
        for start, stop, fill in ((at, begin, svg.INK), (begin, end, colour)):
            text = line[start:stop].lstrip()
            if text:
                out.append(_draw_text(MARGIN + (stop - len(text)) * LETTER_WIDTH, y, text.rstrip(), fill))
        at = max(at, end)
    return "".join(out)


def _draw_text(x: float, y: float, text: str, fill: str, *, bold: bool = False) -> str:
    """Text as wide as its letters are many, whatever the font: drawings in letters stay in line."""
    style = f' fill="{fill}"' if fill != svg.INK else ""
    style += ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:g}" textLength="{len(text) * LETTER_WIDTH:.1f}"{style}>'
        f"{svg.escape_xml(text)}</text>"
    )
