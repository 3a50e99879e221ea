"""The step of nn/lone.py on a GPU: a handful of kernels for a layer, each doing all that can be done before others must wait.

One token for each row moves every weight through the chip once and computes next to nothing, so time goes into reading memory
and into starting kernels. Kernels begin before the one before them is done, and fetch their weights while they wait for it. For
a few rows a product and the bend or the residual behind it are one kernel; for more rows the products are cuBLAS's, and the
residual is added by the norm that follows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.nn.attention import Heads
from keepleft.nn.feedforward import ACTIVATIONS, Feed
from keepleft.nn.lone import Across, Enter, Here, Leave, Look
from keepleft.nn.swift_look import looked, looked_across
from keepleft.nn.swift_norm import Stream, joined
from keepleft.nn.swift_product import BENDS, FEW, added, multiplied


class Swift:
    whole = True

    def enter(self, norm: nn.Module | None, product: nn.Module, feed: Feed | None = None) -> Enter:
        return _entering(norm, product, feed)

    def leave(self, product: nn.Module) -> Leave:
        weight, bias, _ = _parts(product)

        def run(x: Tensor, y: Tensor) -> Any:
            if len(y) <= FEW:
                return added(x, y, weight, bias)
            return Stream(x, F.linear(y, weight, bias))
        return run

    def look(self, shape: Heads, window: int | None) -> Look:
        def run(qkv: Tensor, keys: Tensor, values: Tensor, here: Here) -> Tensor:
            return looked(qkv, keys, values, here, shape, window or 0)
        return run

    def across(self, shape: Heads) -> Across:
        def run(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
            return looked_across(q, keys, values, bias, shape)
        return run


def _entering(norm: nn.Module | None, product: nn.Module, feed: Feed | None) -> Enter:
    kind, gain, shift, eps = _norm_parts(norm)
    if isinstance(product, nn.Identity):  # a norm behind a norm
        def bare(x: Any) -> tuple[Any, Any, Tensor]:
            total, even = joined(x if isinstance(x, Stream) else Stream(x), kind, gain, shift, eps)
            return total, even, even
        return bare
    weight, bias, scale = _parts(product)
    bend, gated = (0, False) if feed is None else (BENDS[feed.bend], feed.gated)
    dtype = None if isinstance(product, nn.Linear) else torch.float32
    # what cuBLAS does on the way out
    fused = feed is not None and not gated and bias is not None and feed.bend in (ACTIVATIONS["relu"], ACTIVATIONS["gelu_tanh"])

    def run(x: Any) -> tuple[Any, Any, Tensor]:
        total, even = joined(x if isinstance(x, Stream) else Stream(x), kind, gain, shift, eps)
        if len(even) <= FEW:
            return total, even, multiplied(even, weight, bias, bend=bend, gated=gated, scale=scale, dtype=dtype)
        ready = even if scale == 1.0 else even * scale
        if fused and ready.is_cuda:
            assert feed is not None
            assert bias is not None
            return total, even, torch._addmm_activation(bias, ready, weight.t(), use_gelu=feed.bend is not ACTIVATIONS["relu"])
        y = F.linear(ready, weight, bias)
        return total, even, y if feed is None else feed.bent(y)
    return run


def _parts(product: nn.Module) -> tuple[Tensor, Tensor | None, float]:
    """Matrix, bias and the scale before them."""
    part: Any = product
    if isinstance(product, nn.Linear):
        return product.weight.detach(), None if product.bias is None else product.bias.detach(), 1.0
    weight, bias = part.given
    return weight.detach(), None if bias is None else bias.detach(), part.scale


def _norm_parts(norm: nn.Module | None) -> tuple[int, Tensor | None, Tensor | None, float]:
    """Its kind (none, root mean square, layer), gain, shift and the number that keeps it from dividing by nothing."""
    if norm is None or isinstance(norm, nn.Identity):
        return 0, None, None, 0.0
    part: Any = norm
    weight = part.weight.detach()
    if isinstance(norm, nn.LayerNorm):
        return 2, weight, None if norm.bias is None else norm.bias.detach(), norm.eps
    return 1, weight, None, torch.finfo(torch.float32).eps if part.eps is None else part.eps
