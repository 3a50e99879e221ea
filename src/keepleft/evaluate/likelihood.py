"""How well a model foresees texts: the mean cross-entropy and accuracy over all that is asked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from keepleft.models.asked import answered


@torch.no_grad()
def likelihood(model: nn.Module, batches: Iterable[Any], *, smoothing: float = 0.0) -> dict[str, float]:
    """loss (plain cross-entropy per target), perplexity and accuracy; with smoothing also the label-smoothed loss."""
    device = next(model.parameters()).device
    sums, asked = torch.zeros(3, dtype=torch.float64), 0
    for batch in batches:
        moved = batch.to(device)
        found = answered(model, moved.inputs, moved.targets, smoothing)
        sums += torch.stack([part.double().cpu() for part in found])
        asked += batch.tokens
    if not asked:
        raise ValueError("nothing is asked in these batches: there is no text to evaluate on")
    smoothed, plain, right = (sums / asked).tolist()
    out = {"loss": plain, "perplexity": math.exp(min(plain, 700.0)), "accuracy": right}
    return out | {"smoothed": smoothed} if smoothing else out
