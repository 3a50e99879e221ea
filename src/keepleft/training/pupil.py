"""A model and its loss as one module: what is compiled, copied to other devices or sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

from keepleft.models.asked import answered
from keepleft.nn.loss import Sums


class Pupil(nn.Module):
    def __init__(self, model: nn.Module, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, inputs: dict[str, Tensor], targets: Tensor) -> Sums:
        return answered(self.model, inputs, targets, self.smoothing)


def layers(model: nn.Module) -> list[nn.Module]:
    """The layers of all stacks: what is computed again, or sharded, one by one."""
    stacks: list[Any] = [getattr(model, name, None) for name in ("encoder", "decoder")]
    return [layer for stack in stacks if stack is not None for layer in stack.layers]


def recompute(model: nn.Module) -> None:
    """Let every layer forget its activations and compute them again going back."""
    for layer in layers(model):
        if not hasattr(layer, "forgetful"):
            layer.forgetful = True  # type: ignore[assignment]
            layer.forward = partial(_again, layer, layer.forward)  # type: ignore[method-assign]


def _again(layer: nn.Module, forward: Any, *given: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*given)
    # the weights may be copies in another precision, which are gone when going back: hold them
    held: dict[str, Tensor] = dict(layer.named_parameters())

    def once(*given: Any) -> Any:
        with _reparametrize_module(layer, held):
            return forward(*given)

    return checkpoint(once, *given, use_reentrant=False)
