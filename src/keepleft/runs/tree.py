"""Beam search as a tree: which texts went on, which were given up, which ended and how good they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepleft.decoding.beam import NEVER, Beams
from keepleft.disk import svg
from keepleft.runs.spelled import read, spelled

COLUMNS, ROWS = 40, 24  # steps, and texts of one step, in one picture
TOP, BOX, TALL, GAP = 78, 37, 45, 26  # where the first row is, the height of a box and of a row, the room between columns
KEY = "bold: the best text;  dashed: given up;  double frame: ended, = its final score;  other numbers: log-probability"

Name = tuple[int, tuple[int, ...]]  # a group of beams, and the tokens added


@dataclass(frozen=True)
class Node:
    """A text after some step; it grew out of the one that lacks its last token."""

    group: int
    tokens: tuple[int, ...]  # added so far
    score: float             # log-probability, or what it is ranked by where it has ended
    ended: bool
    kept: bool               # leads to a text that was shown in the end, or still could be
    best: bool               # leads to the best

    @property
    def name(self) -> Name:
        return self.group, self.tokens

    @property
    def parent(self) -> Name:
        return self.group, self.tokens[:-1]


def nodes(steps: Sequence[Beams], row: int = 0) -> list[Node]:
    """Every text that the beams of one prompt held after some step, step by step."""
    if not steps:
        raise ValueError("there are no steps to draw: give the list of what kl.decode() yields with a beam")
    if not isinstance(steps[0], Beams):
        raise TypeError(f"a step is {type(steps[0]).__name__}: only beam search has a tree; distributions() draws other texts")
    if not 0 <= row < len(steps[0].ended):
        raise ValueError(f"prompt {row} was asked for, and there are {len(steps[0].ended)}: count from 0")
    going, ended = [_going(texts, row) for texts in steps], [_ended(texts, row) for texts in steps]
    over = bool(steps[-1].done.view(len(steps[-1].ended), -1)[row].all())
    final = ended[-1] if ended[-1] and over else {**going[-1], **ended[-1]}
    ranked = ended[-1] or going[-1]  # all of these are as long
    best = max(ranked, key=ranked.__getitem__, default=(0, ()))
    leading = {(group, tokens[:n]) for group, tokens in final for n in range(len(tokens) + 1)}
    finished = {name: score for some in ended for name, score in some.items()}
    texts = {name: score for some in going for name, score in some.items()} | finished
    return [Node(group, tokens, score, (group, tokens) in finished, (group, tokens) in leading,
                 group == best[0] and tokens == best[1][:len(tokens)])
            for (group, tokens), score in sorted(texts.items(), key=lambda item: len(item[0][1]))]


def _going(texts: Beams, row: int) -> dict[Name, float]:
    """What goes on for one prompt, and how likely it is."""
    width, groups = texts.ended.shape[1], texts.hope.shape[1]
    here = slice(row * width, (row + 1) * width)
    added = texts.tokens[here, texts.begin:].tolist()
    return {(n * groups // width, tuple(tokens)): score
            for n, (tokens, score) in enumerate(zip(added, texts.score[here].tolist(), strict=True)) if score > NEVER / 2}


def _ended(texts: Beams, row: int) -> dict[Name, float]:
    """What has ended for one prompt, and what it is ranked by."""
    width, groups = texts.ended.shape[1], texts.hope.shape[1]
    found = zip(texts.ended[row, :, texts.begin:].tolist(), texts.ended_size[row].tolist(), texts.ended_score[row].tolist(),
                texts.full[row].tolist(), strict=True)
    return {(n * groups // width, tuple(tokens[:size])): score
            for n, (tokens, size, score, full) in enumerate(found) if full and score > NEVER / 2}


# the picture --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    node: Node
    label: str
    x: float
    y: float
    wide: float


def tree(path: str | Path, steps: Sequence[Beams], tokenizer: Any, *, title: str, row: int = 0, columns: int = COLUMNS,
         rows: int = ROWS, prefix: Sequence[int] = ()) -> Path:
    """The tree of one prompt into an .svg file: a column for each step, the best text along the top, ended texts below it.

    `prefix`: the tokens that all texts had to begin with.
    """
    found = nodes(steps, row)
    at = row * steps[0].ended.shape[1]
    prompt = steps[0].tokens[at, :steps[0].begin]
    known = steps[0].real
    before = (prompt if known is None else prompt[known[at]]).tolist()
    ranks = _ranks(found, columns, rows)
    places, right = _placed(ranks, tokenizer, before)
    bottom = TOP + TALL * max((len(column) for column in ranks), default=0) + 8
    missing = {"later steps": len(steps) - columns, "texts": sum(len(node.tokens) <= columns for node in found) - len(places)}
    left_out = [f"{count} {what}" for what, count in missing.items() if count > 0]
    width = max(right + svg.MARGIN, 2 * svg.MARGIN + svg.width(KEY))
    out = [svg.text(svg.MARGIN, 48, KEY, fill=svg.DIM)]
    for n in range(len(ranks)):
        where = min(place.x for place in places.values() if len(place.node.tokens) == n + 1)
        out.append(svg.text(where, TOP - 8, str(n + 1), fill=svg.DIM, size=10))
    out += [_edge(places.get(place.node.parent), place) for place in sorted(places.values(), key=lambda place: place.node.best)]
    for place in places.values():
        out += _box(place)
    if left_out:
        bottom += 20
        out.append(svg.text(svg.MARGIN, bottom - 4, f"… {' and '.join(left_out)} are not shown"))
    for node in sorted((node for node in found if node.ended and node.kept), key=lambda node: -node.score)[:ROWS]:
        bottom += 19
        out.append(svg.text(svg.MARGIN + 56, bottom, f"= {node.score:.3f}", anchor="end", bold=node.best))
        words = svg.visible(read(tokenizer, [*prefix, *node.tokens]), spaces=False)
        out.append(svg.text(svg.MARGIN + 68, bottom, svg.short(words, width - svg.MARGIN - 110), bold=node.best))
    return svg.sheet(path, title, width, bottom + 20, out)


def _ranks(found: Sequence[Node], columns: int, rows: int) -> list[list[Node]]:
    """The texts of each column from top to bottom, children beside their parents, so that no lines cross."""
    out: list[list[Node]] = []
    above: list[Name] = []
    for step in range(1, min(columns, max((len(node.tokens) for node in found), default=0)) + 1):
        children: dict[Name, list[Node]] = {}
        for node in sorted((node for node in found if len(node.tokens) == step),
                           key=lambda node: (not node.best, not node.kept, node.group, -node.score)):
            children.setdefault(node.parent, []).append(node)
        out.append([node for name in above or children for node in children.get(name, [])][:rows])
        above = [node.name for node in out[-1]]
    return [column for column in out if column]


def _placed(ranks: Sequence[Sequence[Node]], tokenizer: Any, before: list[int]) -> tuple[dict[Name, Place], float]:
    """Where each text is drawn, and where the picture ends."""
    x, out = float(svg.MARGIN), {}
    for column in ranks:
        labels = [svg.short(svg.visible(spelled(tokenizer, [*before, *node.tokens[:-1]], node.tokens[-1:])[0]), 110)
                  for node in column]
        wide = max(58.0, 18 + 1.15 * max(map(svg.width, labels)))
        for n, (node, label) in enumerate(zip(column, labels, strict=True)):
            out[node.name] = Place(node, label, x, TOP + n * TALL, wide)
        x += wide + GAP
    return out, x - GAP


def _edge(begin: Place | None, end: Place) -> str:
    if begin is None:
        return ""
    x, y, to, level = begin.x + begin.wide, begin.y + BOX / 2, end.x, end.y + BOX / 2
    half = (x + to) / 2
    return (f'<path d="M {x:.1f} {y:.1f} C {half:.1f} {y:.1f} {half:.1f} {level:.1f} {to:.1f} {level:.1f}" fill="none" '
            f"{_stroke(end)}/>")


def _box(place: Place) -> list[str]:
    node = place.node
    said = f"= {node.score:.2f}" if node.ended else f"{node.score:.2f}"
    ink = svg.INK if node.kept else svg.DIM
    rect = lambda by, style, more="": (
        f'<rect x="{place.x + by:.1f}" y="{place.y + by:.1f}" width="{place.wide - 2 * by:.1f}" height="{BOX - 2 * by:.1f}" '
        f'rx="4" fill="{svg.PAPER}" {style}>{more}</rect>')
    inner = [rect(4, f'stroke="{ink}" stroke-width="0.8"')] if node.ended else []
    middle = place.x + place.wide / 2
    return [rect(0, _stroke(place), svg.named(f"{place.label}: {node.score:.4f}")), *inner,
            svg.text(middle, place.y + 17, place.label, anchor="middle", bold=node.best, fill=ink),
            svg.text(middle, place.y + 29, said, anchor="middle", bold=node.best, fill=ink, size=10)]


def _stroke(place: Place) -> str:
    if place.node.best:
        return f'stroke="{svg.BLUE}" stroke-width="2.6"'
    return f'stroke="{svg.INK}"' if place.node.kept else f'stroke="{svg.DIM}" stroke-dasharray="3 3" stroke-opacity="0.6"'
