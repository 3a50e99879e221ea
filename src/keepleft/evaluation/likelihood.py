"""Mean cross-entropy, perplexity and accuracy of a model over batches of any objective."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from keepleft.models.heads import model_loss


class TargetBatch(Protocol):
    """What is needed of a batch: keepleft.data.batch.Batch has it."""

    @property
    def inputs(self) -> dict[str, Tensor]: ...  # arguments of the model

    @property
    def targets(self) -> Tensor: ...  # (B, T) tokens or (B,) labels

    @property
    def tokens(self) -> int: ...  # number of targets

    def to(self, device: torch.device) -> Self: ...


@torch.no_grad()
def likelihood(
    model: nn.Module, batches: Iterable[TargetBatch], *, label_smoothing: float = 0.0
) -> dict[str, float]:
    """loss (cross-entropy per target), perplexity, accuracy; with label smoothing also smoothed, that loss.

    Raises ValueError if the batches have no targets.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64)
    num_targets = 0
    for batch in batches:
        device_batch = batch.to(device)
        loss_sums = model_loss(model, device_batch.inputs, device_batch.targets, label_smoothing)
        sums += torch.stack([value.double().cpu() for value in loss_sums])
        num_targets += batch.tokens
    if not num_targets:
        raise ValueError("these batches have no targets: there is no text to evaluate on")
    smoothed_loss, loss, accuracy = (sums / num_targets).tolist()
    out = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy}
    return out | {"smoothed": smoothed_loss} if label_smoothing else out
