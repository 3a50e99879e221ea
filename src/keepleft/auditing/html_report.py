"""A report as one HTML page without external files: verdict, findings, and a plot of claimed against measured
influence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, isfinite, log10
from typing import NamedTuple

from keepleft.auditing.junit import ERROR, FAILED, PASSED, SKIPPED, outcome
from keepleft.auditing.report import CLEAN, KINDS, LEAK, MAX_LISTED_PATHS, UNCHECKED, AuditReport, Finding
from keepleft.svg import escape_attribute, escape_xml

MAX_CELLS_PER_SIDE = 48  # with more positions, several share a cell
SIDE_PIXELS = 400  # of a plot, approximately
LEFT_MARGIN = 46  # room for the position numbers
TOP_MARGIN = 44
MIN_SIZE = 1e-7  # of the largest output: smaller changes are drawn like this one

STATE_SYMBOLS = {CLEAN: "✓", LEAK: "✗", UNCHECKED: "?", PASSED: "✓", FAILED: "✗", SKIPPED: "–", ERROR: "?"}
STATE_LABELS = {PASSED: "nothing found", FAILED: "leaks", SKIPPED: "not checked", ERROR: "no verdict"}

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --dim: #5b6670; --line: #d5dbe1; --paper: #ffffff;
  --card: #f5f7f9; --may: #7f9bb8; --soft: #e3ebf3; --move: #1f5fa8; --bad: #d1430a; --on-bad: #ffffff;
  --clean: #1b7a3d; --leak: #b8340a; --unchecked: #8a5a00 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --dim: #9eabb7; --line: #39434d;
  --paper: #14181c; --card: #1d2329; --may: #6f8aa6; --soft: #263341; --move: #7db6f5; --bad: #ff7a3d;
  --on-bad: #14181c; --clean: #6fce8e; --leak: #ff8f5e; --unchecked: #e5b454 } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 0 auto; padding: 1.5rem 1.25rem 4rem; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem }
p { margin: .4rem 0 } small, .dim, dt { color: var(--dim) }
code, pre { font: .875em/1.5 ui-monospace, monospace }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem;
  overflow-x: auto; overflow-wrap: normal; margin: .4rem 0 }
header { border-left: 6px solid; padding: .25rem 0 .25rem 1rem } header.clean { border-color: var(--clean) }
header.leak { border-color: var(--leak) } header.unchecked { border-color: var(--unchecked) }
.clean b, .passed b { color: var(--clean) } .leak b, .failure b { color: var(--leak) }
.unchecked b, .error b { color: var(--unchecked) }
ul.kinds { list-style: none; padding: 0; margin: 1rem 0; display: flex; flex-wrap: wrap; gap: .4rem }
ul.kinds li { border: 1px solid var(--line); border-radius: 6px; padding: .1rem .6rem }
ul.kinds .skipped { color: var(--dim) }
ul.kinds li.failure { border-color: var(--leak) }
article { border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; margin: .8rem 0 }
article h3 { font-size: 1rem; margin: 0 } article h3 b { color: var(--leak) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; margin: .5rem 0 }
dd { margin: 0 }
details { margin: .4rem 0 } summary { cursor: pointer; color: var(--dim) } details ul { margin: .3rem 0 }
.pictures { display: flex; flex-wrap: wrap; gap: 1.5rem } figure { margin: 0; max-width: 100% }
figcaption { font-weight: 600 } svg { max-width: 100%; height: auto; display: block }
svg text { font: 11px system-ui, sans-serif; fill: var(--dim) }
.net { fill: none; stroke: var(--line); vector-effect: non-scaling-stroke }
.may { fill: var(--may) } .soft { fill: var(--soft) } .move { fill: var(--move) }
.bad { fill: var(--bad) } .cross { fill: none; stroke: var(--on-bad); stroke-width: .12 }
.noise { fill: none; stroke: var(--dim); stroke-width: .1 }
.none { fill: transparent } .cell > :first-child { stroke: var(--line); stroke-width: .03 }
.cell:hover > :first-child { stroke: var(--ink); stroke-width: .12 }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .8rem 0 0; padding: 0; list-style: none;
  font-size: .9rem }
.legend li { display: flex; align-items: center; gap: .4rem } .legend svg { flex: none }
"""


class Cell(NamedTuple):
    """A cell of a plot: of the pairs of positions in it, the one that matters most."""

    reader: int
    source: int
    allowed: bool
    size: float  # of the influence, relative to the largest output
    allowed_share: float  # of all pairs in the cell, those that the claim allows

    @property
    def violates_claim(self) -> bool:
        return self.size > 0 and not self.allowed


def html_page(report: AuditReport) -> str:
    sections = [
        *_header_html(report),
        *_findings_html(report),
        *_influence_html(report),
        *_skipped_html(report),
        *_run_info_html(report),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape_xml(f'{report.verdict}: {report.subject}')} – keepleft audit</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            *sections,
            "</body>",
            "</html>\n",
        ]
    )


def _header_html(report: AuditReport) -> Iterable[str]:
    """The verdict, and the outcome of each check."""
    verdict_text = {
        CLEAN: "It keeps to its claim,",
        LEAK: "It does not keep to its claim,",
        UNCHECKED: "It could not be audited, so there is no verdict. Its claim is",
    }
    yield f'<header class="{report.verdict}">'
    yield f"<h1><b>{STATE_SYMBOLS[report.verdict]} {report.verdict}</b>: {escape_xml(report.subject)}</h1>"
    yield f"<p>{verdict_text[report.verdict]} <code>{escape_xml(report.claim)}</code>.</p>"
    yield (
        f'<p class="dim">Budget {escape_xml(report.budget)}: {len(report.paths)} code paths, '
        f"{report.calls} calls, {report.seconds:.1f} s</p>"
    )
    yield "</header>"
    yield '<ul class="kinds">'
    for kind in KINDS:
        state, details = outcome(report, kind)
        label = STATE_LABELS[state]
        yield (
            f'<li class="{state}" title="{escape_attribute(details or label)}">'
            f"<b>{STATE_SYMBOLS[state]}</b> {kind} <small>{label}</small></li>"
        )
    yield "</ul>"


def _findings_html(report: AuditReport) -> Iterable[str]:
    if report.findings:
        yield f"<h2>Findings ({len(report.findings)})</h2>"
    for n, finding in enumerate(report.findings, 1):
        yield from _finding_html(n, finding)


def _finding_html(n: int, finding: Finding) -> Iterable[str]:
    location = f" in <code>{escape_xml(finding.module)}</code>" if finding.module else ""
    severity = "" if finding.is_leak else " (warning)"
    yield f"<article><h3>{n}. <b>{escape_xml(finding.kind)}</b>{location}{severity}</h3>"
    yield f"<p>{escape_xml(finding.message)}</p><dl>"
    fields = {
        "path": finding.path,
        "also in": ", ".join(finding.also_in),
        "line": finding.line,
        "probe": finding.probe,
    }
    yield from (f"<dt>{name}</dt><dd>{escape_xml(value)}</dd>" for name, value in fields.items() if value)
    yield "</dl>"
    if finding.also:
        yield from _collapsible_list(
            f"{_pluralize(len(finding.also), 'further code path')} with the same", finding.also
        )
    if finding.reproduce:
        yield f'<p class="dim">To see it:</p><pre>{escape_xml(finding.reproduce)}</pre>'
    yield "</article>"


# -- the influence plots -----------------------------------------------------------------------


def _influence_html(report: AuditReport) -> Iterable[str]:
    """Claimed and measured influence, side by side."""
    yield "<h2>Who moves whom</h2>"
    if not report.measured or not report.claimed:
        yield (
            '<p class="dim">There is no picture: the influence of one position on another could not be '
            "measured.</p>"
        )
        return
    length = len(report.measured)
    step = ceil(length / MAX_CELLS_PER_SIDE)
    spans = [range(n, min(n + step, length)) for n in range(0, length, step)]
    rows = [[_most_relevant_cell(report, readers, sources) for sources in spans] for readers in spans]
    any_violation = any(cell.violates_claim for row in rows for cell in row)
    has_future_finding = any(finding.kind == "future" for finding in report.findings)
    introduction = (
        f"{length} positions, one of them changed at a time, on the plainest code path. "
        "Sizes are shares of the largest output."
    )
    if step > 1:
        introduction += f" Each square stands for {step} × {step} pairs and shows the one that matters most."
    yield f"<p>{introduction}</p>"
    if has_future_finding and not any_violation:
        yield "<p>The leak does not show on that path, only on those that the findings name.</p>"
    taken_for_rounding = any_violation and not has_future_finding and "future" in report.checked
    if taken_for_rounding:
        yield "<p>What moves against the claim here was taken for rounding.</p>"
    elif any_violation and not has_future_finding:
        yield (
            "<p>Some moves are against the claim, and the check for that, future, was not made: make it.</p>"
        )
    yield '<div class="pictures">'
    yield _grid_html("Claimed", f"Who may move whom: {report.claim}", rows, step, _draw_claimed)
    yield _grid_html(
        "Measured",
        "Who moves whom, and by how much",
        rows,
        step,
        _draw_rounding if taken_for_rounding else _draw_leak,
    )
    yield "</div>"
    yield from _legend_html(taken_for_rounding)


def _most_relevant_cell(report: AuditReport, readers: range, sources: range) -> Cell:
    """The pair to show: influence that the claim does not allow first, then the largest."""
    allowed = [report.claimed[q][k] for q in readers for k in sources]
    cells = [
        Cell(q, k, report.claimed[q][k], report.measured[q][k], sum(allowed) / len(allowed))
        for q in readers
        for k in sources
    ]
    return max(cells, key=lambda cell: (cell.violates_claim, cell.size, cell.allowed))


def _grid_html(
    name: str, label: str, rows: Sequence[Sequence[Cell]], step: int, draw_cell: Callable[[Cell], list[str]]
) -> str:
    """One plot: readers from top to bottom, sources from left to right.

    draw_cell draws in a square of 1 × 1.
    """
    cell_pixels = max(7, min(30, SIDE_PIXELS // len(rows)))
    side_pixels = cell_pixels * len(rows)
    width = LEFT_MARGIN + side_pixels + 8
    height = TOP_MARGIN + side_pixels + 8
    label_step = ceil(28 / cell_pixels)  # numbers need room
    lines = [
        f"<figure><figcaption>{name}</figcaption>",
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape_attribute(label)}">',
        f'<text x="{LEFT_MARGIN + side_pixels / 2:g}" y="13" text-anchor="middle">'
        "… is moved by position</text>",
        f'<text transform="translate(13 {TOP_MARGIN + side_pixels / 2:g}) rotate(-90)" text-anchor="middle">'
        "position …</text>",
    ]
    for n in range(0, len(rows), label_step):
        center = n * cell_pixels + cell_pixels / 2
        lines.append(
            f'<text x="{LEFT_MARGIN + center:g}" y="{TOP_MARGIN - 8}" text-anchor="middle">{n * step}</text>'
            f'<text x="{LEFT_MARGIN - 8}" y="{TOP_MARGIN + center + 4:g}" text-anchor="end">{n * step}</text>'
        )
    for q, row in enumerate(rows):
        for k, cell in enumerate(row):
            x = LEFT_MARGIN + k * cell_pixels
            y = TOP_MARGIN + q * cell_pixels
            drawing = "".join(draw_cell(cell))
            lines.append(f'<g class="cell" transform="translate({x} {y}) scale({cell_pixels})">{drawing}</g>')
    frame = (
        f'<rect class="net" x="{LEFT_MARGIN - 0.5}" y="{TOP_MARGIN - 0.5}" '
        f'width="{side_pixels + 1}" height="{side_pixels + 1}"/>'
    )
    return "\n".join([*lines, frame, "</svg></figure>"])


def _draw_claimed(cell: Cell) -> list[str]:
    verb = (
        "may be" if cell.allowed_share == 1 else "must not be" if not cell.allowed_share else "may in part be"
    )
    return [
        _square_svg("none"),
        *([_square_svg("may", 0.88, cell.allowed_share)] if cell.allowed_share else []),
        _title_tag(f"position {cell.reader} {verb} moved by position {cell.source}"),
    ]


def _draw_leak(cell: Cell) -> list[str]:
    if not cell.violates_claim:
        return _draw_allowed(cell)
    return [
        _square_svg("none"),
        *_cross_svg(_log_level(cell.size)),
        _title_tag(f"{_describe_move(cell)}, which the claim does not allow"),
    ]


def _draw_rounding(cell: Cell) -> list[str]:
    """For a plot where the check found nothing: small changes against the claim are no leak."""
    if not cell.violates_claim:
        return _draw_allowed(cell)
    return [
        _square_svg("none"),
        _ring_svg(),
        _title_tag(f"{_describe_move(cell)}, which was taken for rounding"),
    ]


def _draw_allowed(cell: Cell) -> list[str]:
    return [
        _square_svg("soft" if cell.allowed else "none"),
        *([_dot_svg(_log_level(cell.size))] if cell.size else []),
        _title_tag(_describe_move(cell)),
    ]


def _dot_svg(level: float) -> str:
    return _square_svg("move", 0.3 + 0.58 * level, 0.35 + 0.65 * level)


def _square_svg(css_class: str, side: float = 1.0, opacity: float = 1.0) -> str:
    corner = (1 - side) / 2
    opacity_attribute = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return (
        f'<rect class="{css_class}" x="{corner:.3g}" y="{corner:.3g}" '
        f'width="{side:.3g}" height="{side:.3g}"{opacity_attribute}/>'
    )


def _cross_svg(level: float) -> list[str]:
    """A mark that differs from the others in shape as well as in colour."""
    inset = 0.16 + 0.1 * (1 - level)
    return [
        _square_svg("bad", 1.0, 0.55 + 0.45 * level),
        f'<path class="cross" d="M{inset:.2f} {inset:.2f}L{1 - inset:.2f} {1 - inset:.2f}'
        f'M{1 - inset:.2f} {inset:.2f}L{inset:.2f} {1 - inset:.2f}"/>',
    ]


def _ring_svg() -> str:
    return '<circle class="noise" cx=".5" cy=".5" r=".25"/>'


def _log_level(size: float) -> float:
    """From 0 to 1 on a logarithmic scale; 1 where a number became NaN."""
    if not isfinite(size):
        return 1.0
    return min(1.0, max(0.0, 1 - log10(max(size, MIN_SIZE)) / log10(MIN_SIZE)))


def _describe_move(cell: Cell) -> str:
    if not cell.size:
        return f"position {cell.reader} is not moved by position {cell.source}"
    amount = f"by {cell.size:.2g}" if isfinite(cell.size) else "from a number to NaN or back"
    return f"position {cell.reader} is moved by position {cell.source}, {amount}"


def _title_tag(text: str) -> str:
    return f"<title>{escape_xml(text)}</title>"


def _legend_html(taken_for_rounding: bool) -> Iterable[str]:
    entries = [
        (_square_svg("may", 0.88), "may move"),
        (_square_svg("none"), "must not move, and does not"),
        (_square_svg("soft"), "may move, but does not"),
        *(
            (_square_svg("soft") + _dot_svg(_log_level(size)), f"moves by {size:g}")
            for size in (MIN_SIZE, 1e-3, 1.0)
        ),
    ]
    entries.append(
        (_ring_svg(), "moves, but must not: taken for rounding")
        if taken_for_rounding
        else ("".join(_cross_svg(1.0)), "moves, but must not")
    )
    yield '<ul class="legend">'
    for symbol, label in entries:
        yield (
            f'<li><svg width="22" height="22" viewBox="-.05 -.05 1.1 1.1" aria-hidden="true">{symbol}'
            f'<rect class="net" width="1" height="1"/></svg>{label}</li>'
        )
    yield "</ul>"


# -- the rest ----------------------------------------------------------------------------------


def _skipped_html(report: AuditReport) -> Iterable[str]:
    """What was not checked or not tried, and the notes."""
    if report.skipped:
        yield "<h2>Not checked</h2><ul>"
        for line in report.skipped:
            fatal_note = (
                " <b>Without this there is no verdict.</b>"
                if line in report.blocked and not report.findings
                else ""
            )
            yield f"<li>{escape_xml(line)}{fatal_note}</li>"
        yield "</ul>"
    if report.not_tried:
        yield f"<h2>Not tried</h2><p>{escape_xml(report.not_tried_summary())}</p>"
        if len(report.not_tried) > MAX_LISTED_PATHS:
            yield from _collapsible_list(f"all {len(report.not_tried)}", report.not_tried)
    if report.notes:
        yield "<h2>Notes</h2><ul>"
        yield from (f"<li>{escape_xml(note)}</li>" for note in report.notes)
        yield "</ul>"


def _run_info_html(report: AuditReport) -> Iterable[str]:
    """Checks, code paths and versions."""
    yield "<h2>How it was done</h2>"
    if report.checked:
        yield f"<p>Checked: {escape_xml(', '.join(report.checked))}.</p>"
    if report.paths:
        yield from _collapsible_list(f"{_pluralize(len(report.paths), 'code path')} taken", report.paths)
    about = ", ".join(f"{name} {value}" for name, value in report.about.items())
    yield f'<p class="dim">{escape_xml(about)}</p>'


def _collapsible_list(summary: str, lines: Iterable[str]) -> Iterable[str]:
    yield f"<details><summary>{escape_xml(summary)}</summary><ul>"
    yield from (f"<li>{escape_xml(line)}</li>" for line in lines)
    yield "</ul></details>"


def _pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
