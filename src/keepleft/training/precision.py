"""Half precision: a model computes in bfloat16 while its weights, and what the optimizer makes of them, stay in float32."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


class Half(nn.Module):
    """The same module on half-precision copies of its weights, made anew in every pass; gradients come back in float32.

    Unlike autocast, what flows between the matrix products is half precision too: half the bytes to move. Softmax, norms
    and losses take their sums in float32 all the same.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *given: Any, **named: Any) -> Any:
        copies = {name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor
                  for name, tensor in chain(self.module.named_parameters(), self.module.named_buffers())}
        return functional_call(self.module, copies, given, named)
