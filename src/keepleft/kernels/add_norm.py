"""Residual stream and norm of inference/ops_triton.py: what products left to be added is added by the norm
that follows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keepleft.kernels.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    next_power_of_2,
    pdl_kwargs,
    tl,
)


class PendingResidual(NamedTuple):
    """A residual stream (R, dim) with what is still to be added to it."""

    x: Tensor
    pending: Tensor | None = None  # (R, dim), or (n, R, dim) partial sums


def add_norm(
    residual: PendingResidual, norm_kind: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The residual with the pending part added, and the same after the norm."""
    x, pending = residual
    if norm_kind == 0:
        x = x if pending is None else x + (pending if pending.dim() == 2 else pending.sum(0)).to(x.dtype)
        return x, x
    assert weight is not None
    total = x if pending is None else torch.empty_like(x)
    normed, dim = torch.empty_like(x), x.shape[1]
    _add_norm_kernel[(len(x),)](
        x,
        x if pending is None else pending,
        weight,
        weight if bias is None else bias,
        total,
        normed,
        dim,
        eps,
        0 if pending is None else 1 if pending.dim() == 2 else len(pending),
        len(x),
        norm_kind,
        bias is not None,
        x.is_cuda,
        next_power_of_2(dim),
        num_warps=min(16, max(4, next_power_of_2(dim) // 256)),
        **pdl_kwargs(x),
    )
    return total, normed


@jit
def _add_norm_kernel(
    x,
    pending,
    weight,
    bias,
    total,
    normed,
    dim,
    eps,
    num_pending: tl.constexpr,
    rows,
    norm_kind: tl.constexpr,
    has_bias: tl.constexpr,
    use_pdl: tl.constexpr,
    block: tl.constexpr,
):
    if use_pdl:
        gdc_launch_dependents()
        gdc_wait()
    lane = tl.arange(0, block)
    mask = lane < dim
    offsets = tl.program_id(0) * dim + lane
    a = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if num_pending > 0:
        for n in tl.static_range(num_pending):
            a += tl.load(pending + n * rows * dim + offsets, mask=mask, other=0.0).to(tl.float32)
        a = a.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + offsets, a.to(total.dtype.element_ty), mask=mask)
    if norm_kind == 2:
        a = tl.where(mask, a - tl.sum(a, 0) / dim, 0.0)
    y = (
        a
        * tl.rsqrt(tl.sum(a * a, 0) / dim + eps)
        * tl.load(weight + lane, mask=mask, other=0.0).to(tl.float32)
    )
    if has_bias:
        y += tl.load(bias + lane, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + offsets, y.to(normed.dtype.element_ty), mask=mask)
