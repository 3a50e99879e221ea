"""A second model over the same weights: what is changed about one is not changed about the other."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

from torch import nn

from keepleft.inference.linear_cpu import PrepackedLinear
from keepleft.models.transformer import Model

ModelT = TypeVar("ModelT", bound=Model)


def share_weights(model: ModelT) -> ModelT:
    """A copy whose weights lie where the model's lie, and learn nothing. Layers that never change are the same ones."""
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    shared |= {id(buffer): buffer for buffer in model.buffers()}
    return deepcopy(model, shared | {id(module): module for module in model.modules() if isinstance(module, PrepackedLinear)})
