"""Beam search as a tree: which texts went on, which were given up, which ended and how good they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepleft import svg
from keepleft.data.token_text import decode_with_special, token_texts
from keepleft.decoding.beam import EXCLUDED_SCORE, BeamHypotheses

MAX_COLUMNS, MAX_ROWS = 40, 24  # steps, and texts of one step, in one picture
TOP = 78
BOX_HEIGHT = 37
ROW_HEIGHT = 45
COLUMN_GAP = 26  # where the first row is, the height of a box and of a row, the room between columns
LEGEND = "bold: the best text;  dashed: given up;  double frame: ended, = its final score;  other numbers: log-probability"

NodeKey = tuple[int, tuple[int, ...]]  # a group of beams, and the tokens added


@dataclass(frozen=True)
class Node:
    """A text after some step; it grew out of the one that lacks its last token."""

    group: int
    tokens: tuple[int, ...]  # added so far
    score: float  # log-probability, or what it is ranked by where it has ended
    finished: bool
    survives: bool  # leads to a text that was shown in the end, or still could be
    best: bool  # leads to the best

    @property
    def key(self) -> NodeKey:
        return self.group, self.tokens

    @property
    def parent(self) -> NodeKey:
        return self.group, self.tokens[:-1]


def beam_nodes(steps: Sequence[BeamHypotheses], row: int = 0) -> list[Node]:
    """Every text that the beams of one prompt held after some step, step by step."""
    if not steps:
        raise ValueError("there are no steps to draw: give the list of what kl.decode() yields with a beam")
    if not isinstance(steps[0], BeamHypotheses):
        raise TypeError(
            f"a step is {type(steps[0]).__name__}: only beam search has a tree; plot_distributions() draws other texts"
        )
    if not 0 <= row < len(steps[0].finished_tokens):
        raise ValueError(
            f"prompt {row} was asked for, and there are {len(steps[0].finished_tokens)}: count from 0"
        )
    live = [_live_beams(candidates, row) for candidates in steps]
    finished_by_step = [_finished_beams(candidates, row) for candidates in steps]
    all_done = bool(steps[-1].done.view(len(steps[-1].finished_tokens), -1)[row].all())
    final = (
        finished_by_step[-1] if finished_by_step[-1] and all_done else {**live[-1], **finished_by_step[-1]}
    )
    ranked = finished_by_step[-1] or live[-1]  # all of these are as long
    best = max(ranked, key=ranked.__getitem__, default=(0, ()))
    surviving = {(group, tokens[:n]) for group, tokens in final for n in range(len(tokens) + 1)}
    finished = {key: score for scores in finished_by_step for key, score in scores.items()}
    candidates = {key: score for scores in live for key, score in scores.items()} | finished
    return [
        Node(
            group,
            tokens,
            score,
            (group, tokens) in finished,
            (group, tokens) in surviving,
            group == best[0] and tokens == best[1][: len(tokens)],
        )
        for (group, tokens), score in sorted(candidates.items(), key=lambda item: len(item[0][1]))
    ]


def _live_beams(beams: BeamHypotheses, row: int) -> dict[NodeKey, float]:
    """What goes on for one prompt, and how likely it is."""
    width, groups = beams.finished_tokens.shape[1], beams.can_improve.shape[1]
    rows = slice(row * width, (row + 1) * width)
    new_tokens = beams.tokens[rows, beams.prompt_width :].tolist()
    return {
        (n * groups // width, tuple(tokens)): score
        for n, (tokens, score) in enumerate(zip(new_tokens, beams.score[rows].tolist(), strict=True))
        if score > EXCLUDED_SCORE / 2
    }


def _finished_beams(beams: BeamHypotheses, row: int) -> dict[NodeKey, float]:
    """What has ended for one prompt, and what it is ranked by."""
    width, groups = beams.finished_tokens.shape[1], beams.can_improve.shape[1]
    entries = zip(
        beams.finished_tokens[row, :, beams.prompt_width :].tolist(),
        beams.finished_lengths[row].tolist(),
        beams.finished_scores[row].tolist(),
        beams.has_finished[row].tolist(),
        strict=True,
    )
    return {
        (n * groups // width, tuple(tokens[:length])): score
        for n, (tokens, length, score, is_filled) in enumerate(entries)
        if is_filled and score > EXCLUDED_SCORE / 2
    }


# the picture --------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodePosition:
    node: Node
    label: str
    x: float
    y: float
    width: float


def plot_beam_tree(
    path: str | Path,
    steps: Sequence[BeamHypotheses],
    tokenizer: Any,
    *,
    title: str,
    row: int = 0,
    max_columns: int = MAX_COLUMNS,
    max_rows: int = MAX_ROWS,
    prefix: Sequence[int] = (),
) -> Path:
    """The tree of one prompt into an .svg file: a column for each step, the best text along the top, ended
    texts below it.

    `prefix`: the tokens that all texts had to begin with.
    """
    nodes = beam_nodes(steps, row)
    first_beam = row * steps[0].finished_tokens.shape[1]
    prompt = steps[0].tokens[first_beam, : steps[0].prompt_width]
    token_mask = steps[0].prompt_mask
    context = (prompt if token_mask is None else prompt[token_mask[first_beam]]).tolist()
    columns = _order_columns(nodes, max_columns, max_rows)
    positions, right = _layout_nodes(columns, tokenizer, context)
    bottom = TOP + ROW_HEIGHT * max((len(column) for column in columns), default=0) + 8
    missing = {
        "later steps": len(steps) - max_columns,
        "texts": sum(len(node.tokens) <= max_columns for node in nodes) - len(positions),
    }
    left_out = [f"{count} {unit}" for unit, count in missing.items() if count > 0]
    width = max(right + svg.MARGIN, 2 * svg.MARGIN + svg.width(LEGEND))
    out = [svg.text(svg.MARGIN, 48, LEGEND, fill=svg.DIM)]
    for n in range(len(columns)):
        column_x = min(position.x for position in positions.values() if len(position.node.tokens) == n + 1)
        out.append(svg.text(column_x, TOP - 8, str(n + 1), fill=svg.DIM, size=10))
    out += [
        _draw_edge(positions.get(position.node.parent), position)
        for position in sorted(positions.values(), key=lambda position: position.node.best)
    ]
    for position in positions.values():
        out += _draw_box(position)
    if left_out:
        bottom += 20
        out.append(svg.text(svg.MARGIN, bottom - 4, f"… {' and '.join(left_out)} are not shown"))
    for node in sorted(
        (node for node in nodes if node.finished and node.survives), key=lambda node: -node.score
    )[:MAX_ROWS]:
        bottom += 19
        out.append(svg.text(svg.MARGIN + 56, bottom, f"= {node.score:.3f}", anchor="end", bold=node.best))
        text = svg.show_invisibles(decode_with_special(tokenizer, [*prefix, *node.tokens]), spaces=False)
        out.append(
            svg.text(svg.MARGIN + 68, bottom, svg.truncate(text, width - svg.MARGIN - 110), bold=node.best)
        )
    return svg.write_svg(path, title, width, bottom + 20, out)


def _order_columns(nodes: Sequence[Node], max_columns: int, max_rows: int) -> list[list[Node]]:
    """The texts of each column from top to bottom, children beside their parents, so that no lines cross."""
    out: list[list[Node]] = []
    parent_keys: list[NodeKey] = []
    for step in range(1, min(max_columns, max((len(node.tokens) for node in nodes), default=0)) + 1):
        children: dict[NodeKey, list[Node]] = {}
        for node in sorted(
            (node for node in nodes if len(node.tokens) == step),
            key=lambda node: (not node.best, not node.survives, node.group, -node.score),
        ):
            children.setdefault(node.parent, []).append(node)
        out.append([node for key in parent_keys or children for node in children.get(key, [])][:max_rows])
        parent_keys = [node.key for node in out[-1]]
    return [column for column in out if column]


def _layout_nodes(
    columns: Sequence[Sequence[Node]], tokenizer: Any, context: list[int]
) -> tuple[dict[NodeKey, NodePosition], float]:
    """Where each text is drawn, and where the picture ends."""
    x, out = float(svg.MARGIN), {}
    for column in columns:
        labels = [
            svg.truncate(
                svg.show_invisibles(
                    token_texts(tokenizer, [*context, *node.tokens[:-1]], node.tokens[-1:])[0]
                ),
                110,
            )
            for node in column
        ]
        column_width = max(58.0, 18 + 1.15 * max(map(svg.width, labels)))
        for n, (node, label) in enumerate(zip(column, labels, strict=True)):
            out[node.key] = NodePosition(node, label, x, TOP + n * ROW_HEIGHT, column_width)
        x += column_width + COLUMN_GAP
    return out, x - COLUMN_GAP


def _draw_edge(parent: NodePosition | None, child: NodePosition) -> str:
    if parent is None:
        return ""
    x = parent.x + parent.width
    y = parent.y + BOX_HEIGHT / 2
    x_end = child.x
    y_end = child.y + BOX_HEIGHT / 2
    x_middle = (x + x_end) / 2
    return (
        f'<path d="M {x:.1f} {y:.1f} C {x_middle:.1f} {y:.1f} {x_middle:.1f} {y_end:.1f} {x_end:.1f} {y_end:.1f}" fill="none" '
        f"{_stroke(child)}/>"
    )


def _draw_box(position: NodePosition) -> list[str]:
    node = position.node
    score_text = f"= {node.score:.2f}" if node.finished else f"{node.score:.2f}"
    colour = svg.INK if node.survives else svg.DIM
    rect = lambda inset, style, content="": (
        f'<rect x="{position.x + inset:.1f}" y="{position.y + inset:.1f}" width="{position.width - 2 * inset:.1f}" height="{BOX_HEIGHT - 2 * inset:.1f}" '
        f'rx="4" fill="{svg.PAPER}" {style}>{content}</rect>'
    )
    inner = [rect(4, f'stroke="{colour}" stroke-width="0.8"')] if node.finished else []
    middle = position.x + position.width / 2
    return [
        rect(0, _stroke(position), svg.title_tag(f"{position.label}: {node.score:.4f}")),
        *inner,
        svg.text(middle, position.y + 17, position.label, anchor="middle", bold=node.best, fill=colour),
        svg.text(middle, position.y + 29, score_text, anchor="middle", bold=node.best, fill=colour, size=10),
    ]


def _stroke(position: NodePosition) -> str:
    if position.node.best:
        return f'stroke="{svg.BLUE}" stroke-width="2.6"'
    return (
        f'stroke="{svg.INK}"'
        if position.node.survives
        else f'stroke="{svg.DIM}" stroke-dasharray="3 3" stroke-opacity="0.6"'
    )
