"""Variable-length attention: texts laid end to end, no padding and no table. On a GPU, in half precision."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.masks import Both, Causal, Full, Mask, Window, causal
from keepleft.attention.runs import borders


class Form(NamedTuple):
    where: Tensor | None  # (N,) the real tokens among the B·T slots; None where all are real
    ends: Tensor          # (texts + 1,) how many real tokens come before each text
    longest: int
    look: tuple[int, int]  # how far back and ahead a token looks; -1 is any distance


def fits(mask: Mask, grid: Grid) -> bool:
    """Can this mask be said to the kernel? (Whether the texts lie in runs is known only after looking.)"""
    return grid.square and grid.q_seg is not None and _look(mask) is not None


def lower(mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> Form:
    look, found = _look(mask), borders(mask, grid)
    if look is None or found is None:
        raise ValueError(f"variable-length attention cannot say {mask} over these segments: use backend='flex'")
    lengths = (found[:, 2] - found[:, 1]).to(torch.int32)
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    real = (grid.q_seg != 0).flatten()  # type: ignore[union-attr]
    where = real.nonzero()[:, 0]
    return Form(None if len(where) == len(real) else where, ends, int(lengths.max()) if len(lengths) else 0, look)


def plus(form: Form, bias: Tensor) -> Form:
    raise ValueError("variable-length attention takes no bias: use backend='flex' or 'sdpa'")


def attend(q: Tensor, k: Tensor, v: Tensor, form: Form, scale: float, dropout: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ValueError(f"variable-length attention has no dropout ({dropout} was asked for): use backend='sdpa'")
    b, h, t, d = q.shape
    groups = h // k.shape[1]
    options = _said(form.look, groups)
    if groups > 1 and not options.get("enable_gqa"):
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    q, k, v = (x.transpose(1, 2).reshape(b * t, -1, d) for x in (q, k, v))
    if form.where is not None:
        q, k, v = (x.index_select(0, form.where) for x in (q, k, v))
    out = varlen_attn(q, k, v, form.ends, form.ends, form.longest, form.longest, scale=scale, **options)
    assert isinstance(out, Tensor)  # nothing else was asked for
    if form.where is not None:
        out = out.new_zeros(b * t, h, d).index_copy(0, form.where, out)
    return out.view(b, t, h, d).transpose(1, 2)


def _look(mask: Mask) -> tuple[int, int] | None:
    """(back, ahead) for full, causal and causal & window(n); None for any other mask."""
    if isinstance(mask, Full):
        return -1, -1
    if isinstance(mask, Causal):
        return -1, 0
    if isinstance(mask, Both) and len(mask.parts) == 2 and causal in mask.parts:
        size = next((part.size for part in mask.parts if isinstance(part, Window)), None)
        return None if size is None else (size - 1, 0)
    return None


def _said(look: tuple[int, int], groups: int) -> dict[str, Any]:
    """The same wish in the words of this PyTorch: 2.11 and 2.13 differ."""
    from torch.nn.attention.varlen import varlen_attn

    words = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": groups > 1} if "enable_gqa" in words else {}
    return options | ({"window_size": look} if "window_size" in words else {"is_causal": look == (-1, 0)})
