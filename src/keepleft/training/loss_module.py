"""A model and its loss as one module: what is compiled, copied to other devices or sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

from keepleft.models.loss import model_loss
from keepleft.nn.loss import LossSums


class LossModule(nn.Module):
    def __init__(self, model: nn.Module, label_smoothing: float) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing

    def forward(self, inputs: dict[str, Tensor], targets: Tensor) -> LossSums:
        return model_loss(self.model, inputs, targets, self.label_smoothing)


def stack_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of all stacks: what is computed again, or sharded, one by one."""
    stacks: list[Any] = [getattr(model, name, None) for name in ("encoder", "decoder")]
    return [layer for stack in stacks if stack is not None for layer in stack.layers]


def checkpoint_activations(model: nn.Module) -> None:
    """Let every layer forget its activations and compute them again going back."""
    for layer in stack_layers(model):
        if not hasattr(layer, "is_checkpointed"):
            layer.is_checkpointed = True  # type: ignore[assignment]
            layer.forward = partial(_checkpointed_forward, layer, layer.forward)  # type: ignore[method-assign]


def _checkpointed_forward(layer: nn.Module, forward: Any, *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args)
    # the weights may be copies in another precision, which are gone when going back: hold them
    weights: dict[str, Tensor] = dict(layer.named_parameters())

    def run_layer(*args: Any) -> Any:
        with _reparametrize_module(layer, weights):
            return forward(*args)

    return checkpoint(run_layer, *args, use_reentrant=False)
