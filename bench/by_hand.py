"""The kernels of PyTorch called as an expert would who knows the scene beforehand: what a race is run
against.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scenes import Scene


class Hand(NamedTuple):
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    lay: Callable[[Tensor], Tensor]  # (B, H, T, D) → how this kernel likes its tensors to lie; not timed


def by_hand(name: str, scene: Scene, device: str) -> Hand:
    return {"sdpa": _sdpa, "flex": _flex, "varlen": _varlen}[name](scene, device)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _sdpa(scene: Scene, device: str) -> Hand:
    """The kernel's own triangle, or a table of booleans made beforehand."""
    if scene.window is None and scene.segments is None:
        return Hand(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), _as_it_is)
    place = torch.arange(scene.length, device=device)
    table = (place <= place[:, None])[None, None]
    if scene.window is not None:
        table = table & (place[:, None] - place < scene.window)
    if scene.segments is not None:
        segments = scene.segments[:, None]
        table = table & (segments[..., None] == segments[..., None, :]) & (segments[..., None, :] != 0)
    return Hand(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, table), _as_it_is)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(scene: Scene, device: str) -> Hand:
    """The mask written out over slots, and compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    size, segments = scene.window, scene.segments

    def triangle(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i

    def band(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < size)

    def same_text(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (segments[b, i] == segments[b, j]) & (segments[b, j] != 0)

    seen = same_text if segments is not None else triangle if size is None else band
    rows = None if segments is None else scene.batch
    blocks = create_block_mask(seen, rows, None, scene.length, scene.length, device=device)
    kernel = _compiled_flex() if device == "cuda" else flex_attention
    return Hand(lambda q, k, v: kernel(q, k, v, block_mask=blocks), _as_it_is)


def _varlen(scene: Scene, device: str) -> Hand:
    """Real tokens end to end from the start, so that nothing has to be moved."""
    from torch.nn.attention.varlen import varlen_attn

    words = inspect.signature(varlen_attn).parameters
    options: dict[str, Any]
    if "window_size" in words:
        options = {"window_size": (-1 if scene.window is None else scene.window - 1, 0)}
    elif scene.window is None:
        options = {"is_causal": True}
    else:
        raise ValueError("variable-length attention of this PyTorch knows no window")
    if scene.segments is None:
        where, lengths = slice(None), torch.full((scene.batch,), scene.length, device=device)
    else:
        where = (scene.segments != 0).flatten()
        lengths = torch.cat(
            [row[row != 0].unique_consecutive(return_counts=True)[1] for row in scene.segments]
        )
    ends = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())

    def lay(x: Tensor) -> Tensor:
        return x.detach().transpose(1, 2).flatten(0, 1)[where].contiguous().requires_grad_(x.requires_grad)

    return Hand(lambda q, k, v: varlen_attn(q, k, v, ends, ends, longest, longest, **options), lay)
