"""The two attentions of nn/swift.py over pages: each row looks up, column by column, in which slot its keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.nn.attention import Heads
from keepleft.nn.feedforward import Feed
from keepleft.nn.gpu import early, gdc_launch_dependents, gdc_wait, jit, power, tl
from keepleft.nn.lone import Across, Enter, Leave, Look, Turn
from keepleft.nn.swift import Swift
from keepleft.nn.swift_look import itself, keep, merged, put, range_of, shared, taken_in, tile, turned_by


@dataclass
class Seated:
    """Where each row stands, all of it on the device."""

    table: Tensor               # (seats, columns) the slot of each token of a text
    seat: Tensor                # (R,) whose text a row goes on with
    length: Tensor              # (R,) tokens before this one
    slot: Tensor                # (R,) where its own key and value go
    turn: Turn | None = None
    near: Tensor | None = None  # (H, capacity) what is added to a score by distance


class SwiftPaged:
    """Tools for steps over pages on a GPU: buffers are (pages, Hk, size, D)."""

    whole = True

    def __init__(self) -> None:
        self.swift = Swift()

    def enter(self, norm: nn.Module | None, product: nn.Module, feed: Feed | None = None) -> Enter:
        return self.swift.enter(norm, product, feed)

    def leave(self, product: nn.Module) -> Leave:
        return self.swift.leave(product)

    def look(self, shape: Heads, window: int | None) -> Look:
        def run(qkv: Tensor, keys: Tensor, values: Tensor, here: Any) -> Tensor:
            return _looked(qkv, keys, values, here, shape, window or 0)
        return run

    def across(self, shape: Heads) -> Across:
        def run(q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
            out = torch.empty_like(q)
            block, warps = tile(len(q) * shape.heads, shape.width)
            _across_kernel[(len(q), shape.heads)](
                q, keys, values, out, bias.table, bias.seat, bias.length, bias.table.stride(0), shape.factor, shape.heads,
                shape.kv_heads, shape.width, power(shape.width), keys.shape[2], q.is_cuda, block, num_warps=warps, **early(q))
            return out
        return run


def _looked(qkv: Tensor, keys: Tensor, values: Tensor, here: Seated, shape: Heads, window: int) -> Tensor:
    """Self-attention of one token for each row over its own text; its key and value are written on the way."""
    rows, width, columns = len(qkv), shape.width, here.table.shape[1]
    out = torch.empty(rows, shape.heads * width, dtype=qkv.dtype, device=qkv.device)
    splits, parts = shared(out, columns, window, shape)
    turn = here.turn
    block, warps = tile(rows * shape.heads, width)
    _look_kernel[(rows, shape.heads, splits)](
        qkv, keys, values, out, parts, here.table, here.seat, here.length, here.slot, qkv if here.near is None else here.near,
        qkv if turn is None else turn.cosines, qkv if turn is None else turn.sines, here.table.stride(0),
        0 if here.near is None else here.near.shape[1], 0 if turn is None else turn.cosines.stride(0), shape.factor,
        shape.heads, shape.kv_heads, width, power(width), keys.shape[2], here.near is not None, turn is not None, window,
        splits, qkv.is_cuda, block, num_warps=warps, **early(qkv))
    if splits > 1:
        merged(parts, out, splits, shape)
    return out


@jit  # type: ignore[untyped-decorator]
def _at(slot, own, few: tl.constexpr, width: tl.constexpr, size: tl.constexpr):  # type: ignore
    """Where a slot's numbers for one head begin."""
    wide = slot.to(tl.int64)
    return (wide // size) * (few * size * width) + own * (size * width) + (wide % size) * width


@jit  # type: ignore[untyped-decorator]
def _look_kernel(qkv, keys, values, out, parts, table, seat, length, slot, near, cosines, sines, columns, near_stride,  # type: ignore
                 turn_stride, scale, heads: tl.constexpr, few: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
                 size: tl.constexpr, nearness: tl.constexpr, turned: tl.constexpr, window: tl.constexpr, splits: tl.constexpr,
                 soon: tl.constexpr, block: tl.constexpr):
    if soon:
        gdc_launch_dependents()
    r = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    own = h // (heads // few)
    d = tl.arange(0, padded)
    inside = d < width
    # what earlier steps wrote is there before this step's own query is
    stop = tl.load(length + r)
    mine = table + tl.load(seat + r) * columns
    begin, end = range_of(stop * 0, stop, split, window, splits)
    lane = tl.arange(0, block)
    c = begin + lane
    there = c < end
    place = _at(tl.load(mine + c, mask=there, other=0), own, few, width, size)[:, None] + d[None, :]
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
    keep(keys, values, _at(tl.load(slot + r), own, few, width, size) + d, k, v, inside,
         (split == 0) & (h % (heads // few) == 0))
    top, mass, found = itself(q, k, v, near + h * near_stride, split, nearness, splits)
    for column in range(begin, end, block):
        c = column + lane
        there = c < end
        later = c + block
        place = _at(tl.load(mine + later, mask=later < end, other=0), own, few, width, size)[:, None] + d[None, :]
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
def _across_kernel(q, keys, values, out, table, seat, heard, columns, scale, heads: tl.constexpr, few: tl.constexpr,  # type: ignore
                   width: tl.constexpr, padded: tl.constexpr, size: tl.constexpr, soon: tl.constexpr, block: tl.constexpr):
    if soon:
        gdc_launch_dependents()
    r = tl.program_id(0)
    h = tl.program_id(1)
    own = h // (heads // few)
    d = tl.arange(0, padded)
    inside = d < width
    whose = tl.load(seat + r)
    length = tl.load(heard + whose)
    mine = table + whose * columns
    lane = tl.arange(0, block)
    top = tl.full([], -1e30, tl.float32)  # not -∞: a row may look at nothing
    mass = tl.full([], 0.0, tl.float32)
    found = tl.zeros([padded], tl.float32)
    place = _at(tl.load(mine + lane, mask=lane < length, other=0), own, few, width, size)[:, None] + d[None, :]
    seen = (lane < length)[:, None] & inside[None, :]
    kk = tl.load(keys + place, mask=seen, other=0.0)  # the source is there before the query is
    vv = tl.load(values + place, mask=seen, other=0.0)
    if soon:
        gdc_wait()
    asked = tl.load(q + (r * heads + h) * width + d, mask=inside, other=0.0).to(tl.float32) * scale
    for begin in range(0, length, block):
        c = begin + lane
        later = c + block
        place = _at(tl.load(mine + later, mask=later < length, other=0), own, few, width, size)[:, None] + d[None, :]
        seen = (later < length)[:, None] & inside[None, :]
        kk_next = tl.load(keys + place, mask=seen, other=0.0)
        vv_next = tl.load(values + place, mask=seen, other=0.0)
        score = tl.where(c < length, tl.sum(kk.to(tl.float32) * asked[None, :], 1), float("-inf"))
        top, mass, found = taken_in(top, mass, found, score, vv)
        kk = kk_next
        vv = vv_next
    tl.store(out + (r * heads + h) * width + d, (found / tl.maximum(mass, 1e-30)).to(out.dtype.element_ty), mask=inside)
