"""The likeliest of many: the highest scores of each row, where they are, and the logarithm of the sum over all.

A library sorts, or reads all scores several times; here the highest of each block are found first, in one reading.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keepleft.nn.gpu import cdiv, jit, power, tl

BLOCK = 64           # scores whose highest is looked for first, on a CPU
LONG, SHORT = 4096, 1024  # scores that one program reads on a GPU, for one candidate or for several
MOST = 64            # candidates up to which a GPU looks for them one by one


class Best(NamedTuple):
    scores: Tensor  # (R, count), the highest first
    tokens: Tensor  # (R, count)
    total: Tensor   # (R,) log Σ exp of all; where nobody asked for it, whatever was at hand


def best(scores: Tensor, count: int, *, total: bool = True) -> Best:
    """(R, V) → the `count` highest of each row; of equal ones the first. Scores that are no number are not looked for."""
    count = min(count, scores.shape[1])
    if scores.is_cuda and scores.dtype != torch.float64 and count <= MOST:
        return kernels(scores, count)
    scores = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    found = scores.topk(count) if scores.is_cuda or scores.shape[1] < 4 * BLOCK * count else in_blocks(scores, count)
    return Best(*found, scores.logsumexp(-1) if total else found[0])


def in_blocks(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A block that holds one of the highest has one of the highest maxima."""
    vocab = scores.shape[1]
    whole = vocab - vocab % BLOCK
    blocks = scores[:, :whole].unflatten(1, (-1, BLOCK))
    highest = blocks.amax(-1)
    where = highest.argmax(-1, keepdim=True) if count == 1 else highest.topk(count).indices
    some = blocks.gather(1, where[..., None].expand(-1, -1, BLOCK)).flatten(1)
    if whole < vocab:
        some = torch.cat([some, scores[:, whole:]], 1)
    values, place = some.max(-1, keepdim=True) if count == 1 else some.topk(count)
    inside = place.clamp(max=count * BLOCK - 1)
    tokens = where.gather(1, inside // BLOCK) * BLOCK + inside % BLOCK
    if whole < vocab:
        tokens = torch.where(place < count * BLOCK, tokens, place - count * BLOCK + whole)
    return values, tokens


def kernels(scores: Tensor, count: int) -> Best:
    """The same on a GPU: each program finds the highest of its part, another the highest of all parts."""
    rows, vocab = scores.shape
    size = LONG if count == 1 else SHORT
    parts = cdiv(vocab, size)
    make = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device=scores.device)
    out = Best(make(rows, count), make(rows, count, dtype=torch.long), make(rows))
    if parts == 1:
        _part_kernel[(rows, 1)](scores, *out, vocab, scores.stride(0), 1, count, power(vocab), True,
                                num_warps=1 if vocab <= 256 else 4)
        return out
    some, where, sums = make(rows, parts, count), make(rows, parts, count, dtype=torch.int32), make(rows, parts, 2)
    _part_kernel[(rows, parts)](scores, some, where, sums, vocab, scores.stride(0), parts, count, size, False,
                                num_warps=4 if count == 1 else 1)
    _whole_kernel[(rows,)](some, where, sums, *out, parts, count, power(parts * count), power(parts), num_warps=1)
    return out


@jit  # type: ignore[untyped-decorator]
def _part_kernel(scores, some, where, sums, vocab, stride, parts, count: tl.constexpr, size: tl.constexpr,  # type: ignore
                 alone: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    lane = tl.arange(0, size)
    at = part * size + lane
    x = tl.load(scores + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    finite = tl.maximum(top, -3.0e38)
    out = row * parts + part
    mass = tl.sum(tl.exp(x - finite), 0)
    if alone:
        tl.store(sums + out, finite + tl.log(mass))
    else:
        tl.store(sums + out * 2, finite)
        tl.store(sums + out * 2 + 1, mass)
    x = tl.where(at < vocab, x, float("nan"))  # what lies beyond is never chosen, not even where all is ruled out
    for n in range(count):
        top = tl.max(tl.where(x == x, x, float("-inf")), 0)
        place = tl.min(tl.where(x == top, lane, size), 0)
        tl.store(some + out * count + n, tl.where(place < size, top, float("nan")))
        tl.store(where + out * count + n, (part * size + tl.minimum(place, size - 1)).to(where.dtype.element_ty))
        x = tl.where(lane == place, float("nan"), x)


@jit  # type: ignore[untyped-decorator]
def _whole_kernel(some, where, sums, values, tokens, total, parts, count: tl.constexpr, size: tl.constexpr,  # type: ignore
                  few: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, few)
    top = tl.load(sums + (row * parts + lane) * 2, mask=lane < parts, other=float("-inf"))
    mass = tl.load(sums + (row * parts + lane) * 2 + 1, mask=lane < parts, other=0.0)
    highest = tl.max(top, 0)
    tl.store(total + row, highest + tl.log(tl.sum(mass * tl.exp(top - highest), 0)))
    at = tl.arange(0, size)
    there = at < parts * count
    x = tl.load(some + row * parts * count + at, mask=there, other=float("nan"))
    token = tl.load(where + row * parts * count + at, mask=there, other=0)
    for n in range(count):
        best = tl.max(tl.where(x == x, x, float("-inf")), 0)
        place = tl.min(tl.where(x == best, at, size), 0)
        tl.store(values + row * count + n, best)
        tl.store(tokens + row * count + n, tl.sum(tl.where(at == place, token, 0), 0).to(tl.int64))
        x = tl.where(at == place, float("nan"), x)
