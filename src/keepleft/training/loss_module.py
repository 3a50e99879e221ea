"""A model and its loss as one module, to be compiled or wrapped by DDP or FSDP; activation checkpointing.

The loss is that of teacher forcing: one forward pass is given the target tokens shifted right, as made by
data/teacher_forcing.py, and predicts the next token at all positions at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

from keepleft.models.heads import model_loss
from keepleft.models.stack import LayerStack
from keepleft.models.transformer import Model
from keepleft.nn.block import TransformerBlock
from keepleft.nn.loss import LossSums


class LossModule(nn.Module):
    """The model's inputs and targets in; the sums of loss, cross-entropy and correct predictions out."""

    def __init__(self, model: Model, label_smoothing: float) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing

    def forward(self, inputs: dict[str, Tensor], targets: Tensor) -> LossSums:
        return model_loss(self.model, inputs, targets, self.label_smoothing)


def stack_layers(model: Model) -> list[TransformerBlock]:
    """The layers of the encoder and the decoder: the units of FSDP and of activation checkpointing."""
    stacks = [getattr(model, name, None) for name in ("encoder", "decoder")]
    layers = [layer for stack in stacks if isinstance(stack, LayerStack) for layer in stack.layers]
    return [layer for layer in layers if isinstance(layer, TransformerBlock)]


def checkpoint_activations(model: Model) -> None:
    """Activation checkpointing: each layer drops its activations and recomputes them in the backward pass."""
    for layer in stack_layers(model):
        if not hasattr(layer, "is_checkpointed"):
            layer.is_checkpointed = True  # type: ignore[assignment]
            checkpointed_forward = partial(_checkpointed_forward, layer, layer.forward)
            layer.forward = checkpointed_forward  # type: ignore[method-assign]


def _checkpointed_forward(layer: nn.Module, forward: Callable[..., Tensor], *args: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*args)
    # the weights may be half-precision copies, which are gone by the backward pass: hold them
    weights: dict[str, Tensor] = dict(layer.named_parameters())

    def run_layer(*args: Any) -> Tensor:
        with _reparametrize_module(layer, weights):
            return forward(*args)

    return checkpoint(run_layer, *args, use_reentrant=False)
