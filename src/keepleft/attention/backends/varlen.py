"""Variable-length attention: texts laid end to end and no table. On a GPU, in half precision."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.masks import Full, Mask, is_causal_window, window_size
from keepleft.attention.runs import borders


class Form(NamedTuple):
    ends: Tensor            # (texts + 1,) how many of the B·T slots come before each text
    longest: int
    look: tuple[int, int]   # how far back and ahead a token looks; -1 is any distance
    padding: Tensor | None  # (n,) the slots of padding, which is attended as a text of its own and then emptied


def fits(mask: Mask, grid: Grid) -> bool:
    """Can this mask be said to the kernel? (Whether the texts lie in runs is known only after looking.)"""
    return grid.square and (grid.plain or grid.q_seg is not None) and _look(mask) is not None


def lower(mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> Form:
    look, length = _look(mask), grid.queries
    if look is None or not fits(mask, grid):
        raise ValueError(f"variable-length attention cannot say {mask} here: use backend='flex'")
    if grid.plain:  # each row is a text
        ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
        return Form(ends, length, look, None)
    if borders(mask, grid) is None:
        raise ValueError("variable-length attention needs each text in one piece and in order: use backend='flex'")
    assert grid.q_seg is not None
    opens = torch.ones_like(grid.q_seg, dtype=torch.bool)
    opens[:, 1:] = grid.q_seg[:, 1:] != grid.q_seg[:, :-1]
    ends = F.pad(opens.flatten().nonzero()[:, 0], (0, 1), value=opens.numel()).to(torch.int32)
    padding = (grid.q_seg == 0).flatten().nonzero()[:, 0]
    return Form(ends, int(ends.diff().max()), look, padding if len(padding) else None)


def plus(form: Form, bias: Tensor) -> Form:
    raise ValueError("variable-length attention takes no bias: use backend='flex' or 'sdpa'")


def attend(q: Tensor, k: Tensor, v: Tensor, form: Form, scale: float, dropout: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ValueError(f"variable-length attention has no dropout ({dropout} was asked for): use backend='sdpa'")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"variable-length attention works in half precision, not in {q.dtype}: use backend='flex' or 'sdpa'")
    b, h, t, d = q.shape
    options = _said(form.look, h // k.shape[1])
    if h != k.shape[1] and "enable_gqa" not in options:
        k, v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(1, 2).reshape(b * t, -1, d) for x in (q, k, v))
    out = varlen_attn(q, k, v, form.ends, form.ends, form.longest, form.longest, scale=scale, **options)
    assert isinstance(out, Tensor)  # nothing else was asked for
    if form.padding is not None:
        out = out.index_fill(0, form.padding, 0.0)
    return out.view(b, t, h, d).transpose(1, 2)


def _look(mask: Mask) -> tuple[int, int] | None:
    """(back, ahead) for full, causal and causal & window(n); None for any other mask."""
    if isinstance(mask, Full):
        return -1, -1
    if not is_causal_window(mask):
        return None
    if (size := window_size(mask)) is None:
        return -1, 0
    return (size - 1, 0) if _windows() else None


@cache
def _words() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _windows() -> bool:
    return "window_size" in _words()


@cache
def _said(look: tuple[int, int], groups: int) -> dict[str, Any]:
    """The same wish in the words of this PyTorch: they differ from release to release."""
    options: dict[str, Any] = {"enable_gqa": True} if groups > 1 and "enable_gqa" in _words() else {}
    return options | ({"window_size": look} if _windows() else {"is_causal": look == (-1, 0)})
