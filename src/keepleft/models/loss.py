"""What is asked of a model, and how it answers: the sums of its loss over a batch, for training and for
evaluation alike.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from keepleft.nn.loss import LossSums, classification_loss, linear_cross_entropy


def model_loss(
    model: nn.Module, inputs: dict[str, Tensor], targets: Tensor, label_smoothing: float = 0.0
) -> LossSums:
    """The arguments of the model, and the targets: (B, T) tokens or (B,) labels."""
    module: Any = model
    if targets.dim() == 1:
        return classification_loss(module(**inputs), targets, label_smoothing)
    x = module.head.transform(module.hidden_states(**inputs))
    weight, bias = module.head.output_weight(module.token)
    return linear_cross_entropy(x, weight, bias, targets, label_smoothing=label_smoothing)
