"""How well a model foresees texts: the mean cross-entropy and accuracy over all that is asked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from keepleft.models.loss import model_loss


@torch.no_grad()
def likelihood(model: nn.Module, batches: Iterable[Any], *, label_smoothing: float = 0.0) -> dict[str, float]:
    """loss (plain cross-entropy per target), perplexity and accuracy; with smoothing also the label-smoothed
    loss.
    """
    device = next(model.parameters()).device
    sums, num_targets = torch.zeros(3, dtype=torch.float64), 0
    for batch in batches:
        device_batch = batch.to(device)
        loss_sums = model_loss(model, device_batch.inputs, device_batch.targets, label_smoothing)
        sums += torch.stack([value.double().cpu() for value in loss_sums])
        num_targets += batch.tokens
    if not num_targets:
        raise ValueError("nothing is asked in these batches: there is no text to evaluate on")
    smoothed_loss, loss, accuracy = (sums / num_targets).tolist()
    out = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy}
    return out | {"smoothed": smoothed_loss} if label_smoothing else out
