"""How well a model foresees texts: the mean cross-entropy and accuracy over all that is asked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from keepleft.nn.loss import label_loss, vocabulary_loss


@torch.no_grad()
def likelihood(model: nn.Module, batches: Iterable[Any], *, smoothing: float = 0.0) -> dict[str, float]:
    """loss (plain cross-entropy per target), perplexity and accuracy; with smoothing also the label-smoothed loss."""
    parts: Any = model
    device = next(model.parameters()).device
    sums, asked = torch.zeros(3, dtype=torch.float64), 0
    for batch in batches:
        moved = batch.to(device)
        if moved.targets.dim() == 1:
            found = label_loss(parts(**moved.inputs), moved.targets, smoothing)
        else:
            weight, bias = parts.head.matrix(parts.token)
            found = vocabulary_loss(parts.head.ready(parts.states(**moved.inputs)), weight, bias, moved.targets,
                                    smoothing=smoothing)
        sums += torch.stack([part.double().cpu() for part in found])
        asked += batch.tokens
    if not asked:
        raise ValueError("nothing is asked in these batches: there is no text to evaluate on")
    smoothed, plain, right = (sums / asked).tolist()
    out = {"loss": plain, "perplexity": math.exp(min(plain, 700.0)), "accuracy": right}
    return out | {"smoothed": smoothed} if smoothing else out
