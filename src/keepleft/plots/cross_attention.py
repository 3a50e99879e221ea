"""What each written token looked at in the source: by cross-attention, as numbers, as pairs, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepleft import svg
from keepleft.models.watch import watch

MAX_TOKENS = 120  # tokens on a side of one picture
CELL_SIZE = 30


@torch.no_grad()
def alignment_weights(
    model: Any,
    source: Sequence[int],
    tokens: Sequence[int],
    *,
    begin: int = 1,
    layers: Sequence[int] = (-1,),
    heads: Sequence[int] | None = None,
    source_slice: slice = slice(None),
) -> Tensor:
    """(written, source) weights of the tokens from `begin` on: the mean over heads of some layers, found by
    one full pass.

    `tokens`: start token and what was written. `heads`: all unless given. `among`: only these source tokens,
    so that tags and ends can be left out. Rows sum to 1.
    """
    if not model.design.is_encoder_decoder:
        raise ValueError("this model does not write from a source: alignments are for encoder-decoders")
    if not 1 <= begin <= len(tokens):
        raise ValueError(
            f"begin is {begin}, and there are {len(tokens)} tokens: it must be 1 or more, and not beyond them"
        )
    num_layers = len(model.decoder.layers)
    if not layers or not all(-num_layers <= n < num_layers for n in layers):
        raise ValueError(
            f"layers are {list(layers)}: name at least one, and only such as the model has ({num_layers})"
        )
    if len(tokens) == begin:
        return torch.zeros(0, len(range(len(source))[source_slice]))
    device = next(model.parameters()).device
    was_training = model.training
    names = [f"decoder.{n % num_layers}.cross" for n in layers]
    try:
        with watch(model.eval(), names, heads=heads, queries=range(begin - 1, len(tokens) - 1)) as maps:
            model.hidden_states(
                torch.tensor([list(source)], device=device), torch.tensor([list(tokens[:-1])], device=device)
            )
    finally:
        model.train(was_training)
    weights = torch.stack([maps[name][0].float().mean(0) for name in names]).mean(0)[:, source_slice].cpu()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def pharaoh_pairs(weights: Tensor) -> list[tuple[int, int]]:
    """(source, written) numbers: for each written token the one that it looked at most.

    Pharaoh writes them as 0-0 1-2.
    """
    return (
        []
        if not weights.numel()
        else [(source_index, n) for n, source_index in enumerate(weights.argmax(-1).tolist())]
    )


def plot_alignment(
    path: str | Path,
    source: Sequence[str],
    target: Sequence[str],
    weights: Tensor,
    *,
    title: str,
    max_tokens: int = MAX_TOKENS,
) -> Path:
    """The weights as a matrix into an .svg file, darker where a token looked more; a dot marks where it
    looked most.
    """
    if tuple(weights.shape) != (len(target), len(source)):
        raise ValueError(
            f"the weights are {tuple(weights.shape)}, but there are {len(target)} written and {len(source)} "
            "source tokens: a row is a written one, a column a source one"
        )
    row_labels, column_labels = (
        [svg.truncate(svg.show_invisibles(label), 160, 14) for label in side[:max_tokens]]
        for side in (target, source)
    )
    label_width = lambda labels: 8 + 1.1 * max((svg.width(label, 14) for label in labels), default=0)
    left, top = svg.MARGIN + label_width(row_labels) + 8, 44 + label_width(column_labels)
    best, out = {n: source_index for source_index, n in pharaoh_pairs(weights)}, []
    for m, label in enumerate(column_labels):
        out.append(svg.text(left + m * CELL_SIZE + CELL_SIZE / 2 + 4, top - 8, label, size=14, vertical=True))
    for n, (label, row) in enumerate(zip(row_labels, weights.tolist(), strict=False)):
        out.append(svg.text(left - 8, top + n * CELL_SIZE + CELL_SIZE / 2 + 4, label, anchor="end", size=14))
        for m, (source_label, weight) in enumerate(zip(column_labels, row, strict=False)):
            x, y = left + m * CELL_SIZE, top + n * CELL_SIZE
            out.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{CELL_SIZE - 2}" height="{CELL_SIZE - 2}" fill="{svg.BLUE}" '
                f'fill-opacity="{max(0.04, weight):.3f}">{svg.title_tag(f"{label} ← {source_label}: {weight:.2f}")}</rect>'
            )
            if best[n] == m:
                out.append(
                    f'<circle cx="{x + CELL_SIZE / 2 - 1:.1f}" cy="{y + CELL_SIZE / 2 - 1:.1f}" r="4" fill="{svg.PAPER}" '
                    f'stroke="{svg.INK}"/>'
                )
    width, height = left + CELL_SIZE * len(column_labels) + 20, top + CELL_SIZE * len(row_labels) + 20
    if omitted := [
        f"{len(side) - max_tokens} {name}"
        for name, side in (("written", target), ("source", source))
        if len(side) > max_tokens
    ]:
        height += 16
        out.append(svg.text(svg.MARGIN, height - 14, f"… {' and '.join(omitted)} tokens more are not shown"))
    return svg.write_svg(path, title, width, height, out)
