"""The feed-forward network (MLP) of a layer, plain or gated (SwiGLU, GEGLU), and its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from keepleft import checks

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True)
class FeedForward:
    """Config of a feed-forward network; the module is FeedForwardLayer."""

    width: int
    activation: Activation
    gated: bool = False

    def __post_init__(self) -> None:
        checks.check_int("width", self.width)
        checks.check_choice("activation", self.activation, ACTIVATIONS)
        checks.check_bool("gated", self.gated)


class FeedForwardLayer(nn.Module):
    """down(act(up x)), or gated: down(act(gate x) · up x), with gate and up in one matrix, gate first."""

    def __init__(self, config: FeedForward, dim: int, *, bias: bool) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gated = config.gated
        self.up = nn.Linear(dim, config.width * (2 if config.gated else 1), bias=bias)
        self.down = nn.Linear(config.width, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.up(x)))

    def activate(self, x: Tensor) -> Tensor:
        """The activation between the two matrices; gated, the last axis is halved."""
        if not self.gated:
            return self.activation(x)
        gate, x = x.chunk(2, -1)
        return self.activation(gate) * x
