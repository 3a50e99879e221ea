"""Residual stream and norm of nn/swift.py: what products left to be added is added by the norm that follows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keepleft.nn.gpu import early, gdc_launch_dependents, gdc_wait, jit, power, tl


class Stream(NamedTuple):
    """The residual stream of many rows, with what is still to be added to it."""

    x: Tensor
    more: Tensor | None = None  # (R, dim), or several of them


def joined(stream: Stream, kind: int, gain: Tensor | None, shift: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The stream with what was to be added, and the same behind a norm."""
    x, more = stream
    if kind == 0:
        x = x if more is None else x + (more if more.dim() == 2 else more.sum(0)).to(x.dtype)
        return x, x
    assert gain is not None
    total = x if more is None else torch.empty_like(x)
    even, width = torch.empty_like(x), x.shape[1]
    _joined_kernel[(len(x),)](x, x if more is None else more, gain, gain if shift is None else shift, total, even, width, eps,
                              0 if more is None else 1 if more.dim() == 2 else len(more), len(x), kind, shift is not None,
                              x.is_cuda, power(width), num_warps=min(16, max(4, power(width) // 256)), **early(x))
    return total, even


@jit  # type: ignore[untyped-decorator]
def _joined_kernel(x, more, gain, shift, total, even, width, eps, parts: tl.constexpr, rows, kind: tl.constexpr,  # type: ignore
                   shifted: tl.constexpr, soon: tl.constexpr, block: tl.constexpr):
    if soon:
        gdc_launch_dependents()
        gdc_wait()
    lane = tl.arange(0, block)
    inside = lane < width
    at = tl.program_id(0) * width + lane
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if parts > 0:
        for n in tl.static_range(parts):
            a += tl.load(more + n * rows * width + at, mask=inside, other=0.0).to(tl.float32)
        a = a.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + at, a.to(total.dtype.element_ty), mask=inside)
    if kind == 2:
        a = tl.where(inside, a - tl.sum(a, 0) / width, 0.0)
    y = a * tl.rsqrt(tl.sum(a * a, 0) / width + eps) * tl.load(gain + lane, mask=inside, other=0.0).to(tl.float32)
    if shifted:
        y += tl.load(shift + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(even + at, y.to(even.dtype.element_ty), mask=inside)
