"""A chunk of scores on a GPU: read for the loss, and turned into their gradient in place before they leave the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.nn.gpu import jit, tl

BLOCK, WARPS = 2048, 8


def measure(scores: Tensor, targets: Tensor, smoothing: float, back: bool) -> Tensor:
    """(3,) loss, plain and right of (n, V) scores, which turn into their gradient where one is wanted."""
    out = torch.empty(3, len(scores), dtype=torch.float32, device=scores.device)
    _row[(len(scores),)](scores, targets, out, scores.stride(0), *scores.shape, smoothing, smoothing > 0, back, BLOCK,
                         num_warps=WARPS)
    return out.sum(1)


@jit  # type: ignore[untyped-decorator]
def _row(scores, targets, out, stride, rows, vocab, smoothing, smooth: tl.constexpr, back: tl.constexpr,  # type: ignore
         block: tl.constexpr):
    row = tl.program_id(0)
    target = tl.load(targets + row)
    scores += row.to(tl.int64) * stride
    lane = tl.arange(0, block)
    if target < 0:  # nothing is asked here
        tl.store(out + row, 0.0)
        tl.store(out + rows + row, 0.0)
        tl.store(out + 2 * rows + row, 0.0)
        if back:
            for begin in range(0, vocab, block):
                at = begin + lane
                tl.store(scores + at, tl.zeros([block], scores.dtype.element_ty), mask=at < vocab)
    else:
        # each lane keeps its own highest score, where it was, and the sum of exp(score - highest): one exp for each score
        top = tl.full([block], -1e30, tl.float32)
        place = tl.zeros([block], tl.int32)
        mass = tl.zeros([block], tl.float32)
        total = tl.zeros([block], tl.float32)
        for begin in range(0, vocab, block):
            at = begin + lane
            score = tl.load(scores + at, mask=at < vocab, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
            if smooth:
                total += tl.where(at < vocab, score, 0.0)
            higher = score > top
            less = tl.exp(-tl.abs(score - top))
            mass = tl.where(higher, mass * less + 1.0, mass + less)
            place = tl.where(higher, at, place)
            top = tl.maximum(top, score)
        highest = tl.max(top, 0)
        normal = highest + tl.log(tl.sum(mass * tl.exp(top - highest), 0))
        best = tl.min(tl.where(top == highest, place, vocab), 0)
        own = tl.load(scores + target).to(tl.float32)
        plain = normal - own
        tl.store(out + row, (1.0 - smoothing) * plain + smoothing * (normal - tl.sum(total, 0) / vocab))
        tl.store(out + rows + row, plain)
        tl.store(out + 2 * rows + row, (best == target).to(tl.float32))
        if back:
            tl.debug_barrier()  # own is read before it is overwritten
            for begin in range(0, vocab, block):
                at = begin + lane
                score = tl.load(scores + at, mask=at < vocab, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
                slope = tl.exp(score - normal) - smoothing / vocab - tl.where(at == target, 1.0 - smoothing, 0.0)
                tl.store(scores + at, slope.to(scores.dtype.element_ty), mask=at < vocab)
