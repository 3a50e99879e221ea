"""Each head in a few numbers: how sharply it looks, how far, at what, and whether it keeps to its claim."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from keepleft.serving.explorer.given import Given
from keepleft.serving.explorer.kept import Layer
from keepleft.serving.explorer.reading import Read

ROWS = 256  # of a longer text as many are looked at, spread evenly


def summary(read: Read, given: Given) -> dict[str, Any]:
    layers = read.attentions[given.word("name", list(read.attentions))]
    layer: Layer = layers[given.whole("layer", 0, len(layers) - 1)]
    rows = torch.linspace(0, layer.rows - 1, min(ROWS, layer.rows), dtype=torch.float64).round().long()
    return {"heads": _heads(layer, rows), "rows": len(rows)}


def _heads(layer: Layer, rows: Tensor) -> list[dict[str, float]]:
    every = torch.arange(layer.heads, device=layer.q.device)
    sums = {name: torch.zeros(layer.heads, dtype=torch.float64, device=layer.q.device)
            for name in ("entropy", "distance", "first", "previous", "itself")}
    outside = torch.zeros(layer.heads, dtype=torch.float64, device=layer.q.device)
    rows = rows.to(layer.q.device)
    for strip in layer.strips(every.tolist(), rows):
        weights, here = strip.weights, rows[strip.begin:strip.end]
        columns = torch.arange(strip.left, strip.right, device=here.device)
        apart = here[:, None] - columns
        sums["entropy"] += torch.special.entr(weights).sum((1, 2), dtype=torch.float64) / math.log(2)
        sums["distance"] += (weights * apart.abs()).sum((1, 2), dtype=torch.float64)
        for name, there in (("first", columns == 0), ("previous", apart == 1), ("itself", apart == 0)):
            sums[name] += (weights * there).sum((1, 2), dtype=torch.float64)
        beyond = weights.masked_fill(layer.table(layer.claim, here, every)[..., strip.left:strip.right], 0.0)
        outside = torch.maximum(outside, beyond.amax((1, 2)).double())
    means = {name: (total / len(rows)).tolist() for name, total in sums.items()} | {"outside": outside.tolist()}
    return [{name: float(values[head]) for name, values in means.items()} for head in range(layer.heads)]
