"""What one step of a layer is made of when each row has one token, in plain PyTorch.

`enter` is a norm and the product behind it, `leave` a product and the residual behind it, `look` and `across` are the two
attentions. Each is made once and then called with tensors alone: (R, dim) and what belongs to the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from keepleft.nn.attention import Heads
from keepleft.nn.feedforward import Feed
from keepleft.nn.position import rotate

Enter = Callable[[Any], tuple[Any, Any, Tensor]]  # the stream → the stream, the stream behind the norm, the product
Leave = Callable[[Any, Tensor], Any]              # the stream and (R, …) → the stream with the product of it added


class Turn(NamedTuple):
    """Cosines and sines of each row's position, (R or 1, 1, D)."""

    cosines: Tensor
    sines: Tensor


@dataclass
class Here:
    """Where a step stands: what all layers share."""

    length: int                           # tokens before this one
    now: Tensor                           # (1,) the same, where a recording can read it
    turn: Turn | None = None
    first: Tensor | None = None           # (R,) the column where each row's text begins; None: at 0
    near: Tensor | None = None            # (H, capacity) what is added to a score by distance
    parents: Tensor | None = None         # (capacity, R) which row of the buffers holds a column of a row; None: itself
    biases: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window, what is added to the scores


class Look(Protocol):
    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor, here: Here) -> Tensor:
        """(R, (H + 2 Hk) · D) and buffers (capacity, R, Hk, D), written to → (R, H · D)"""
        ...


class Across(Protocol):
    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """(R, H · D) over (B, Hk, S, D) of sources that R / B neighbours share; (B, S) is added → (R, H · D)"""
        ...


class Tools(Protocol):
    """Where the work is done: plain PyTorch here, kernels for a GPU elsewhere."""

    whole: bool  # buffers are looked at as they are, so that shapes never change, or only as far as they are filled

    def enter(self, norm: nn.Module | None, product: nn.Module, feed: Feed | None = None) -> Enter: ...
    def leave(self, product: nn.Module) -> Leave: ...
    def look(self, shape: Heads, window: int | None) -> Look: ...
    def across(self, shape: Heads) -> Across: ...


class Plain:
    """Plain PyTorch. `whole`: for compilers."""

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole

    def enter(self, norm: nn.Module | None, product: nn.Module, feed: Feed | None = None) -> Enter:
        even, times, bend = even_of(norm), product.forward, None if feed is None else feed.bent

        def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = even(x)
            z = times(y)
            return x, y, z if bend is None else bend(z)
        return run

    def leave(self, product: nn.Module) -> Leave:
        times = product.forward
        return lambda x, y: x + times(y)

    def look(self, shape: Heads, window: int | None) -> Look:
        heads, few, width, scale = shape.heads, shape.kv_heads, shape.width, shape.factor

        def filled(qkv: Tensor, keys: Tensor, values: Tensor, here: Here) -> Tensor:
            q, k, v = apart(qkv, shape, here.turn)
            stop = here.length + 1
            begin = 0 if window is None else max(0, stop - window)
            keys[here.length].copy_(k)
            values[here.length].copy_(v)
            return _looked(q.reshape(len(q) * few, heads // few, width), keys[begin:stop].flatten(1, 2).transpose(0, 1),
                           values[begin:stop].flatten(1, 2).transpose(0, 1), here.biases[window], scale).view(len(q), -1)

        def whole(qkv: Tensor, keys: Tensor, values: Tensor, here: Here) -> Tensor:
            q, k, v = apart(qkv, shape, here.turn)
            keys.index_copy_(0, here.now, k[None])
            values.index_copy_(0, here.now, v[None])
            if here.parents is not None:
                column = torch.arange(len(keys), device=keys.device)[:, None]
                keys, values = keys[column, here.parents], values[column, here.parents]
            scores = (q.view(len(q), few, -1, width) * keys[:, :, :, None]).sum(-1) * scale
            bias = here.biases[window]
            weights = (scores if bias is None else scores + bias).softmax(0)
            return (weights[..., None] * values[:, :, :, None]).sum(0).flatten(1)

        return whole if self.whole else filled

    def across(self, shape: Heads) -> Across:
        heads, few, width, scale = shape.heads, shape.kv_heads, shape.width, shape.factor

        def run(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
            sources = len(keys)
            share = len(q) // sources
            # neighbours of one source, and heads of one key head, are so many more queries
            asked = q.view(sources, share, few, heads // few, width).transpose(1, 2)
            if not self.whole:
                added = None if bias is None else bias[:, None, None].expand(-1, few, -1, -1).flatten(0, 1)
                found = _looked(asked.reshape(sources * few, -1, width), keys.flatten(0, 1), values.flatten(0, 1), added, scale)
                return found.view(sources, few, share, -1).transpose(1, 2).reshape(len(q), -1)
            scores = (asked[:, :, :, :, None] * keys[:, :, None, None]).sum(-1) * scale
            weights = (scores if bias is None else scores + bias[:, None, None, None]).softmax(-1)
            return (weights[..., None] * values[:, :, None, None]).sum(-2).transpose(1, 2).reshape(len(q), -1)
        return run


def apart(qkv: Tensor, shape: Heads, turn: Turn | None) -> tuple[Tensor, ...]:
    """(R, (H + 2 Hk) · D) → queries (R, H, D), keys and values (R, Hk, D), turned where they are to be"""
    heads, few = shape.heads, shape.kv_heads
    parts = qkv.view(len(qkv), -1, shape.width)
    if turn is None:
        return parts.split([heads, few, few], 1)
    q, v = parts.split([heads + few, few], 1)
    q, k = rotate(q, *turn).split([heads, few], 1)
    return q, k, v


def _looked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """(N, Q, D) over (N, K, D)"""
    if bias is None:
        scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=scale)
    else:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v)


def even_of(norm: nn.Module | None) -> Callable[[Tensor], Tensor]:
    """The norm as a bare function; None changes nothing."""
    if norm is None or isinstance(norm, nn.Identity):
        return lambda x: x
    if isinstance(norm, nn.LayerNorm):
        shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
    return norm.forward
