"""Beam search as a tree: hypotheses that were continued, dropped, or finished, with their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keepleft import svg
from keepleft.data.token_text import decode_with_special, token_texts
from keepleft.decoding.beam import EXCLUDED_SCORE, BeamHypotheses

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_COLUMNS = 40  # steps in one picture
MAX_ROWS = 24  # hypotheses of one step in one picture
TOP = 98  # of the first row, in pixels
BOX_HEIGHT = 46
ROW_HEIGHT = 54
COLUMN_GAP = 20
LABEL_SIZE = 15
MARK_SIZE = 22  # of a token without letters and digits, whose ink is small
SCORE_SIZE = 13
LEGEND = (
    "bold: the best text;  dashed: given up;  double frame: ended, = its final score;",
    "other numbers: log-probability",
)

NodeKey = tuple[int, tuple[int, ...]]  # beam group, and the new tokens


@dataclass(frozen=True)
class Node:
    """A hypothesis after some step. Its parent is the hypothesis without its last token."""

    group: int
    tokens: tuple[int, ...]  # new tokens, without the prompt
    score: float  # log-probability; the score that a finished one is ranked by
    finished: bool
    survives: bool  # leads to a result, or to a hypothesis that still may become one
    best: bool  # leads to the best result

    @property
    def key(self) -> NodeKey:
        return self.group, self.tokens

    @property
    def parent(self) -> NodeKey:
        return self.group, self.tokens[:-1]


def beam_nodes(steps: Sequence[BeamHypotheses], row: int = 0) -> list[Node]:
    """Every hypothesis that the beams of one prompt held after some step, shorter ones first.

    Raises ValueError if there are no steps or no such row, and TypeError for steps of another strategy.
    """
    if not steps:
        raise ValueError("there are no steps to draw: give the list of what kl.decode() yields with a beam")
    if not isinstance(steps[0], BeamHypotheses):
        raise TypeError(
            f"a step is {type(steps[0]).__name__}: only beam search has a tree; plot_distributions() draws "
            "other texts"
        )
    if not 0 <= row < len(steps[0].finished_tokens):
        raise ValueError(
            f"prompt {row} was asked for, and there are {len(steps[0].finished_tokens)}: count from 0"
        )
    live_by_step = [_live_beams(beams, row) for beams in steps]
    finished_by_step = [_finished_beams(beams, row) for beams in steps]
    last_live = live_by_step[-1]
    last_finished = finished_by_step[-1]
    all_done = bool(steps[-1].done.view(len(steps[-1].finished_tokens), -1)[row].all())
    final = last_finished if last_finished and all_done else {**last_live, **last_finished}
    ranked = last_finished or last_live  # live ones are all as long, so log-probabilities rank them
    best_group, best_tokens = max(ranked, key=ranked.__getitem__, default=(0, ()))
    surviving = {(group, tokens[:n]) for group, tokens in final for n in range(len(tokens) + 1)}
    finished = {key: score for scores in finished_by_step for key, score in scores.items()}
    candidates = {key: score for scores in live_by_step for key, score in scores.items()} | finished
    return [
        Node(
            group,
            tokens,
            score,
            finished=(group, tokens) in finished,
            survives=(group, tokens) in surviving,
            best=group == best_group and tokens == best_tokens[: len(tokens)],
        )
        for (group, tokens), score in sorted(candidates.items(), key=lambda item: len(item[0][1]))
    ]


def _live_beams(beams: BeamHypotheses, row: int) -> dict[NodeKey, float]:
    """The unfinished hypotheses of one prompt, with their log-probabilities."""
    width, groups = beams.finished_tokens.shape[1], beams.can_improve.shape[1]
    rows = slice(row * width, (row + 1) * width)
    new_tokens = beams.tokens[rows, beams.prompt_width :].tolist()
    return {
        (n * groups // width, tuple(tokens)): score
        for n, (tokens, score) in enumerate(zip(new_tokens, beams.score[rows].tolist(), strict=True))
        if score > EXCLUDED_SCORE / 2
    }


def _finished_beams(beams: BeamHypotheses, row: int) -> dict[NodeKey, float]:
    """The finished hypotheses of one prompt, with the scores that they are ranked by."""
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
    """Where the box of a hypothesis is drawn."""

    node: Node
    label: str
    x: float
    y: float
    width: float


def plot_beam_tree(
    path: str | Path,
    steps: Sequence[BeamHypotheses],
    tokenizer: Tokenizer | None,
    *,
    title: str,
    row: int = 0,
    max_columns: int = MAX_COLUMNS,
    max_rows: int = MAX_ROWS,
    prefix: Sequence[int] = (),
) -> Path:
    """Draw the tree of one prompt into an .svg file.

    There is a column for each step; the best hypothesis runs along the top, finished ones are listed below
    the tree. `prefix` are the tokens that every hypothesis had to begin with.
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
    width = max(right + svg.MARGIN, 2 * svg.MARGIN + max(map(svg.width, LEGEND)))
    out = [svg.text(svg.MARGIN, 48 + 18 * n, line, fill=svg.DIM, size=13) for n, line in enumerate(LEGEND)]
    for n in range(len(columns)):
        column_x = min(position.x for position in positions.values() if len(position.node.tokens) == n + 1)
        out.append(svg.text(column_x, TOP - 8, str(n + 1), fill=svg.DIM))
    out += [
        _draw_edge(positions.get(position.node.parent), position)
        for position in sorted(positions.values(), key=lambda position: position.node.best)
    ]
    for position in positions.values():
        out += _draw_box(position)
    if left_out:
        bottom += 20
        out.append(svg.text(svg.MARGIN, bottom - 4, f"… {' and '.join(left_out)} are not shown"))
    results = [node for node in nodes if node.finished and node.survives]
    for node in sorted(results, key=lambda node: -node.score)[:MAX_ROWS]:
        bottom += 21
        score_text = f"= {node.score:.3f}"
        out.append(svg.text(svg.MARGIN + 56, bottom, score_text, anchor="end", bold=node.best, size=14))
        text = svg.show_invisibles(decode_with_special(tokenizer, [*prefix, *node.tokens]), spaces=False)
        text = svg.truncate(text, width - svg.MARGIN - 110, 14)
        out.append(svg.text(svg.MARGIN + 68, bottom, text, bold=node.best, size=14))
    return svg.write_svg(path, title, width, bottom + 20, out)


def _order_columns(nodes: Sequence[Node], max_columns: int, max_rows: int) -> list[list[Node]]:
    """The hypotheses of each column from top to bottom, siblings together, so that no lines cross."""
    rank = lambda node: (not node.best, not node.survives, node.group, -node.score)
    out: list[list[Node]] = []
    parent_keys: list[NodeKey] = []
    for step in range(1, min(max_columns, max((len(node.tokens) for node in nodes), default=0)) + 1):
        children: dict[NodeKey, list[Node]] = {}
        for node in sorted((node for node in nodes if len(node.tokens) == step), key=rank):
            children.setdefault(node.parent, []).append(node)
        out.append([node for key in parent_keys or children for node in children.get(key, [])][:max_rows])
        parent_keys = [node.key for node in out[-1]]
    return [column for column in out if column]


def _layout_nodes(
    columns: Sequence[Sequence[Node]], tokenizer: Tokenizer | None, context: list[int]
) -> tuple[dict[NodeKey, NodePosition], float]:
    """The position of each hypothesis, and the right edge of the tree."""

    def label_of(node: Node) -> str:
        (token_text,) = token_texts(tokenizer, [*context, *node.tokens[:-1]], node.tokens[-1:])
        return svg.truncate(svg.show_invisibles(token_text), 130, LABEL_SIZE)

    x = float(svg.MARGIN)
    out = {}
    for column in columns:
        labels = [label_of(node) for node in column]
        column_width = max(64.0, 18 + 1.15 * max(svg.width(label, LABEL_SIZE) for label in labels))
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
    curve = f"M {x:.1f} {y:.1f} C {x_middle:.1f} {y:.1f} {x_middle:.1f} {y_end:.1f} {x_end:.1f} {y_end:.1f}"
    return f'<path d="{curve}" fill="none" {_stroke(child)}/>'


def _draw_box(position: NodePosition) -> list[str]:
    node = position.node
    score_text = f"= {node.score:.2f}" if node.finished else f"{node.score:.2f}"
    colour = svg.INK if node.survives else svg.DIM
    rect = lambda inset, style, content="": (
        f'<rect x="{position.x + inset:.1f}" y="{position.y + inset:.1f}" '
        f'width="{position.width - 2 * inset:.1f}" height="{BOX_HEIGHT - 2 * inset:.1f}" '
        f'rx="4" fill="{svg.PAPER}" {style}>{content}</rect>'
    )
    inner = [rect(4, f'stroke="{colour}" stroke-width="0.8"')] if node.finished else []
    middle = position.x + position.width / 2
    is_mark = len(position.label) == 1 and not position.label.isalnum()
    size = MARK_SIZE if is_mark else LABEL_SIZE
    return [
        rect(0, _stroke(position), svg.title_tag(f"{position.label}: {node.score:.4f}")),
        *inner,
        svg.text(
            middle, position.y + 20, position.label, anchor="middle", bold=node.best, fill=colour, size=size
        ),
        svg.text(
            middle, position.y + 37, score_text, anchor="middle", bold=node.best, fill=colour, size=SCORE_SIZE
        ),
    ]


def _stroke(position: NodePosition) -> str:
    if position.node.best:
        return f'stroke="{svg.BLUE}" stroke-width="2.6"'
    if position.node.survives:
        return f'stroke="{svg.INK}"'
    return f'stroke="{svg.DIM}" stroke-dasharray="3 3" stroke-opacity="0.6"'
