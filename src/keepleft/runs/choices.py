"""What a text could have been: at each step the likeliest tokens, those that filters ruled out, and the one that was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.hypotheses import Hypotheses, Transform
from keepleft.disk import svg
from keepleft.runs.spelled import HALF, read, spelled

MOST = 80  # steps in one picture
WIDTH, TEXT, LABEL, BAR, ROW = 800, 250, 140, 220, 18  # of the picture and, from left to right, of its columns
KEY = "▶ chosen;  bar: its probability;  dotted frame: before the filters;  struck through: ruled out"


@dataclass(frozen=True)
class Choice:
    """One step: a few tokens, the likeliest first, and how likely they were before and after the transforms."""

    text: str                    # what stands before
    tokens: tuple[str, ...]      # what each would add
    before: tuple[float, ...]
    after: tuple[float, ...]     # 0: ruled out
    chosen: int                  # which of them


@torch.no_grad()
def watched(model: Any, tokenizer: Any, tokens: Sequence[int], begin: int, *, transforms: Sequence[Transform] = (),
            source: Sequence[int] | None = None, few: int = 5) -> list[Choice]:
    """The choices behind a text that was written from token `begin` on, found again by one full pass over it.

    `tokens`: prompt (or start token) and answer; `source`: the tokens that an encoder-decoder read. `few` tokens of each step
    are kept, and the chosen one.
    """
    if not 1 <= begin <= len(tokens):
        raise ValueError(f"begin is {begin}, and there are {len(tokens)} tokens: it must be 1 or more, and not beyond them")
    if few < 1:
        raise ValueError(f"few is {few}: at least one token of each step must be shown")
    if model.design.decoder is None:
        raise ValueError("this model only reads: give one that writes")
    if (source is None) != (model.design.encoder is None):
        raise ValueError("an encoder-decoder needs the source that it read: give source=" if source is None else
                         "a source was given, but this model reads none: leave it out")
    whole = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    scores = _scores(model, whole, begin, source)
    out = []
    for n, token in enumerate(tokens[begin:]):
        here = scores[n:n + 1]
        changed = here
        texts = Hypotheses(whole[:, :begin + n], here.new_zeros(1), torch.zeros_like(whole[:, 0], dtype=torch.bool),
                           torch.full_like(whole[:, 0], n), torch.full_like(whole[:, 0], len(tokens) - begin), begin)
        for transform in transforms:
            changed = transform(changed, texts)
        out.append(_choice(tokenizer, tokens[:begin + n], int(token), here[0].softmax(-1), changed[0].softmax(-1), few))
    return out


def _scores(model: Any, whole: Tensor, begin: int, source: Sequence[int] | None) -> Tensor:
    """(steps, V): the scores behind each token from `begin` on"""
    given = (whole[:, :-1],) if source is None else (torch.tensor([list(source)], device=whole.device), whole[:, :-1])
    if whole.shape[1] == begin:
        return whole.new_zeros(0, model.design.vocab).float()
    was = model.training
    model.eval()
    try:
        scores: Tensor = model.head(model.states(*given)[:, begin - 1:], model.token)[0]
    finally:
        model.train(was)
    return scores if scores.dtype == torch.float64 else scores.float()


def _choice(tokenizer: Any, before: Sequence[int], token: int, was: Tensor, now: Tensor, few: int) -> Choice:
    likely = torch.maximum(was, now).topk(min(few, len(was))).indices.tolist()
    kept = sorted({*likely, token}, key=lambda n: (-float(was[n]), n))
    return Choice(read(tokenizer, before).rstrip(HALF), tuple(spelled(tokenizer, before, kept)), tuple(was[kept].tolist()),
                  tuple(now[kept].tolist()), kept.index(token))


# the picture --------------------------------------------------------------------------------


def distributions(path: str | Path, steps: Sequence[Choice], *, title: str, most: int = MOST) -> Path:
    """A row of bars for each step into an .svg file; text and choices are read from top to bottom."""
    left = svg.MARGIN + TEXT + 14
    so_far = lambda words: svg.short(svg.visible(words, spaces=False), TEXT - 30, keep_end=True)
    out = [svg.text(svg.MARGIN, 48, KEY, fill=svg.DIM)]
    y = 62.0
    for n, step in enumerate(steps[:most], 1):
        out.append(f'<line x1="{svg.MARGIN}" y1="{y:g}" x2="{WIDTH - svg.MARGIN}" y2="{y:g}" stroke="{svg.FAINT}"/>')
        out.append(svg.text(svg.MARGIN, y + 16, str(n), fill=svg.DIM, size=10))
        middle = y + ROW * step.chosen + 16
        out.append(svg.text(svg.MARGIN + TEXT, middle, so_far(step.text), anchor="end"))
        for place in range(len(step.tokens)):
            out += _bar(step, place, left, y + 3 + ROW * place)
        y += ROW * len(step.tokens) + 8
    if len(steps) > most:
        out.append(svg.text(left, y + 20, f"… {len(steps) - most} more steps are not shown"))
    elif steps:
        last = steps[-1]
        out.append(svg.text(svg.MARGIN + TEXT, y + 20, so_far(last.text + last.tokens[last.chosen]), anchor="end"))
    return svg.sheet(path, title, WIDTH, y + 36, out)


def _bar(step: Choice, place: int, left: float, y: float) -> list[str]:
    word, before, after = svg.visible(step.tokens[place]), step.before[place], step.after[place]
    chosen, gone, begin = place == step.chosen, after == 0, left + 20 + LABEL
    tip = svg.named(f"{word}: {before:.4g} before, {after:.4g} after")
    out = [svg.text(left, y + 13, "▶", fill=svg.BLUE)] if chosen else []
    out.append(svg.text(left + 20, y + 13, svg.short(word, LABEL - 12), bold=chosen, struck=gone,
                        fill=svg.DIM if gone and not chosen else svg.INK))
    out.append(f'<rect x="{begin:g}" y="{y + 2:g}" width="{max(0.5, BAR * after):.1f}" height="{ROW - 5}" '
               f'fill="{svg.BLUE}" fill-opacity="{1 if chosen else 0.45}">{tip}</rect>')
    if not _alike(before, after):
        out.append(f'<rect x="{begin:g}" y="{y + 2:g}" width="{max(0.5, BAR * before):.1f}" height="{ROW - 5}" fill="none" '
                   f'stroke="{svg.INK}" stroke-dasharray="2 2">{tip}</rect>')
    said = _said(after) if _alike(before, after) else f"{_said(before)} → {'ruled out' if gone else _said(after)}"
    return [*out, svg.text(begin + BAR + 8, y + 13, said, bold=chosen)]


def _alike(before: float, after: float) -> bool:
    return abs(before - after) < 5e-4 and (after > 0 or before == 0)


def _said(share: float) -> str:
    return f"{share:.3f}" if share >= 0.0005 or share == 0 else "<0.001"
