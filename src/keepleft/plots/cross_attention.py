"""Cross-attention alignment of source and target: weights, Pharaoh pairs, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from keepleft import svg
from keepleft.models.transformer import EncoderDecoder, Model
from keepleft.models.watch import watch

MAX_TOKENS = 120  # tokens on each side of one picture
CELL_SIZE = 30


@torch.no_grad()
def alignment_weights(
    model: Model,
    source: Sequence[int],
    tokens: Sequence[int],
    *,
    begin: int = 1,
    layers: Sequence[int] = (-1,),
    heads: Sequence[int] | None = None,
    source_slice: slice = slice(None),
) -> Tensor:
    """(target, source) cross-attention weights of the tokens from `begin` on, by one forward pass.

    They are the mean over the given layers and heads (by default all heads of the last layer). `tokens` are
    the start token and the target. `source_slice` selects source tokens, so that tags and EOS can be left
    out; rows sum to 1 afterwards. Raises ValueError if the model is no encoder-decoder, or has no such layer.
    """
    if not model.design.is_encoder_decoder:
        raise ValueError("this model does not write from a source: alignments are for encoder-decoders")
    if not 1 <= begin <= len(tokens):
        raise ValueError(
            f"begin is {begin}, and there are {len(tokens)} tokens: it must be 1 or more, and not beyond them"
        )
    encoder_decoder = cast(EncoderDecoder, model)
    num_layers = len(encoder_decoder.decoder.layers)
    if not layers or not all(-num_layers <= n < num_layers for n in layers):
        raise ValueError(
            f"layers are {list(layers)}: name at least one, and only such as the model has ({num_layers})"
        )
    if len(tokens) == begin:
        return torch.zeros(0, len(range(len(source))[source_slice]))
    device = next(model.parameters()).device
    source_tokens = torch.tensor([list(source)], device=device)
    inputs = torch.tensor([list(tokens[:-1])], device=device)
    names = [f"decoder.{n % num_layers}.cross" for n in layers]
    was_training = model.training
    try:
        with watch(model.eval(), names, heads=heads, queries=range(begin - 1, len(tokens) - 1)) as maps:
            encoder_decoder.hidden_states(source_tokens, inputs)
    finally:
        model.train(was_training)
    weights = torch.stack([maps[name][0].float().mean(0) for name in names]).mean(0)[:, source_slice].cpu()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def pharaoh_pairs(weights: Tensor) -> list[tuple[int, int]]:
    """(source, target) indices: the source token with the largest weight for each target token.

    In Pharaoh format they are written as 0-0 1-2.
    """
    if not weights.numel():
        return []
    return [(source_index, n) for n, source_index in enumerate(weights.argmax(-1).tolist())]


def plot_alignment(
    path: str | Path,
    source: Sequence[str],
    target: Sequence[str],
    weights: Tensor,
    *,
    title: str,
    max_tokens: int = MAX_TOKENS,
) -> Path:
    """Draw (target, source) weights as a matrix into an .svg file: the stronger the colour, the larger.

    A dot marks the largest of each row. Raises ValueError if the weights are of another shape.
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
    left = svg.MARGIN + label_width(row_labels) + 8
    top = 44 + label_width(column_labels)
    best_source = {target_index: source_index for source_index, target_index in pharaoh_pairs(weights)}
    out = []
    for m, label in enumerate(column_labels):
        out.append(svg.text(left + m * CELL_SIZE + CELL_SIZE / 2 + 4, top - 8, label, size=14, vertical=True))
    for n, (label, row) in enumerate(zip(row_labels, weights.tolist(), strict=False)):
        y = top + n * CELL_SIZE
        out.append(svg.text(left - 8, y + CELL_SIZE / 2 + 4, label, anchor="end", size=14))
        for m, (source_label, weight) in enumerate(zip(column_labels, row, strict=False)):
            x = left + m * CELL_SIZE
            tooltip = svg.title_tag(f"{label} ← {source_label}: {weight:.2f}")
            out.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{CELL_SIZE - 2}" height="{CELL_SIZE - 2}" '
                f'fill="{svg.BLUE}" fill-opacity="{max(0.04, weight):.3f}">{tooltip}</rect>'
            )
            if best_source[n] == m:
                out.append(
                    f'<circle cx="{x + CELL_SIZE / 2 - 1:.1f}" cy="{y + CELL_SIZE / 2 - 1:.1f}" r="4" '
                    f'fill="{svg.PAPER}" stroke="{svg.INK}"/>'
                )
    width = left + CELL_SIZE * len(column_labels) + 20
    height = top + CELL_SIZE * len(row_labels) + 20
    omitted = [
        f"{len(side) - max_tokens} {name}"
        for name, side in (("written", target), ("source", source))
        if len(side) > max_tokens
    ]
    if omitted:
        height += 16
        out.append(svg.text(svg.MARGIN, height - 14, f"… {' and '.join(omitted)} tokens more are not shown"))
    return svg.write_svg(path, title, width, height, out)
