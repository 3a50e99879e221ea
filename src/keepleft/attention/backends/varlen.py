"""Variable-length (flash) attention: packed sequences without a dense mask. On a GPU, in half precision."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.masks import Full, Mask, is_causal_window, window_size
from keepleft.attention.segment_spans import segment_spans


class VarlenMask(NamedTuple):
    cu_seqlens: Tensor  # (sequences + 1,) how many of the B·T slots come before each sequence
    max_seqlen: int
    window_bounds: tuple[int, int]  # how far back and ahead a token attends; -1 is any distance
    padding_slots: Tensor | None  # (n,) padding is attended as a sequence of its own and then zeroed


def supports(mask: Mask, grid: Grid) -> bool:
    """Can the kernel express this mask? (Whether each sequence is in one piece, only lower() finds out.)"""
    return grid.is_square and (grid.is_plain or grid.q_seg is not None) and _window_bounds(mask) is not None


def lower(mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> VarlenMask:
    window_bounds, length = _window_bounds(mask), grid.queries
    if window_bounds is None or not supports(mask, grid):
        raise ValueError(f"variable-length attention cannot express {mask} here: use backend='flex'")
    if grid.is_plain:  # each row is a sequence
        cu_seqlens = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
        return VarlenMask(cu_seqlens, length, window_bounds, None)
    if segment_spans(mask, grid) is None:
        raise ValueError(
            "variable-length attention needs each sequence in one piece and in order: use backend='flex'"
        )
    assert grid.q_seg is not None
    is_start = torch.ones_like(grid.q_seg, dtype=torch.bool)
    is_start[:, 1:] = grid.q_seg[:, 1:] != grid.q_seg[:, :-1]
    cu_seqlens = F.pad(is_start.flatten().nonzero()[:, 0], (0, 1), value=is_start.numel()).to(torch.int32)
    padding_slots = (grid.q_seg == 0).flatten().nonzero()[:, 0]
    return VarlenMask(
        cu_seqlens, int(cu_seqlens.diff().max()), window_bounds, padding_slots if len(padding_slots) else None
    )


def add_bias(lowered_mask: VarlenMask, bias: Tensor) -> VarlenMask:
    raise ValueError("variable-length attention takes no bias: use backend='flex' or 'sdpa'")


def attend(q: Tensor, k: Tensor, v: Tensor, lowered_mask: VarlenMask, scale: float, dropout: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ValueError(
            f"variable-length attention has no dropout ({dropout} was asked for): use backend='sdpa'"
        )
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"variable-length attention works in half precision, not in {q.dtype}: "
            "use backend='flex' or 'sdpa'"
        )
    b, h, t, d = q.shape
    options = _varlen_options(lowered_mask.window_bounds, h // k.shape[1])
    if h != k.shape[1] and "enable_gqa" not in options:
        k, v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(1, 2).reshape(b * t, -1, d) for x in (q, k, v))
    out = varlen_attn(
        q,
        k,
        v,
        lowered_mask.cu_seqlens,
        lowered_mask.cu_seqlens,
        lowered_mask.max_seqlen,
        lowered_mask.max_seqlen,
        scale=scale,
        **options,
    )
    assert isinstance(out, Tensor)  # no log-sum-exp was requested
    if lowered_mask.padding_slots is not None:
        out = out.index_fill(0, lowered_mask.padding_slots, 0.0)
    return out.view(b, t, h, d).transpose(1, 2)


def _window_bounds(mask: Mask) -> tuple[int, int] | None:
    """(back, ahead) for full, causal and causal & window(n); None for any other mask."""
    if isinstance(mask, Full):
        return -1, -1
    if not is_causal_window(mask):
        return None
    if (size := window_size(mask)) is None:
        return -1, 0
    return (size - 1, 0) if _supports_windows() else None


@cache
def _varlen_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _supports_windows() -> bool:
    return "window_size" in _varlen_parameters()


@cache
def _varlen_options(window_bounds: tuple[int, int], group_size: int) -> dict[str, Any]:
    """The keyword arguments of varlen_attn in this PyTorch: they differ from release to release."""
    options: dict[str, Any] = {}
    if group_size > 1 and "enable_gqa" in _varlen_parameters():
        options["enable_gqa"] = True
    if _supports_windows():
        options["window_size"] = window_bounds
    else:
        options["is_causal"] = window_bounds == (-1, 0)
    return options
