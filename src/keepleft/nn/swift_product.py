"""Products of nn/swift.py: one row or a few against a matrix, with the bend or the residual behind it, in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepleft.nn.feedforward import ACTIVATIONS
from keepleft.nn.gpu import cdiv, early, gdc_launch_dependents, gdc_wait, jit, power, tl
from keepleft.nn.swift_norm import Stream

FEW = 128     # rows up to which a product and what is around it are one kernel
BENDS = {bend: n + 1 for n, bend in enumerate(ACTIVATIONS.values())}  # relu, gelu, gelu_tanh, silu


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, *, plus: Tensor | None = None, bend: int = 0,
               gated: bool = False, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """bend(x Wᵀ + b), or plus + x Wᵀ + b, for a few rows: (R, inputs) → (R, outputs)"""
    rows, inputs = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    out = torch.empty(rows, outputs, dtype=x.dtype if dtype is None else dtype, device=x.device)
    pick = lambda tensor: x if tensor is None else tensor
    given = (x, weight, pick(bias), pick(plus), out, outputs, inputs, scale)
    ways = (bias is not None, plus is not None, bend, gated, x.is_cuda)
    if rows == 1:
        block, wide, warps = plan_one(outputs, inputs, gated)
        _one_kernel[(cdiv(outputs, block),)](*given, *ways, block, wide, num_warps=warps, **early(x))
    else:
        _some(x, weight, given, rows, ways, out, 1)
    return out


def added(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The stream x with y Wᵀ + b, to which several programs may contribute: what they found is added by the next norm."""
    rows, inputs = y.shape
    if rows == 1:
        return multiplied(y, weight, bias, plus=x)
    parts = max(1, min(4, inputs // 768))
    out = torch.empty(parts, rows, len(weight), dtype=torch.float32, device=y.device)
    given = (y, weight, y if bias is None else bias, y, out, len(weight), inputs, 1.0)
    _some(y, weight, given, rows, (bias is not None, False, 0, False, y.is_cuda), out, parts)
    return Stream(x, out)


def _some(x: Tensor, weight: Tensor, given: tuple[Any, ...], rows: int, ways: tuple[Any, ...], out: Tensor, parts: int) -> None:
    outputs, inputs, padded = out.shape[-1], x.shape[1], max(16, power(rows))
    block, wide, warps, stages = plan_some(outputs, inputs // parts, padded, weight.element_size())
    span = cdiv(cdiv(inputs, parts), wide) * wide
    _some_kernel[(cdiv(outputs, block), parts)](
        *given, rows, span, *ways, padded, block, wide, 128 // weight.element_size(), outputs * inputs < 1 << 23,
        num_warps=warps, num_stages=stages, **early(x))


def plan_one(outputs: int, inputs: int, gated: bool) -> tuple[int, int, int]:
    """How many outputs a program works out, how many inputs it reads at a time, with how many warps: by trial on an H200."""
    if outputs * inputs >= 1 << 23:
        if inputs >= 2048:
            return (2, 2048, 4) if gated else (2, 2048, 2) if outputs >= 1 << 14 else (4, 1024, 4)
        return (8 if inputs <= 512 else 4), 512, 2
    return (4, power(inputs), 2) if inputs <= 1024 else (2, min(4096, power(inputs)), 2)


def plan_some(outputs: int, inputs: int, padded: int, size: int) -> tuple[int, int, int, int]:
    """The same for several rows, and how far ahead it reads; numbers of 4 bytes take twice the room."""
    wide = max(64, min(power(inputs), 256 if padded <= 32 else 128) * 2 // size)
    if outputs > 8192:
        return 64, max(64, wide // 2), 4, 3
    return (16, wide, 4, 3) if outputs < 1024 else (32, wide, 4, 5 if padded <= 32 else 3)


@jit  # type: ignore[untyped-decorator]
def _bent(y, bend: tl.constexpr):  # type: ignore
    if bend == 1:
        y = tl.maximum(y, 0.0)
    elif bend == 2:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif bend == 3:
        inner = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        y = y * tl.sigmoid(2.0 * inner)
    elif bend == 4:
        y = y * tl.sigmoid(y)
    return y


@jit  # type: ignore[untyped-decorator]
def _fetch(at):  # type: ignore
    """Bring the line of memory that a pointer points to nearer."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@jit  # type: ignore[untyped-decorator]
def _one_kernel(x, weight, bias, plus, out, outputs, inputs, scale, biased: tl.constexpr, add: tl.constexpr,  # type: ignore
                bend: tl.constexpr, gated: tl.constexpr, soon: tl.constexpr, block: tl.constexpr, wide: tl.constexpr):
    n = tl.program_id(0) * block + tl.arange(0, block)
    seen = n < outputs
    lane = tl.arange(0, wide)
    at = weight + n[:, None].to(tl.int64) * inputs + lane[None, :]
    far = outputs.to(tl.int64) * inputs if gated else 0
    if soon:
        gdc_launch_dependents()
    inside = seen[:, None] & (lane < inputs)[None, :]
    w = tl.load(at, mask=inside, other=0.0)  # weights are there before x is
    u = tl.load(at + far, mask=inside, other=0.0) if gated else w
    if soon:
        gdc_wait()
    sums = tl.zeros([block, wide], tl.float32)
    more = tl.zeros([block, wide], tl.float32)
    for begin in range(0, inputs, wide):
        k = begin + lane
        a = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        later = seen[:, None] & (k + wide < inputs)[None, :]
        at += wide
        w_next = tl.load(at, mask=later, other=0.0)
        u_next = tl.load(at + far, mask=later, other=0.0) if gated else w_next
        sums += w.to(tl.float32) * a[None, :]
        if gated:
            more += u.to(tl.float32) * a[None, :]
        w = w_next
        u = u_next
    y = tl.sum(sums, 1) * scale
    if biased:
        y += tl.load(bias + n, mask=seen, other=0.0).to(tl.float32)
    y = _bent(y, bend)
    if gated:
        z = tl.sum(more, 1) * scale
        if biased:
            z += tl.load(bias + outputs + n, mask=seen, other=0.0).to(tl.float32)
        y *= z
    if add:
        y += tl.load(plus + n, mask=seen, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=seen)


@jit  # type: ignore[untyped-decorator]
def _some_kernel(x, weight, bias, plus, out, outputs, inputs, scale, rows, span, biased: tl.constexpr, add: tl.constexpr,  # type: ignore
                 bend: tl.constexpr, gated: tl.constexpr, soon: tl.constexpr, padded: tl.constexpr, block: tl.constexpr,
                 wide: tl.constexpr, line: tl.constexpr, near: tl.constexpr):
    n = tl.program_id(0) * block + tl.arange(0, block)
    seen = n < outputs
    r = tl.arange(0, padded)
    real = r < rows
    lane = tl.arange(0, wide)
    w_at = weight + n[None, :].to(tl.int64) * inputs + lane[:, None]
    a_at = x + r[:, None] * inputs + lane[None, :]
    far = outputs.to(tl.int64) * inputs if gated else 0
    part = tl.program_id(1)
    start = part * span
    stop = tl.minimum(start + span, inputs)
    if soon:
        gdc_launch_dependents()
        if near:  # weights come nearer before x is there
            step = tl.arange(0, wide // line) * line
            for begin in range(start, stop, wide):
                _fetch(tl.where(seen[None, :] & (begin + step < stop)[:, None],
                                weight + n[None, :].to(tl.int64) * inputs + step[:, None] + begin, weight))
        gdc_wait()
    sums = tl.zeros([padded, block], tl.float32)
    more = tl.zeros([padded, block], tl.float32)
    for begin in range(start, stop, wide):
        left = stop - begin
        w = tl.load(w_at + begin, mask=seen[None, :] & (lane < left)[:, None], other=0.0)
        a = tl.load(a_at + begin, mask=real[:, None] & (lane < left)[None, :], other=0.0)
        sums = tl.dot(a, w, sums, input_precision="ieee")
        if gated:
            u = tl.load(w_at + far + begin, mask=seen[None, :] & (lane < left)[:, None], other=0.0)
            more = tl.dot(a, u, more, input_precision="ieee")
    y = sums * scale
    if biased:
        y += tl.load(bias + n, mask=seen & (part == 0), other=0.0).to(tl.float32)[None, :]
    y = _bent(y, bend)
    if gated:
        z = more * scale
        if biased:
            z += tl.load(bias + outputs + n, mask=seen, other=0.0).to(tl.float32)[None, :]
        y *= z
    here = real[:, None] & seen[None, :]
    at = r[:, None] * outputs + n[None, :]
    tl.store(out + part * rows * outputs + at, y.to(out.dtype.element_ty), mask=here)
