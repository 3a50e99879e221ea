"""What each written token looked at in the source: by cross-attention, as numbers, as pairs, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepleft.disk import svg
from keepleft.models.watch import watch

MOST = 120  # tokens on a side of one picture
CELL = 30


@torch.no_grad()
def aligned(model: Any, source: Sequence[int], tokens: Sequence[int], *, begin: int = 1, layers: Sequence[int] = (-1,),
            heads: Sequence[int] | None = None, among: slice = slice(None)) -> Tensor:
    """(written, source) weights of the tokens from `begin` on: the mean over heads of some layers, found by one full pass.

    `tokens`: start token and what was written. `heads`: all unless given. `among`: only these source tokens, so that tags and
    ends can be left out. Rows sum to 1.
    """
    if model.design.encoder is None or model.design.decoder is None:
        raise ValueError("this model does not write from a source: alignments are for encoder-decoders")
    if not 1 <= begin <= len(tokens):
        raise ValueError(f"begin is {begin}, and there are {len(tokens)} tokens: it must be 1 or more, and not beyond them")
    there = len(model.decoder.layers)
    if not layers or not all(-there <= n < there for n in layers):
        raise ValueError(f"layers are {list(layers)}: name at least one, and only such as the model has ({there})")
    if len(tokens) == begin:
        return torch.zeros(0, len(range(len(source))[among]))
    device = next(model.parameters()).device
    was = model.training
    names = [f"decoder.{n % there}.cross" for n in layers]
    try:
        with watch(model.eval(), names, heads=heads, queries=range(begin - 1, len(tokens) - 1)) as maps:
            model.states(torch.tensor([list(source)], device=device), torch.tensor([list(tokens[:-1])], device=device))
    finally:
        model.train(was)
    weights = torch.stack([maps[name][0].float().mean(0) for name in names]).mean(0)[:, among].cpu()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def pairs(weights: Tensor) -> list[tuple[int, int]]:
    """(source, written) numbers: for each written token the one that it looked at most. Pharaoh writes them as 0-0 1-2."""
    return [] if not weights.numel() else [(at, n) for n, at in enumerate(weights.argmax(-1).tolist())]


def alignment(path: str | Path, source: Sequence[str], written: Sequence[str], weights: Tensor, *, title: str,
              most: int = MOST) -> Path:
    """The weights as a matrix into an .svg file, darker where a token looked more; a dot marks where it looked most."""
    if tuple(weights.shape) != (len(written), len(source)):
        raise ValueError(f"the weights are {tuple(weights.shape)}, but there are {len(written)} written and {len(source)} "
                         "source tokens: a row is a written one, a column a source one")
    down, across = ([svg.short(svg.visible(word), 160, 14) for word in side[:most]] for side in (written, source))
    room = lambda words: 8 + 1.1 * max((svg.width(word, 14) for word in words), default=0)
    left, top = svg.MARGIN + room(down) + 8, 44 + room(across)
    best, out = {n: at for at, n in pairs(weights)}, []
    for m, word in enumerate(across):
        out.append(svg.text(left + m * CELL + CELL / 2 + 4, top - 8, word, size=14, up=True))
    for n, (word, row) in enumerate(zip(down, weights.tolist(), strict=False)):
        out.append(svg.text(left - 8, top + n * CELL + CELL / 2 + 4, word, anchor="end", size=14))
        for m, (other, share) in enumerate(zip(across, row, strict=False)):
            x, y = left + m * CELL, top + n * CELL
            out.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{CELL - 2}" height="{CELL - 2}" fill="{svg.BLUE}" '
                       f'fill-opacity="{max(0.04, share):.3f}">{svg.named(f"{word} ← {other}: {share:.2f}")}</rect>')
            if best[n] == m:
                out.append(f'<circle cx="{x + CELL / 2 - 1:.1f}" cy="{y + CELL / 2 - 1:.1f}" r="4" fill="{svg.PAPER}" '
                           f'stroke="{svg.INK}"/>')
    width, height = left + CELL * len(across) + 20, top + CELL * len(down) + 20
    if more := [f"{len(side) - most} {name}" for name, side in (("written", written), ("source", source)) if len(side) > most]:
        height += 16
        out.append(svg.text(svg.MARGIN, height - 14, f"… {' and '.join(more)} tokens more are not shown"))
    return svg.sheet(path, title, width, height, out)
