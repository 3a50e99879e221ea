"""The step of nn/lone.py on a GPU: a handful of kernels for a layer, each doing all that can be done before others must wait.

One token for each row moves every weight through the chip once and computes next to nothing, so time goes into reading memory
and into starting kernels. For a few rows a norm, its product, the bend behind it or the residual are one kernel; for more rows
the products are cuBLAS's, and the residual and the norm are one kernel between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.nn.attention import Heads
from keepleft.nn.feedforward import ACTIVATIONS, Feed
from keepleft.nn.lone import Across, Enter, Here, Leave, Look

try:
    import triton.language as tl  # type: ignore[import-not-found]
    from triton import cdiv, jit  # type: ignore[import-not-found]
except ImportError:  # it comes with PyTorch wherever there is a GPU; nothing here is called without it
    jit: Any = lambda function: function  # type: ignore[no-redef]

FEW = 4       # rows up to which a product is read through without tensor cores
SPLIT = 512   # tokens of a text that one program looks at
BENDS = {None: 0, **{bend: n + 1 for n, bend in enumerate(ACTIVATIONS.values())}}  # relu, gelu, gelu_tanh, silu


class Stream(NamedTuple):
    """The residual stream of many rows, with what is still to be added to it."""

    x: Tensor
    more: Tensor | None = None


class Swift:
    whole = True

    def enter(self, norm: nn.Module | None, product: nn.Module, feed: Feed | None = None) -> Enter:
        few, many = _entering(norm, product, feed), _entering_many(norm, product, feed)
        return lambda x: few(x) if isinstance(x, Tensor) and len(x) <= FEW else many(x)

    def leave(self, product: nn.Module) -> Leave:
        weight, bias, _ = _parts(product)

        def run(x: Any, y: Tensor) -> Any:
            if len(y) <= FEW:
                return _product(y, weight, bias, plus=x)
            return Stream(x.x if isinstance(x, Stream) else x, F.linear(y, weight, bias))
        return run

    def look(self, shape: Heads, window: int | None) -> Look:
        def run(qkv: Tensor, keys: Tensor, values: Tensor, here: Here) -> Tensor:
            return _looked(qkv, keys, values, here, shape, window or 0)
        return run

    def across(self, shape: Heads) -> Across:
        def run(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
            out, length = torch.empty_like(q), keys.shape[2]
            assert keys.stride() == values.stride() and keys.stride(3) == 1
            _across_kernel[(len(q), shape.heads)](
                q, keys, values, q if bias is None else bias, out, len(q) // len(keys), length, *keys.stride()[:3], shape.factor,
                shape.heads, shape.heads // shape.kv_heads, shape.width, _power(shape.width), bias is not None, 32, num_warps=2)
            return out
        return run


def _entering(norm: nn.Module | None, product: nn.Module, feed: Feed | None) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """All in one kernel."""
    weight, bias, scale = _parts(product)
    kind, gain, shift, eps = _norm_parts(norm)
    bend, gated = (0, False) if feed is None else (BENDS[feed.bend], feed.gated)
    out_dtype = torch.float32 if not isinstance(product, nn.Linear) else None

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        even = torch.empty_like(x) if kind else x
        y = _product(x, weight, bias, kind=kind, gain=gain, shift=shift, eps=eps, even=even if kind else None,
                     bend=bend, gated=gated, scale=scale, dtype=out_dtype)
        return x, even, y
    return run


def _entering_many(norm: nn.Module | None, product: nn.Module, feed: Feed | None) -> Callable[[Any], tuple[Any, Any, Tensor]]:
    weight, bias, scale = _parts(product)
    kind, gain, shift, eps = _norm_parts(norm)
    fused = feed is not None and not feed.gated and bias is not None and feed.bend in (ACTIVATIONS["relu"], ACTIVATIONS["gelu_tanh"])

    def run(x: Any) -> tuple[Any, Any, Tensor]:
        stream = x if isinstance(x, Stream) else Stream(x)
        total, even = _joined(stream, kind, gain, shift, eps)
        ready = even if scale == 1.0 else even * scale
        if fused and ready.is_cuda:
            assert feed is not None and bias is not None
            return total, even, torch._addmm_activation(bias, ready, weight.t(), use_gelu=feed.bend is not ACTIVATIONS["relu"])
        y = F.linear(ready, weight, bias)
        return total, even, y if feed is None else feed.bent(y)
    return run


def _parts(product: nn.Module) -> tuple[Tensor, Tensor | None, float]:
    """Matrix, bias and the scale before them."""
    part: Any = product
    if isinstance(product, nn.Linear):
        return product.weight.detach(), None if product.bias is None else product.bias.detach(), 1.0
    if isinstance(product, nn.Identity):
        raise TypeError("two norms in a row are for plain steps")
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


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _plan(outputs: int, inputs: int, rows: int) -> tuple[int, int, int]:
    """How many outputs a program works out, how many inputs it reads at a time, and with how many warps: by trial on an H200."""
    wide = min(_power(inputs), 2048 if rows == 1 else 512)
    return (4 if outputs >= 8192 else 2) if rows == 1 else 4, wide, 4


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, kind: int = 0, gain: Tensor | None = None, shift: Tensor | None = None,
             eps: float = 0.0, even: Tensor | None = None, plus: Tensor | None = None, bend: int = 0,
             gated: bool = False, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """bend(norm(x) Wᵀ + b), or plus + x Wᵀ + b, for a few rows: (R, inputs) → (R, outputs)"""
    rows, inputs = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    out = torch.empty(rows, outputs, dtype=x.dtype if dtype is None else dtype, device=x.device)
    block, wide, warps = _plan(outputs, inputs, rows)
    nothing = x
    pick = lambda tensor: nothing if tensor is None else tensor
    _product_kernel[(cdiv(outputs, block),)](
        x, weight, pick(bias), pick(gain), pick(shift), pick(even), pick(plus), out, outputs, inputs, eps, scale, rows,
        _power(rows), kind, bias is not None, shift is not None, even is not None, plus is not None, bend, gated, block, wide,
        num_warps=warps)
    return out


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
def _product_kernel(x, weight, bias, gain, shift, even, plus, out, outputs, inputs, eps, scale, rows,  # type: ignore
                    padded: tl.constexpr, kind: tl.constexpr, biased: tl.constexpr, shifted: tl.constexpr, keep: tl.constexpr,
                    add: tl.constexpr, bend: tl.constexpr, gated: tl.constexpr, block: tl.constexpr, wide: tl.constexpr):
    # a norm is worked out on the way: W((x - m)·s·g + b) = s·(W(g·x) - m·Wg) + Wb, its mean m and spread 1/s known at the end
    n = tl.program_id(0) * block + tl.arange(0, block)
    r = tl.arange(0, padded)
    lane = tl.arange(0, wide)
    gains = tl.zeros([block, wide], tl.float32)
    shifts = tl.zeros([block, wide], tl.float32)
    more_gains = tl.zeros([block, wide], tl.float32)
    more_shifts = tl.zeros([block, wide], tl.float32)
    sums = tl.zeros([padded, block, wide], tl.float32)
    more = tl.zeros([padded, block, wide], tl.float32)
    total = tl.zeros([padded, wide], tl.float32)
    squares = tl.zeros([padded, wide], tl.float32)
    for begin in range(0, inputs, wide):
        k = begin + lane
        inside = (n[:, None] < outputs) & (k[None, :] < inputs)
        w = tl.load(weight + n[:, None].to(tl.int64) * inputs + k[None, :], mask=inside, other=0.0).to(tl.float32)
        a = tl.load(x + r[:, None] * inputs + k[None, :], mask=(r[:, None] < rows) & (k[None, :] < inputs), other=0.0).to(tl.float32)
        if kind == 2:
            total += a
        if kind > 0:
            squares += a * a
            g = tl.load(gain + k, mask=k < inputs, other=0.0).to(tl.float32)[None, :]
            a = a * g
        if kind == 2:
            gains += w * g
        if shifted:
            b = tl.load(shift + k, mask=k < inputs, other=0.0).to(tl.float32)[None, :]
            shifts += w * b
        sums += w[None, :, :] * a[:, None, :]
        if gated:
            u = tl.load(weight + (n[:, None] + outputs).to(tl.int64) * inputs + k[None, :], mask=inside, other=0.0).to(tl.float32)
            more += u[None, :, :] * a[:, None, :]
            if kind == 2:
                more_gains += u * g
            if shifted:
                more_shifts += u * b
    y = tl.sum(sums, 2)
    z = tl.sum(more, 2)
    seen = n < outputs
    mean = tl.zeros([padded], tl.float32)
    spread = mean + 1.0
    if kind == 2:
        mean = tl.sum(total, 1) / inputs
    if kind > 0:
        spread = tl.rsqrt(tl.maximum(tl.sum(squares, 1) / inputs - mean * mean, 0.0) + eps)
    if kind == 2:
        y -= mean[:, None] * tl.sum(gains, 1)[None, :]
        z -= mean[:, None] * tl.sum(more_gains, 1)[None, :]
    y = y * spread[:, None]
    z = z * spread[:, None]
    if shifted:
        y += tl.sum(shifts, 1)[None, :]
        z += tl.sum(more_shifts, 1)[None, :]
    y *= scale
    z *= scale
    if biased:
        y += tl.load(bias + n, mask=seen, other=0.0).to(tl.float32)[None, :]
        if gated:
            z += tl.load(bias + outputs + n, mask=seen, other=0.0).to(tl.float32)[None, :]
    y = _bent(y, bend)
    if gated:
        y *= z
    here = (r[:, None] < rows) & seen[None, :]
    at = r[:, None] * outputs + n[None, :]
    if add:
        y += tl.load(plus + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=here)
    if keep:  # the stream behind the norm, a part by each program
        here = (r[:, None] < rows) & (n[None, :] < inputs)
        at = r[:, None] * inputs + n[None, :]
        a = (tl.load(x + at, mask=here, other=0.0).to(tl.float32) - mean[:, None]) * spread[:, None]
        a *= tl.load(gain + n, mask=n < inputs, other=0.0).to(tl.float32)[None, :]
        if shifted:
            a += tl.load(shift + n, mask=n < inputs, other=0.0).to(tl.float32)[None, :]
        tl.store(even + at, a.to(even.dtype.element_ty), mask=here)


def _joined(stream: Stream, kind: int, gain: Tensor | None, shift: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The stream with what was to be added, and the same behind a norm."""
    x, more = stream
    if kind == 0:
        x = x if more is None else x + more
        return x, x
    assert gain is not None
    total = x if more is None else torch.empty_like(x)
    even, width = torch.empty_like(x), x.shape[1]
    _joined_kernel[(len(x),)](x, x if more is None else more, gain, gain if shift is None else shift, total, even, width, eps,
                              more is not None, kind, shift is not None, _power(width), num_warps=4)
    return total, even


@jit  # type: ignore[untyped-decorator]
def _joined_kernel(x, more, gain, shift, total, even, width, eps, add: tl.constexpr, kind: tl.constexpr,  # type: ignore
                   shifted: tl.constexpr, block: tl.constexpr):
    lane = tl.arange(0, block)
    inside = lane < width
    at = tl.program_id(0) * width + lane
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if add:
        a += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        a = a.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + at, a.to(total.dtype.element_ty), mask=inside)
    if kind == 2:
        a = tl.where(inside, a - tl.sum(a, 0) / width, 0.0)
    y = a * tl.rsqrt(tl.sum(a * a, 0) / width + eps) * tl.load(gain + lane, mask=inside, other=0.0).to(tl.float32)
    if shifted:
        y += tl.load(shift + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(even + at, y.to(even.dtype.element_ty), mask=inside)


def _looked(qkv: Tensor, keys: Tensor, values: Tensor, here: Here, shape: Heads, window: int) -> Tensor:
    """Self-attention of one token for each row over its own text; its key and value are written on the way."""
    rows, capacity, width = len(qkv), len(keys), shape.width
    out = torch.empty(rows, shape.heads * width, dtype=qkv.dtype, device=qkv.device)
    farthest = min(capacity, window) if window else capacity
    splits = max(1, min(32, cdiv(farthest, SPLIT)))
    # where several programs look at one text: what each found, its highest score and its sum
    parts = out if splits == 1 else torch.empty(rows, shape.heads, splits, width + 2, dtype=torch.float32, device=qkv.device)
    turn = None if here.turn is None else here.turn
    nothing = here.now
    _look_kernel[(rows, shape.heads, splits)](
        qkv, keys, values, out, parts, here.now, nothing if here.first is None else here.first,
        nothing if here.parents is None else here.parents, qkv if here.near is None else here.near,
        qkv if turn is None else turn.cosines, qkv if turn is None else turn.sines,
        0 if here.near is None else here.near.shape[1], 0 if turn is None or len(turn.cosines) == 1 else turn.cosines.stride(0),
        rows, shape.factor, shape.heads, shape.kv_heads, width, _power(width), here.first is not None, here.parents is not None,
        here.near is not None, turn is not None, window, splits, 32, num_warps=2)
    if splits > 1:
        _merged_kernel[(rows, shape.heads)](parts, out, splits, _power(splits), shape.heads, width, _power(width), num_warps=2)
    return out


@jit  # type: ignore[untyped-decorator]
def _look_kernel(qkv, keys, values, out, parts, now, first, parents, near, cosines, sines, near_stride, turn_stride, rows,  # type: ignore
                 scale, heads: tl.constexpr, few: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, begins: tl.constexpr,
                 moved: tl.constexpr, nearness: tl.constexpr, turned: tl.constexpr, window: tl.constexpr, splits: tl.constexpr,
                 block: tl.constexpr):
    r = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    own = h // (heads // few)
    stop = tl.load(now)
    d = tl.arange(0, padded)
    inside = d < width
    at = qkv + r * (heads + 2 * few) * width + d
    q = tl.load(at + h * width, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(at + (heads + own) * width, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(at + (heads + few + own) * width, mask=inside, other=0.0).to(tl.float32)
    if turned:  # each pair (i, i + width / 2) by its angle
        away = tl.where(d < width // 2, width // 2, -(width // 2))
        sign = tl.where(d < width // 2, -1.0, 1.0)
        cosine = tl.load(cosines + r * turn_stride + d, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sines + r * turn_stride + d, mask=inside, other=0.0).to(tl.float32) * sign
        q = q * cosine + tl.load(at + h * width + away, mask=inside, other=0.0).to(tl.float32) * sine
        k = k * cosine + tl.load(at + (heads + own) * width + away, mask=inside, other=0.0).to(tl.float32) * sine
    kind = keys.dtype.element_ty
    k = k.to(kind).to(tl.float32)
    row = few * width  # from one row of the buffers to the next
    if (split == 0) & (h % (heads // few) == 0):
        place = (stop * rows + r) * row + own * width + d
        tl.store(keys + place, k.to(kind), mask=inside)
        tl.store(values + place, v.to(kind), mask=inside)
    q *= scale
    begin = stop * 0
    if begins:
        begin = tl.load(first + r)
    if window > 0:
        begin = tl.maximum(begin, stop - window + 1)
    size = stop - begin
    if splits > 1:
        size = (size + splits - 1) // splits
        begin += split * size
    end = tl.minimum(stop, begin + size)
    top = tl.sum(q * k, 0)
    if nearness:
        top += tl.load(near + h * near_stride).to(tl.float32)
    mass = tl.full([], 1.0, tl.float32)
    found = v
    if splits > 1:
        if split > 0:  # the token itself is the first one's
            top = float("-inf")
            mass = 0.0
            found = v * 0.0
    lane = tl.arange(0, block)
    for column in range(begin, end, block):
        c = column + lane
        there = c < end
        source = r + c * 0
        if moved:
            source = tl.load(parents + c * rows + r, mask=there, other=0)
        place = ((c * rows + source) * row + own * width)[:, None] + d[None, :]
        seen = there[:, None] & inside[None, :]
        kk = tl.load(keys + place, mask=seen, other=0.0).to(tl.float32)
        vv = tl.load(values + place, mask=seen, other=0.0).to(tl.float32)
        score = tl.sum(kk * q[None, :], 1)
        if nearness:
            score += tl.load(near + h * near_stride + stop - c, mask=there, other=0.0).to(tl.float32)
        score = tl.where(there, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        weight = tl.exp(score - higher)
        less = tl.exp(top - higher)
        mass = mass * less + tl.sum(weight, 0)
        found = found * less + tl.sum(weight[:, None] * vv, 0)
        top = higher
    if splits == 1:
        tl.store(out + (r * heads + h) * width + d, (found / mass).to(out.dtype.element_ty), mask=inside)
    else:
        base = parts + ((r * heads + h) * splits + split) * (width + 2)
        tl.store(base + d, found, mask=inside)
        tl.store(base + width, top)
        tl.store(base + width + 1, mass)


@jit  # type: ignore[untyped-decorator]
def _merged_kernel(parts, out, splits, many: tl.constexpr, heads: tl.constexpr, width: tl.constexpr, padded: tl.constexpr):  # type: ignore
    at = tl.program_id(0) * heads + tl.program_id(1)
    s = tl.arange(0, many)
    d = tl.arange(0, padded)
    base = parts + (at * splits + s) * (width + 2)
    top = tl.load(base + width, mask=s < splits, other=float("-inf"))
    share = tl.exp(top - tl.max(top, 0))
    mass = tl.sum(tl.load(base + width + 1, mask=s < splits, other=0.0) * share, 0)
    found = tl.load(base[:, None] + d[None, :], mask=(s < splits)[:, None] & (d < width)[None, :], other=0.0)
    found = tl.sum(found * share[:, None], 0) / mass
    tl.store(out + at * width + d, found.to(out.dtype.element_ty), mask=d < width)


@jit  # type: ignore[untyped-decorator]
def _across_kernel(q, keys, values, bias, out, share, length, by_row, by_head, by_token, scale,  # type: ignore
                   heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, biased: tl.constexpr,
                   block: tl.constexpr):
    r = tl.program_id(0)
    h = tl.program_id(1)
    source = r // share
    d = tl.arange(0, padded)
    inside = d < width
    asked = tl.load(q + (r * heads + h) * width + d, mask=inside, other=0.0).to(tl.float32) * scale
    base = source.to(tl.int64) * by_row + (h // group) * by_head
    lane = tl.arange(0, block)
    top = tl.full([], -1e30, tl.float32)  # not -∞: a block may hold no text
    mass = tl.full([], 0.0, tl.float32)
    found = tl.zeros([padded], tl.float32)
    for begin in range(0, length, block):
        c = begin + lane
        there = c < length
        place = base + c[:, None] * by_token + d[None, :]
        seen = there[:, None] & inside[None, :]
        kk = tl.load(keys + place, mask=seen, other=0.0).to(tl.float32)
        vv = tl.load(values + place, mask=seen, other=0.0).to(tl.float32)
        score = tl.sum(kk * asked[None, :], 1)
        if biased:
            score += tl.load(bias + source * length + c, mask=there, other=0.0).to(tl.float32)
        score = tl.where(there, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        weight = tl.exp(score - higher)
        less = tl.exp(top - higher)
        mass = mass * less + tl.sum(weight, 0)
        found = found * less + tl.sum(weight[:, None] * vv, 0)
        top = higher
    tl.store(out + (r * heads + h) * width + d, (found / mass).to(out.dtype.element_ty), mask=inside)
