"""What is asked of a model, and how it answers: the sums of its loss over a batch, for training and for evaluation alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from keepleft.nn.loss import Sums, label_loss, vocabulary_loss


def answered(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor, smoothing: float = 0.0) -> Sums:
    """The arguments of the model, and the targets: (B, T) tokens or (B,) labels."""
    parts: Any = model
    if targets.dim() == 1:
        return label_loss(parts(**inputs), targets, smoothing)
    x = parts.head.ready(parts.states(**inputs))
    weight, bias = parts.head.matrix(parts.token)
    return vocabulary_loss(x, weight, bias, targets, smoothing=smoothing)
