"""The step of nn/lone.py on a GPU: a handful of kernels for a layer, each doing all that can be done before others must wait.

One token for each row moves every weight through the chip once and computes next to nothing, so time goes into reading memory
and into starting kernels. Kernels begin before the one before them is done, and fetch their weights while they wait for it. For
a few rows a product and the bend or the residual behind it are one kernel; for more rows the products are cuBLAS's, and the
residual is added by the norm that follows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.nn.attention import Heads
from keepleft.nn.best import power
from keepleft.nn.feedforward import ACTIVATIONS, Feed
from keepleft.nn.lone import Across, Enter, Here, Leave, Look

try:
    import triton.language as tl  # type: ignore[import-not-found]
    from triton import cdiv, jit  # type: ignore[import-not-found]
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]
except ImportError:  # it comes with PyTorch wherever there is a GPU; nothing here is called without it
    jit: Any = lambda function: function  # type: ignore[no-redef]

FEW = 128     # rows up to which a product and what is around it are one kernel
SPLIT = 512   # tokens of a text that one program looks at
BENDS = {bend: n + 1 for n, bend in enumerate(ACTIVATIONS.values())}  # relu, gelu, gelu_tanh, silu


class Stream(NamedTuple):
    """The residual stream of many rows, with what is still to be added to it."""

    x: Tensor
    more: Tensor | None = None  # (R, dim), or several of them


class Swift:
    whole = True

    def enter(self, norm: nn.Module | None, product: nn.Module, feed: Feed | None = None) -> Enter:
        return _entering(norm, product, feed)

    def leave(self, product: nn.Module) -> Leave:
        weight, bias, _ = _parts(product)

        def run(x: Tensor, y: Tensor) -> Any:
            if len(y) <= FEW:
                return _added(x, y, weight, bias)
            return Stream(x, F.linear(y, weight, bias))
        return run

    def look(self, shape: Heads, window: int | None) -> Look:
        def run(qkv: Tensor, keys: Tensor, values: Tensor, here: Here) -> Tensor:
            return _looked(qkv, keys, values, here, shape, window or 0)
        return run

    def across(self, shape: Heads) -> Across:
        def run(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
            out = torch.empty_like(q)
            assert keys.stride() == values.stride()
            assert keys.stride(3) == 1
            block, warps = tile(len(q) * shape.heads, shape.width)
            _across_kernel[(len(q), shape.heads)](
                q, keys, values, q if bias is None else bias, out, len(q) // len(keys), keys.shape[2], *keys.stride()[:3],
                shape.factor, shape.heads, shape.heads // shape.kv_heads, shape.width, power(shape.width), bias is not None,
                q.is_cuda, block, num_warps=warps, **early(q))
            return out
        return run


def _entering(norm: nn.Module | None, product: nn.Module, feed: Feed | None) -> Enter:
    kind, gain, shift, eps = _norm_parts(norm)
    if isinstance(product, nn.Identity):  # a norm behind a norm
        def bare(x: Any) -> tuple[Any, Any, Tensor]:
            total, even = _joined(x if isinstance(x, Stream) else Stream(x), kind, gain, shift, eps)
            return total, even, even
        return bare
    weight, bias, scale = _parts(product)
    bend, gated = (0, False) if feed is None else (BENDS[feed.bend], feed.gated)
    dtype = None if isinstance(product, nn.Linear) else torch.float32
    # what cuBLAS does on the way out
    fused = feed is not None and not gated and bias is not None and feed.bend in (ACTIVATIONS["relu"], ACTIVATIONS["gelu_tanh"])

    def run(x: Any) -> tuple[Any, Any, Tensor]:
        total, even = _joined(x if isinstance(x, Stream) else Stream(x), kind, gain, shift, eps)
        if len(even) <= FEW:
            return total, even, _product(even, weight, bias, bend=bend, gated=gated, scale=scale, dtype=dtype)
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


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, plus: Tensor | None = None, bend: int = 0, gated: bool = False,
             scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
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


def _added(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The stream x with y Wᵀ + b, to which several programs may contribute: what they found is added by the next norm."""
    rows, inputs = y.shape
    if rows == 1:
        return _product(y, weight, bias, plus=x)
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


def early(x: Tensor) -> dict[str, bool]:
    """A kernel may begin before the one before it is done; it waits where it needs what that one writes."""
    return {"launch_pdl": True} if x.is_cuda else {}


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


def _joined(stream: Stream, kind: int, gain: Tensor | None, shift: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
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


def tile(programs: int, width: int) -> tuple[int, int]:
    """How many tokens a program looks at at once, and with how many warps: large pieces only where there are few programs."""
    return (32, 1) if programs > 264 else (max(16, 8192 // power(width)), 4)


def _looked(qkv: Tensor, keys: Tensor, values: Tensor, here: Here, shape: Heads, window: int) -> Tensor:
    """Self-attention of one token for each row over its own text; its key and value are written on the way."""
    rows, capacity, width = len(qkv), len(keys), shape.width
    out = torch.empty(rows, shape.heads * width, dtype=qkv.dtype, device=qkv.device)
    farthest = min(capacity, window) if window else capacity
    splits = max(1, min(32, cdiv(farthest, SPLIT)))
    # where several programs look at one text: what each found, its highest score and its sum
    parts = out if splits == 1 else torch.empty(rows, shape.heads, splits, width + 2, dtype=torch.float32, device=qkv.device)
    turn, nothing = here.turn, here.now
    block, warps = tile(rows * shape.heads, width)
    _look_kernel[(rows, shape.heads, splits)](
        qkv, keys, values, out, parts, here.now, nothing if here.first is None else here.first,
        nothing if here.parents is None else here.parents, qkv if here.near is None else here.near,
        qkv if turn is None else turn.cosines, qkv if turn is None else turn.sines,
        0 if here.near is None else here.near.shape[1], 0 if turn is None or len(turn.cosines) == 1 else turn.cosines.stride(0),
        rows, shape.factor, shape.heads, shape.kv_heads, width, power(width), here.first is not None, here.parents is not None,
        here.near is not None, turn is not None, window, splits, qkv.is_cuda, block, num_warps=warps, **early(qkv))
    if splits > 1:
        merged(parts, out, splits, shape)
    return out


def merged(parts: Tensor, out: Tensor, splits: int, shape: Heads) -> None:
    """What several programs found of one text, put together."""
    _merged_kernel[(len(out), shape.heads)](parts, out, splits, out.is_cuda, power(splits), shape.heads, shape.width,
                                            power(shape.width), num_warps=2, **early(out))


@jit  # type: ignore[untyped-decorator]
def _look_kernel(qkv, keys, values, out, parts, now, first, parents, near, cosines, sines, near_stride, turn_stride, rows,  # type: ignore
                 scale, heads: tl.constexpr, few: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, begins: tl.constexpr,
                 moved: tl.constexpr, nearness: tl.constexpr, turned: tl.constexpr, window: tl.constexpr, splits: tl.constexpr,
                 soon: tl.constexpr, block: tl.constexpr):
    if soon:
        gdc_launch_dependents()
    r = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    own = h // (heads // few)
    row = few * width  # from one row of the buffers to the next
    d = tl.arange(0, padded)
    inside = d < width
    # what earlier steps wrote is there before this step's own query is
    stop = tl.load(now)
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
    lane = tl.arange(0, block)
    c = begin + lane
    there = c < end
    source = r + c * 0
    if moved:
        source = tl.load(parents + c * rows + r, mask=there, other=0)
    place = ((c * rows + source) * row + own * width)[:, None] + d[None, :]
    seen = there[:, None] & inside[None, :]
    kk = tl.load(keys + place, mask=seen, other=0.0)
    vv = tl.load(values + place, mask=seen, other=0.0)
    if soon:
        gdc_wait()
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
    if (split == 0) & (h % (heads // few) == 0):
        mine = (stop * rows + r) * row + own * width + d
        tl.store(keys + mine, k.to(kind), mask=inside)
        tl.store(values + mine, v.to(kind), mask=inside)
    q *= scale
    top = tl.sum(q * k, 0)
    if nearness:
        top += tl.load(near + h * near_stride).to(tl.float32)
    mass = tl.full([], 1.0, tl.float32)
    found = v
    if splits > 1:  # noqa: SIM102  (one is known when the kernel is compiled, the other is not)
        if split > 0:  # the token itself is the first one's
            top = float("-inf")
            mass = 0.0
            found = v * 0.0
    for column in range(begin, end, block):
        c = column + lane
        there = c < end
        later = c + block
        source = r + c * 0
        if moved:
            source = tl.load(parents + later * rows + r, mask=later < end, other=0)
        place = ((later * rows + source) * row + own * width)[:, None] + d[None, :]
        seen = (later < end)[:, None] & inside[None, :]
        kk_next = tl.load(keys + place, mask=seen, other=0.0)
        vv_next = tl.load(values + place, mask=seen, other=0.0)
        score = tl.sum(kk.to(tl.float32) * q[None, :], 1)
        if nearness:
            score += tl.load(near + h * near_stride + stop - c, mask=there, other=0.0).to(tl.float32)
        score = tl.where(there, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        weight = tl.exp(score - higher)
        less = tl.exp(top - higher)
        mass = mass * less + tl.sum(weight, 0)
        found = found * less + tl.sum(weight[:, None] * vv.to(tl.float32), 0)
        top = higher
        kk = kk_next
        vv = vv_next
    if splits == 1:
        tl.store(out + (r * heads + h) * width + d, (found / mass).to(out.dtype.element_ty), mask=inside)
    else:
        base = parts + ((r * heads + h) * splits + split) * (width + 2)
        tl.store(base + d, found, mask=inside)
        tl.store(base + width, top)
        tl.store(base + width + 1, mass)


@jit  # type: ignore[untyped-decorator]
def _merged_kernel(parts, out, splits, soon: tl.constexpr, many: tl.constexpr, heads: tl.constexpr, width: tl.constexpr,  # type: ignore
                   padded: tl.constexpr):
    if soon:
        gdc_launch_dependents()
        gdc_wait()
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
                   soon: tl.constexpr, block: tl.constexpr):
    if soon:
        gdc_launch_dependents()
    r = tl.program_id(0)
    h = tl.program_id(1)
    source = r // share
    d = tl.arange(0, padded)
    inside = d < width
    base = source.to(tl.int64) * by_row + (h // group) * by_head
    lane = tl.arange(0, block)
    top = tl.full([], -1e30, tl.float32)  # not -∞: a block may hold no text
    mass = tl.full([], 0.0, tl.float32)
    found = tl.zeros([padded], tl.float32)
    place = base + lane[:, None] * by_token + d[None, :]
    seen = (lane < length)[:, None] & inside[None, :]
    kk = tl.load(keys + place, mask=seen, other=0.0)  # the source is there before the query is
    vv = tl.load(values + place, mask=seen, other=0.0)
    if soon:
        gdc_wait()
    asked = tl.load(q + (r * heads + h) * width + d, mask=inside, other=0.0).to(tl.float32) * scale
    for begin in range(0, length, block):
        c = begin + lane
        there = c < length
        place += block * by_token
        seen = (c + block < length)[:, None] & inside[None, :]
        kk_next = tl.load(keys + place, mask=seen, other=0.0)
        vv_next = tl.load(values + place, mask=seen, other=0.0)
        score = tl.sum(kk.to(tl.float32) * asked[None, :], 1)
        if biased:
            score += tl.load(bias + source * length + c, mask=there, other=0.0).to(tl.float32)
        score = tl.where(there, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        weight = tl.exp(score - higher)
        less = tl.exp(top - higher)
        mass = mass * less + tl.sum(weight, 0)
        found = found * less + tl.sum(weight[:, None] * vv.to(tl.float32), 0)
        top = higher
        kk = kk_next
        vv = vv_next
    tl.store(out + (r * heads + h) * width + d, (found / mass).to(out.dtype.element_ty), mask=inside)
