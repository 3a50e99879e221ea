"""The feed-forward part: widen, bend, narrow, for each token by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.nn import sense

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu,
}


@dataclass(frozen=True)
class FeedForward:
    width: int
    activation: Activation
    gated: bool = False

    def __post_init__(self) -> None:
        sense.whole("width", self.width)
        sense.word("activation", self.activation, ACTIVATIONS)
        sense.flag("gated", self.gated)


class Feed(nn.Module):
    """down(act(up x)), or down(act(gate x) · up x); gate and up are one matrix, gate first."""

    def __init__(self, choice: FeedForward, dim: int, *, bias: bool) -> None:
        super().__init__()
        self.bend, self.gated = ACTIVATIONS[choice.activation], choice.gated
        self.up = nn.Linear(dim, choice.width * (2 if choice.gated else 1), bias=bias)
        self.down = nn.Linear(choice.width, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.bent(self.up(x)))

    def bent(self, x: Tensor) -> Tensor:
        """What lies between the two matrices."""
        if not self.gated:
            return self.bend(x)
        gate, x = x.chunk(2, -1)
        return self.bend(gate) * x
