"""The loss of a model on a batch, for training and evaluation alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from keepleft.nn.loss import LossSums, classification_loss, linear_cross_entropy


def model_loss(
    model: nn.Module, inputs: dict[str, Tensor], targets: Tensor, label_smoothing: float = 0.0
) -> LossSums:
    """The sums of loss, cross-entropy and correct predictions over the targets.

    inputs: the arguments of the model   targets: (B, T) tokens or (B,) labels, IGNORE_INDEX to skip
    """
    module: Any = model
    if targets.dim() == 1:
        return classification_loss(module(**inputs), targets, label_smoothing)
    x = module.head.transform(module.hidden_states(**inputs))
    weight, bias = module.head.output_weight(module.token)
    return linear_cross_entropy(x, weight, bias, targets, label_smoothing=label_smoothing)
