"""Statistics of each head: how sharply and how far it attends, to what, and whether it keeps to its claim."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from keepleft.serving.explorer.attention_store import StoredAttention
from keepleft.serving.explorer.params import Params
from keepleft.serving.explorer.text_cache import ReadText

MAX_ROWS = 256  # of a longer text this many are used, evenly spaced


def head_stats(read_text: ReadText, params: Params) -> dict[str, Any]:
    """Statistics of every head of one layer.

    Means over rows of the entropy in bits, the distance, and the weight on the first token, the previous one
    and the token itself; `outside` is the largest weight that the claimed mask forbids.
    """
    layers = read_text.attentions[params.choice("name", list(read_text.attentions))]
    layer: StoredAttention = layers[params.integer("layer", 0, len(layers) - 1)]
    rows = torch.linspace(0, layer.rows - 1, min(MAX_ROWS, layer.rows), dtype=torch.float64).round().long()
    return {"heads": _stats_per_head(layer, rows), "rows": len(rows)}


def _stats_per_head(layer: StoredAttention, rows: Tensor) -> list[dict[str, float]]:
    all_heads = torch.arange(layer.heads, device=layer.q.device)
    sums = {
        name: torch.zeros(layer.heads, dtype=torch.float64, device=layer.q.device)
        for name in ("entropy", "distance", "first", "previous", "itself")
    }
    max_outside = torch.zeros(layer.heads, dtype=torch.float64, device=layer.q.device)
    rows = rows.to(layer.q.device)
    for strip in layer.strips(all_heads.tolist(), rows):
        weights, row_index = strip.weights, rows[strip.begin : strip.end]
        columns = torch.arange(strip.left, strip.right, device=row_index.device)
        distances = row_index[:, None] - columns
        sums["entropy"] += torch.special.entr(weights).sum((1, 2), dtype=torch.float64) / math.log(2)
        sums["distance"] += (weights * distances.abs()).sum((1, 2), dtype=torch.float64)
        for name, matches in (
            ("first", columns == 0),
            ("previous", distances == 1),
            ("itself", distances == 0),
        ):
            sums[name] += (weights * matches).sum((1, 2), dtype=torch.float64)
        outside_weights = weights.masked_fill(
            layer.table(layer.claim, row_index, all_heads)[..., strip.left : strip.right], 0.0
        )
        max_outside = torch.maximum(max_outside, outside_weights.amax((1, 2)).double())
    means = {name: (total / len(rows)).tolist() for name, total in sums.items()} | {
        "outside": max_outside.tolist()
    }
    return [{name: float(values[head]) for name, values in means.items()} for head in range(layer.heads)]
