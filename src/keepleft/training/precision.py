"""Mixed precision: a model computes in bfloat16; its weights and the optimizer state stay in float32."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class MixedPrecision(nn.Module):
    """A module, called with half-precision copies of its weights made in each pass; gradients are float32.

    Unlike with autocast, the activations between the matrix products are half precision, too: half the bytes
    to move. Softmax, norms and losses still accumulate in float32.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = dict(chain(self.module.named_parameters(), self.module.named_buffers()))
        float_tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        if torch.compiler.is_compiling():  # the compiler fuses the casts itself
            copies = {name: tensor.to(self.dtype) for name, tensor in float_tensors.items()}
        else:
            trainable = {name: tensor for name, tensor in float_tensors.items() if tensor.requires_grad}
            frozen = {name: tensor for name, tensor in float_tensors.items() if not tensor.requires_grad}
            copies = {name: tensor.to(self.dtype) for name, tensor in frozen.items()}
            copies |= zip(trainable, _CastTensors.apply(self.dtype, *trainable.values()), strict=True)
        return functional_call(self.module, tensors | copies, args, kwargs)


class _CastTensors(torch.autograd.Function):
    """Cast many tensors to another dtype, and their gradients back, with few kernels (foreach copies)."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        out = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(out, tensors)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        indexed_gradients = [(n, gradient) for n, gradient in enumerate(gradients) if gradient is not None]
        cast_gradients = [
            torch.empty_like(gradient, dtype=ctx.dtypes[n]) for n, gradient in indexed_gradients
        ]
        torch._foreach_copy_(cast_gradients, [gradient for _, gradient in indexed_gradients])
        out: list[Tensor | None] = [None] * len(gradients)
        for (n, _), gradient in zip(indexed_gradients, cast_gradients, strict=True):
            out[n] = gradient
        return None, *out
