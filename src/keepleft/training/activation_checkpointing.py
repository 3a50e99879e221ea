"""Activation checkpointing: layers recompute their activations in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

from keepleft.models.stack import LayerStack
from keepleft.nn.block import TransformerBlock


def stack_layers(model: nn.Module) -> list[TransformerBlock]:
    """The layers of the encoder and the decoder: the units of FSDP and of activation checkpointing."""
    stacks = [getattr(model, name, None) for name in ("encoder", "decoder")]
    layers = [layer for stack in stacks if isinstance(stack, LayerStack) for layer in stack.layers]
    return [layer for layer in layers if isinstance(layer, TransformerBlock)]


def checkpoint_activations(model: nn.Module) -> None:
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
