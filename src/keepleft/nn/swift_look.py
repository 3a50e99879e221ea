"""Attention of nn/swift.py: one token for each row looks at its own text, or at the source. nn/swift_paged.py shares the parts.

A kernel finds out which keys and values it needs and asks for them before its query is there; then it reads block by block, the
next one on its way while the sums of softmax run over this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.nn.attention import Heads
from keepleft.nn.gpu import cdiv, early, gdc_launch_dependents, gdc_wait, jit, power, tl
from keepleft.nn.lone import Here

SPLIT = 512  # tokens of a text that one program looks at


def tile(programs: int, width: int) -> tuple[int, int]:
    """How many tokens a program looks at at once, and with how many warps: large pieces only where there are few programs."""
    return (32, 1) if programs > 264 else (max(16, 8192 // power(width)), 4)


def looked(qkv: Tensor, keys: Tensor, values: Tensor, here: Here, shape: Heads, window: int) -> Tensor:
    """Self-attention of one token for each row over its own text; its key and value are written on the way."""
    rows, capacity, width = len(qkv), len(keys), shape.width
    out = torch.empty(rows, shape.heads * width, dtype=qkv.dtype, device=qkv.device)
    splits, parts = shared(out, capacity, window, shape)
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


def shared(out: Tensor, longest: int, window: int, shape: Heads) -> tuple[int, Tensor]:
    """How many programs look at one text, and room for what each found, its highest score and its sum."""
    splits = max(1, min(32, cdiv(min(longest, window) if window else longest, SPLIT)))
    if splits == 1:
        return 1, out
    return splits, torch.empty(len(out), shape.heads, splits, shape.width + 2, dtype=torch.float32, device=out.device)


def merged(parts: Tensor, out: Tensor, splits: int, shape: Heads) -> None:
    """What several programs found of one text, put together."""
    _merged_kernel[(len(out), shape.heads)](parts, out, splits, out.is_cuda, power(splits), shape.heads, shape.width,
                                            power(shape.width), num_warps=2, **early(out))


def looked_across(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, shape: Heads) -> Tensor:
    """Cross-attention of one token for each row over its source."""
    out = torch.empty_like(q)
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1
    block, warps = tile(len(q) * shape.heads, shape.width)
    _across_kernel[(len(q), shape.heads)](
        q, keys, values, q if bias is None else bias, out, len(q) // len(keys), keys.shape[2], *keys.stride()[:3],
        shape.factor, shape.heads, shape.heads // shape.kv_heads, shape.width, power(shape.width), bias is not None,
        q.is_cuda, block, num_warps=warps, **early(q))
    return out


@jit  # type: ignore[untyped-decorator]
def range_of(begin, stop, split, window: tl.constexpr, splits: tl.constexpr):  # type: ignore
    """Which of the tokens from `begin` to `stop` a program looks at."""
    if window > 0:
        begin = tl.maximum(begin, stop - window + 1)
    size = stop - begin
    if splits > 1:
        size = (size + splits - 1) // splits
        begin += split * size
    return begin, tl.minimum(stop, begin + size)


@jit  # type: ignore[untyped-decorator]
def turned_by(at, r, cosines, sines, turn_stride, d, inside, width: tl.constexpr, turned: tl.constexpr):  # type: ignore
    """The numbers of one head, each pair (i, i + width / 2) turned by its angle."""
    x = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
    if turned:
        away = tl.where(d < width // 2, width // 2, -(width // 2))
        sign = tl.where(d < width // 2, -1.0, 1.0)
        cosine = tl.load(cosines + r * turn_stride + d, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sines + r * turn_stride + d, mask=inside, other=0.0).to(tl.float32) * sign
        x = x * cosine + tl.load(at + d + away, mask=inside, other=0.0).to(tl.float32) * sine
    return x


@jit  # type: ignore[untyped-decorator]
def keep(keys, values, place, k, v, inside, wanted):  # type: ignore
    """The token's own key and value, written for later steps by one of the programs that know them."""
    if wanted:
        tl.store(keys + place, k.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + place, v.to(values.dtype.element_ty), mask=inside)


@jit  # type: ignore[untyped-decorator]
def itself(q, k, v, near, split, nearness: tl.constexpr, splits: tl.constexpr):  # type: ignore
    """Where softmax begins: with the token itself, which is the first program's."""
    top = tl.sum(q * k, 0)
    if nearness:
        top += tl.load(near).to(tl.float32)
    mass = tl.full([], 1.0, tl.float32)
    found = v
    if splits > 1:  # noqa: SIM102  (one is known when the kernel is compiled, the other is not)
        if split > 0:
            top = float("-inf")
            mass = 0.0
            found = v * 0.0
    return top, mass, found


@jit  # type: ignore[untyped-decorator]
def taken_in(top, mass, found, score, vv):  # type: ignore
    """Softmax so far (highest score, sum, what was found), and a block more."""
    higher = tl.maximum(top, tl.max(score, 0))
    weight = tl.exp(score - higher)
    less = tl.exp(top - higher)
    return higher, mass * less + tl.sum(weight, 0), found * less + tl.sum(weight[:, None] * vv.to(tl.float32), 0)


@jit  # type: ignore[untyped-decorator]
def put(out, parts, at, split, top, mass, found, d, inside, width: tl.constexpr, splits: tl.constexpr):  # type: ignore
    """What was found, or a program's part of it."""
    if splits == 1:
        tl.store(out + at * width + d, (found / mass).to(out.dtype.element_ty), mask=inside)
    else:
        base = parts + (at * splits + split) * (width + 2)
        tl.store(base + d, found, mask=inside)
        tl.store(base + width, top)
        tl.store(base + width + 1, mass)


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
    begin, end = range_of(begin, stop, split, window, splits)
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
    at = qkv + r * (heads + 2 * few) * width
    q = turned_by(at + h * width, r, cosines, sines, turn_stride, d, inside, width, turned) * scale
    k = turned_by(at + (heads + own) * width, r, cosines, sines, turn_stride, d, inside, width, turned)
    k = k.to(keys.dtype.element_ty).to(tl.float32)
    v = tl.load(at + (heads + few + own) * width + d, mask=inside, other=0.0).to(tl.float32)
    keep(keys, values, (stop * rows + r) * row + own * width + d, k, v, inside, (split == 0) & (h % (heads // few) == 0))
    top, mass, found = itself(q, k, v, near + h * near_stride, split, nearness, splits)
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
        top, mass, found = taken_in(top, mass, found, tl.where(there, score, float("-inf")), vv)
        kk = kk_next
        vv = vv_next
    put(out, parts, r * heads + h, split, top, mass, found, d, inside, width, splits)


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
        top, mass, found = taken_in(top, mass, found, tl.where(there, score, float("-inf")), vv)
        kk = kk_next
        vv = vv_next
    tl.store(out + (r * heads + h) * width + d, (found / mass).to(out.dtype.element_ty), mask=inside)
