"""A report as one page that needs nothing else: verdict, findings, and a picture of claimed against measured influence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, isfinite, log10
from typing import NamedTuple

from keepleft.auditing.junit import ERROR, FAILED, PASSED, SKIPPED, outcome
from keepleft.auditing.report import CLEAN, KINDS, LEAK, UNCHECKED, Finding, Report
from keepleft.disk.svg import said

MOST = 48            # squares along one side of the picture; of more positions several share one
SIDE = 400           # pixels that a side takes, more or less
LEFT, TOP = 46, 44   # room for the numbers of the positions
LEAST = 1e-7         # of the largest output: smaller moves look like this one

SIGNS = {CLEAN: "✓", LEAK: "✗", UNCHECKED: "?", PASSED: "✓", FAILED: "✗", SKIPPED: "–", ERROR: "?"}
STATES = {PASSED: "nothing found", FAILED: "leaks", SKIPPED: "not checked", ERROR: "no verdict"}

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --dim: #5b6670; --line: #d5dbe1; --paper: #ffffff; --card: #f5f7f9;
  --may: #7f9bb8; --soft: #e3ebf3; --move: #1f5fa8; --bad: #d1430a; --on-bad: #ffffff;
  --clean: #1b7a3d; --leak: #b8340a; --unchecked: #8a5a00 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --dim: #9eabb7; --line: #39434d; --paper: #14181c;
  --card: #1d2329;  --may: #6f8aa6; --soft: #263341; --move: #7db6f5; --bad: #ff7a3d; --on-bad: #14181c;
  --clean: #6fce8e; --leak: #ff8f5e; --unchecked: #e5b454 } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem; margin: 0 auto;
  padding: 1.5rem 1.25rem 4rem; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem } h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem }
p { margin: .4rem 0 } small, .dim, dt { color: var(--dim) }
code, pre { font: .875em/1.5 ui-monospace, monospace }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; overflow-x: auto;
  overflow-wrap: normal; margin: .4rem 0 }
header { border-left: 6px solid; padding: .25rem 0 .25rem 1rem } header.clean { border-color: var(--clean) }
header.leak { border-color: var(--leak) } header.unchecked { border-color: var(--unchecked) }
.clean b, .passed b { color: var(--clean) } .leak b, .failure b { color: var(--leak) }
.unchecked b, .error b { color: var(--unchecked) }
ul.kinds { list-style: none; padding: 0; margin: 1rem 0; display: flex; flex-wrap: wrap; gap: .4rem }
ul.kinds li { border: 1px solid var(--line); border-radius: 6px; padding: .1rem .6rem } ul.kinds .skipped { color: var(--dim) }
ul.kinds li.failure { border-color: var(--leak) }
article { border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; margin: .8rem 0 }
article h3 { font-size: 1rem; margin: 0 } article h3 b { color: var(--leak) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; margin: .5rem 0 } dd { margin: 0 }
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
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .8rem 0 0; padding: 0; list-style: none; font-size: .9rem }
.legend li { display: flex; align-items: center; gap: .4rem } .legend svg { flex: none }
"""


class Pair(NamedTuple):
    """A square of the picture: of the pairs of positions in it, the one that matters most."""

    reader: int
    source: int
    allowed: bool
    size: float
    share: float  # of all its pairs, those that are allowed

    @property
    def wrong(self) -> bool:
        return self.size > 0 and not self.allowed


def page(report: Report) -> str:
    """The whole page, as text."""
    parts = [*_head(report), *_found(report), *_picture(report), *_left(report), *_facts(report)]
    return "\n".join([
        '<!doctype html>', '<html lang="en">', '<head>', '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'">',
        f"<title>{said(f'{report.verdict}: {report.subject}')} – keepleft audit</title>", f"<style>{STYLE}</style>", '</head>',
        '<body>', *parts, '</body>', '</html>\n'])


def _head(report: Report) -> Iterable[str]:
    """The verdict, and what came of each kind."""
    told = {CLEAN: "It keeps to its claim,", LEAK: "It does not keep to its claim,",
            UNCHECKED: "It could not be audited, so there is no verdict. Its claim is"}
    yield f'<header class="{report.verdict}">'
    yield f"<h1><b>{SIGNS[report.verdict]} {report.verdict}</b>: {said(report.subject)}</h1>"
    yield f"<p>{told[report.verdict]} <code>{said(report.claim)}</code>.</p>"
    yield (f'<p class="dim">Budget {said(report.budget)}: {len(report.paths)} code paths, {report.calls} calls, '
           f"{report.seconds:.1f} s</p>")
    yield "</header>"
    yield '<ul class="kinds">'
    for kind in KINDS:
        state, why = outcome(report, kind)
        yield (f'<li class="{state}" title="{_quoted(why or STATES[state])}"><b>{SIGNS[state]}</b> {kind} '
               f"<small>{STATES[state]}</small></li>")
    yield "</ul>"


def _found(report: Report) -> Iterable[str]:
    if report.findings:
        yield f"<h2>Findings ({len(report.findings)})</h2>"
    for n, finding in enumerate(report.findings, 1):
        yield from _finding(n, finding)


def _finding(n: int, finding: Finding) -> Iterable[str]:
    where = f" in <code>{said(finding.module)}</code>" if finding.module else ""
    yield f"<article><h3>{n}. <b>{said(finding.kind)}</b>{where}</h3>"
    yield f"<p>{said(finding.message)}</p><dl>"
    facts = {"path": finding.path, "line": finding.line, "probe": finding.probe}
    yield from (f"<dt>{name}</dt><dd>{said(value)}</dd>" for name, value in facts.items() if value)
    yield "</dl>"
    if finding.also:
        yield from _folded(f"{_counted(len(finding.also), 'further code path')} with the same", finding.also)
    if finding.reproduce:
        yield f'<p class="dim">To see it:</p><pre>{said(finding.reproduce)}</pre>'
    yield "</article>"


# -- the picture -------------------------------------------------------------------------------


def _picture(report: Report) -> Iterable[str]:
    """Claimed and measured, side by side."""
    yield "<h2>Who moves whom</h2>"
    if not report.measured or not report.claimed:
        yield '<p class="dim">There is no picture: the influence of one position on another could not be measured.</p>'
        return
    length = len(report.measured)
    step = ceil(length / MOST)
    spans = [range(n, min(n + step, length)) for n in range(0, length, step)]
    rows = [[_worst(report, readers, sources) for sources in spans] for readers in spans]
    wrong = any(pair.wrong for row in rows for pair in row)
    future = any(finding.kind == "future" for finding in report.findings)
    several = f" Each square stands for {step} × {step} pairs and shows the one that matters most." if step > 1 else ""
    yield (f"<p>{length} positions, one of them changed at a time, on the plainest code path. Sizes are shares of the largest "
           f"output.{several}</p>")
    if future and not wrong:
        yield "<p>The leak does not show on that path, only on those that the findings name.</p>"
    rounding = wrong and not future and "future" in report.checked
    if rounding:
        yield "<p>What moves against the claim here was taken for rounding.</p>"
    elif wrong and not future:
        yield "<p>Some moves are against the claim, and the check for that, future, was not made: make it.</p>"
    yield '<div class="pictures">'
    yield _grid("Claimed", f"Who may move whom: {report.claim}", rows, step, _claimed)
    yield _grid("Measured", "Who moves whom, and by how much", rows, step, _rounding if rounding else _leaking)
    yield "</div>"
    yield from _legend(rounding)


def _worst(report: Report, readers: range, sources: range) -> Pair:
    """What is not allowed before what is, then the largest."""
    seen = [report.claimed[q][k] for q in readers for k in sources]
    pairs = [Pair(q, k, report.claimed[q][k], report.measured[q][k], sum(seen) / len(seen)) for q in readers for k in sources]
    return max(pairs, key=lambda pair: (pair.wrong, pair.size, pair.allowed))


def _grid(name: str, label: str, rows: Sequence[Sequence[Pair]], step: int, drawn: Callable[[Pair], list[str]]) -> str:
    """One of the two: readers from top to bottom, sources from left to right. A cell is drawn in a square of 1 × 1."""
    cell = max(7, min(30, SIDE // len(rows)))
    side = cell * len(rows)
    every = ceil(28 / cell)  # numbers need room
    out = [f"<figure><figcaption>{name}</figcaption>",
           f'<svg viewBox="0 0 {LEFT + side + 8} {TOP + side + 8}" width="{LEFT + side + 8}" height="{TOP + side + 8}" '
           f'role="img" aria-label="{_quoted(label)}">',
           f'<text x="{LEFT + side / 2:g}" y="13" text-anchor="middle">… is moved by position</text>',
           f'<text transform="translate(13 {TOP + side / 2:g}) rotate(-90)" text-anchor="middle">position …</text>']
    for n in range(0, len(rows), every):
        middle = n * cell + cell / 2
        out.append(f'<text x="{LEFT + middle:g}" y="{TOP - 8}" text-anchor="middle">{n * step}</text>'
                   f'<text x="{LEFT - 8}" y="{TOP + middle + 4:g}" text-anchor="end">{n * step}</text>')
    for q, row in enumerate(rows):
        for k, pair in enumerate(row):
            out.append(f'<g class="cell" transform="translate({LEFT + k * cell} {TOP + q * cell}) scale({cell})">'
                       + "".join(drawn(pair)) + "</g>")
    return "\n".join([*out, f'<rect class="net" x="{LEFT - .5}" y="{TOP - .5}" width="{side + 1}" height="{side + 1}"/>',
                      "</svg></figure>"])


def _claimed(pair: Pair) -> list[str]:
    may = "may be" if pair.share == 1 else "must not be" if not pair.share else "may in part be"
    return [_square("none"), *([_square("may", 0.88, pair.share)] if pair.share else []),
            _named(f"position {pair.reader} {may} moved by position {pair.source}")]


def _leaking(pair: Pair) -> list[str]:
    if not pair.wrong:
        return _allowed(pair)
    return [_square("none"), *_crossed(_level(pair.size)), _named(f"{_move(pair)}, which the claim does not allow")]


def _rounding(pair: Pair) -> list[str]:
    """Where the check found nothing, the little that moves against the claim is no leak."""
    if not pair.wrong:
        return _allowed(pair)
    return [_square("none"), _ring(), _named(f"{_move(pair)}, which was taken for rounding")]


def _allowed(pair: Pair) -> list[str]:
    return [_square("soft" if pair.allowed else "none"), *([_dot(_level(pair.size))] if pair.size else []), _named(_move(pair))]


def _dot(level: float) -> str:
    return _square("move", 0.3 + 0.58 * level, 0.35 + 0.65 * level)


def _square(kind: str, side: float = 1.0, opacity: float = 1.0) -> str:
    corner = (1 - side) / 2
    faint = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return f'<rect class="{kind}" x="{corner:.3g}" y="{corner:.3g}" width="{side:.3g}" height="{side:.3g}"{faint}/>'


def _crossed(level: float) -> list[str]:
    """A mark that is told from a square by its shape as well as by its colour."""
    reach = 0.16 + 0.1 * (1 - level)
    return [_square("bad", 1.0, 0.55 + 0.45 * level),
            f'<path class="cross" d="M{reach:.2f} {reach:.2f}L{1 - reach:.2f} {1 - reach:.2f}'
            f'M{1 - reach:.2f} {reach:.2f}L{reach:.2f} {1 - reach:.2f}"/>']


def _ring() -> str:
    return '<circle class="noise" cx=".5" cy=".5" r=".25"/>'


def _level(size: float) -> float:
    """From 0 to 1 on a logarithmic scale; a number that became NaN is as large as can be."""
    if not isfinite(size):
        return 1.0
    return min(1.0, max(0.0, 1 - log10(max(size, LEAST)) / log10(LEAST)))


def _move(pair: Pair) -> str:
    if not pair.size:
        return f"position {pair.reader} is not moved by position {pair.source}"
    far = f"by {pair.size:.2g}" if isfinite(pair.size) else "from a number to NaN or back"
    return f"position {pair.reader} is moved by position {pair.source}, {far}"


def _named(words: str) -> str:
    return f"<title>{said(words)}</title>"


def _legend(rounding: bool) -> Iterable[str]:
    signs = [(_square("may", 0.88), "may move"), (_square("none"), "must not move, and does not"),
             (_square("soft"), "may move, but does not"),
             *((_square("soft") + _dot(_level(size)), f"moves by {size:g}") for size in (LEAST, 1e-3, 1.0))]
    signs.append((_ring(), "moves, but must not: taken for rounding") if rounding else
                 ("".join(_crossed(1.0)), "moves, but must not"))
    yield '<ul class="legend">'
    for drawn, words in signs:
        yield (f'<li><svg width="22" height="22" viewBox="-.05 -.05 1.1 1.1" aria-hidden="true">{drawn}'
               f'<rect class="net" width="1" height="1"/></svg>{words}</li>')
    yield "</ul>"


# -- the rest ----------------------------------------------------------------------------------


def _left(report: Report) -> Iterable[str]:
    """What was not checked, and notes."""
    if report.skipped:
        yield "<h2>Not checked</h2><ul>"
        for line in report.skipped:
            fatal = " <b>Without this there is no verdict.</b>" if line in report.blocked and not report.findings else ""
            yield f"<li>{said(line)}{fatal}</li>"
        yield "</ul>"
    if report.notes:
        yield "<h2>Notes</h2><ul>"
        yield from (f"<li>{said(note)}</li>" for note in report.notes)
        yield "</ul>"


def _facts(report: Report) -> Iterable[str]:
    """How it was done."""
    yield "<h2>How it was done</h2>"
    if report.checked:
        yield f"<p>Checked: {said(', '.join(report.checked))}.</p>"
    if report.paths:
        yield from _folded(f"{_counted(len(report.paths), 'code path')} taken", report.paths)
    yield f'<p class="dim">{said(", ".join(f"{name} {value}" for name, value in report.about.items()))}</p>'


def _folded(summary: str, lines: Iterable[str]) -> Iterable[str]:
    yield f"<details><summary>{said(summary)}</summary><ul>"
    yield from (f"<li>{said(line)}</li>" for line in lines)
    yield "</ul></details>"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _quoted(words: str) -> str:
    return said(words).replace('"', "&quot;")
