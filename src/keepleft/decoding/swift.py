"""What single.py and beam.py do with plain scores, done in place by one kernel: for steps that are recorded on a GPU.

`Single.choose` and `Beam.choose` are the definition; each of their many small steps would be a kernel of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.beam import NEVER, Beam
from keepleft.decoding.hypotheses import held
from keepleft.decoding.single import Single
from keepleft.nn.best import best
from keepleft.nn.gpu import jit, power, tl

LARGE = 1 << 13  # numbers that one program can hold
RULES = {True: 1, False: 0, "never": 2}


def fits(strategy: Any, texts: Any) -> bool:
    """Plain scores, and histories that one program can move."""
    if strategy.transforms or strategy.seeds is not None or strategy.stop is not None or texts.score.dtype != torch.float32:
        return False
    rows = 1 if isinstance(strategy, Single) else 2 * strategy.width
    return rows * texts.tokens.shape[1] <= LARGE and (isinstance(strategy, Single) or strategy.groups == 1)


def advance(strategy: Single | Beam, scores: Tensor, texts: Any, track: Any) -> None:
    """The next token of every text, written over what was there."""
    columns = texts.tokens.shape[1]
    ends = held(strategy.end or (-1,), scores.device)
    if isinstance(strategy, Single):
        found = best(scores, 1)
        _single_kernel[(len(scores),)](
            *found, texts.tokens, texts.real, texts.score, texts.done, texts.size, texts.most, ends, len(ends), columns,
            power(columns), num_warps=4)
    else:
        width, rows = strategy.width, len(texts.ended)
        count = strategy.candidates(scores.shape[1])
        found = best(scores, count)
        each = found.scores.shape[1]
        _beam_kernel[(rows,)](
            *found, texts.tokens, texts.real, texts.score, texts.done, texts.size, texts.most, texts.ended, texts.ended_score,
            texts.ended_size, texts.full, texts.hope, texts.count, track.parents, track.now, ends, len(ends), columns,
            len(track.parents), strategy.penalty, width, power(width), each, power(width * each), count,
            power(width + count), RULES[strategy.early], power(columns), power(len(track.parents)), NEVER, num_warps=8)
    texts.count.add_(1)


@jit  # type: ignore[untyped-decorator]
def _single_kernel(likely, chosen, total, tokens, real, score, done, size, most, ends, many, columns,  # type: ignore
                   block: tl.constexpr):
    r = tl.program_id(0)
    over = tl.load(done + r) != 0
    column = tl.arange(0, block)
    at = r * columns + column
    history = tl.load(tokens + at + 1, mask=column < columns - 1, other=0)
    marks = tl.load(real + at + 1, mask=column < columns - 1, other=0)
    token = tl.where(over, tl.load(tokens + r * columns + columns - 1), tl.load(chosen + r))
    length = tl.load(size + r) + tl.where(over, 0, 1)
    gain = tl.where(over, 0.0, tl.load(likely + r) - tl.load(total + r))
    whole = tl.load(score + r) + gain
    over = over | (length >= tl.load(most + r))
    for n in range(many):
        over = over | (token == tl.load(ends + n))
    tl.debug_barrier()  # all is read before anything is written
    tl.store(tokens + at, tl.where(column == columns - 1, token, history), mask=column < columns)
    tl.store(real + at, tl.where(column == columns - 1, 1, marks).to(tl.int1), mask=column < columns)
    tl.store(score + r, whole)
    tl.store(size + r, length)
    tl.store(done + r, over)


@jit  # type: ignore[untyped-decorator]
def _beam_kernel(likely, chosen, total, tokens, real, score, done, size, most, ended, ended_score, ended_size, full, hope,  # type: ignore
                 added, parents, now, ends, many, columns, capacity, penalty, width: tl.constexpr, wide: tl.constexpr,
                 each: tl.constexpr, pool: tl.constexpr, count: tl.constexpr, lanes: tl.constexpr, early: tl.constexpr,
                 block: tl.constexpr, deep: tl.constexpr, never: tl.constexpr):
    b = tl.program_id(0)
    length = tl.load(added) + 1
    limit = tl.load(most + b * width)
    # the likeliest continuations of all texts of this prompt, one after the other
    at = tl.arange(0, pool)
    row = b * width + at // each
    there = at < width * each
    x = (tl.load(score + row, mask=there, other=0.0)
         + (tl.load(likely + b * width * each + at, mask=there, other=0.0) - tl.load(total + row, mask=there, other=0.0)))
    x = tl.where(there, x, float("nan"))
    token = tl.load(chosen + b * width * each + at, mask=there, other=0)
    lane = tl.arange(0, lanes)  # candidates first, then what had ended
    value = tl.zeros([lanes], tl.float32)
    parent = tl.zeros([lanes], tl.int64)
    last = tl.zeros([lanes], tl.int64)
    for n in range(count):
        top = tl.max(tl.where(x == x, x, float("-inf")), 0)
        place = tl.min(tl.where(x == top, at, pool), 0)
        value = tl.where(lane == n, top, value)
        parent = tl.where(lane == n, (place // each).to(tl.int64), parent)
        last = tl.where(lane == n, tl.sum(tl.where(at == place, token, 0), 0), last)
        x = tl.where(at == place, float("nan"), x)
    candidate = lane < count
    finish = candidate & (length >= limit)
    for n in range(many):
        finish = finish | (candidate & (last == tl.load(ends + n)))
    # those that go on
    x = tl.where(candidate, value + tl.where(finish, never, 0.0), float("nan"))
    out = tl.arange(0, wide)
    on = tl.zeros([wide], tl.float32)
    on_parent = tl.zeros([wide], tl.int64)
    on_last = tl.zeros([wide], tl.int64)
    for n in range(width):
        top = tl.max(tl.where(x == x, x, float("-inf")), 0)
        place = tl.min(tl.where(x == top, lane, lanes), 0)
        on = tl.where(out == n, top, on)
        on_parent = tl.where(out == n, tl.sum(tl.where(lane == place, parent, 0), 0), on_parent)
        on_last = tl.where(out == n, tl.sum(tl.where(lane == place, last, 0), 0), on_last)
        x = tl.where(lane == place, float("nan"), x)
    # those that have ended, now or before: these come first where scores are equal
    before = (lane >= count) & (lane < count + width)
    place = b * width + lane - count
    was_full = tl.load(full + place, mask=before, other=0) != 0
    hoped = tl.load(hope + b) != 0
    shut = hoped == 0
    if early == 1:
        shut = shut | (tl.sum(tl.where(before & was_full, 1, 0), 0) == width)
    just = finish & (lane < width)
    told = value / _raised(length, penalty)
    told = told + tl.where(just, 0.0, never)
    told = told + tl.where(shut, never, 0.0)
    x = tl.where(before, tl.load(ended_score + place, mask=before, other=0.0), tl.where(candidate, told, float("nan")))
    fill = tl.where(before, was_full, just)
    sizes = tl.where(before, tl.load(ended_size + place, mask=before, other=0), length)
    origin = tl.where(before, lane - count, width + parent)
    order = tl.where(before, lane - count, lane + width)
    end_score = tl.zeros([wide], tl.float32)
    end_size = tl.zeros([wide], tl.int64)
    end_full = out < 0
    end_from = tl.zeros([wide], tl.int64)
    end_last = tl.zeros([wide], tl.int64)
    for n in range(width):
        top = tl.max(tl.where(x == x, x, float("-inf")), 0)
        first = tl.min(tl.where(x == top, order, 2 * lanes), 0)
        mine = order == first
        mine = mine & (before | candidate)
        end_score = tl.where(out == n, top, end_score)
        end_size = tl.where(out == n, tl.sum(tl.where(mine, sizes, 0), 0), end_size)
        end_full = end_full | ((out == n) & (tl.sum(tl.where(mine & fill, 1, 0), 0) > 0))
        end_from = tl.where(out == n, tl.sum(tl.where(mine, origin, 0), 0), end_from)
        end_last = tl.where(out == n, tl.sum(tl.where(mine, last, 0), 0), end_last)
        x = tl.where(mine, float("nan"), x)
    inside = out < width
    lowest = tl.min(tl.where(inside, end_score, float("inf")), 0)
    highest = tl.max(tl.where(out == 0, on, float("-inf")), 0)
    farthest = length
    if early == 2:
        farthest = tl.where(penalty > 0, limit, length)
    reach = highest / _raised(farthest, penalty)
    better = tl.sum(tl.where(inside & (reach > tl.where(end_full, lowest, never)), 1, 0), 0) > 0
    hoped = hoped & better
    over = (hoped == 0) | (tl.sum(tl.where(candidate & (finish == 0), 1, 0), 0) == 0)
    if early == 1:
        over = over | (tl.sum(tl.where(inside & end_full, 1, 0), 0) == width)
    # histories: all are read, then all are written, one column to the left
    column = tl.arange(0, block)
    moved = (column < columns - 1)[None, :] & inside[:, None]
    text = tokens + (b * width + on_parent)[:, None] * columns + column[None, :] + 1
    on_text = tl.load(text, mask=moved, other=0)
    on_real = tl.load(real + (b * width + on_parent)[:, None] * columns + column[None, :] + 1, mask=moved, other=0)
    old = end_from < width
    end_text = tl.load(ended + (b * width + end_from)[:, None] * columns + column[None, :] + 1,
                       mask=moved & old[:, None], other=0)
    end_text += tl.load(tokens + (b * width + end_from - width)[:, None] * columns + column[None, :] + 1,
                        mask=moved & (old == 0)[:, None], other=0)
    step = tl.arange(0, deep)
    rows = tl.num_programs(0) * width
    kept = (step < capacity)[:, None] & inside[None, :]
    table = tl.load(parents + step[:, None] * rows + (b * width + on_parent)[None, :], mask=kept, other=0)
    table = tl.where((step == tl.load(now))[:, None], (b * width + on_parent)[None, :], table)
    tl.debug_barrier()
    here = (column < columns)[None, :] & inside[:, None]
    at_row = (b * width + out)[:, None] * columns + column[None, :]
    final = (column == columns - 1)[None, :]
    tl.store(tokens + at_row, tl.where(final, on_last[:, None], on_text), mask=here)
    tl.store(real + at_row, tl.where(final, 1, on_real).to(tl.int1), mask=here)
    tl.store(ended + at_row, tl.where(final, end_last[:, None], end_text), mask=here)
    tl.store(parents + step[:, None] * rows + (b * width + out)[None, :], table, mask=kept)
    at_out = b * width + out
    tl.store(score + at_out, on, mask=inside)
    tl.store(size + at_out, tl.load(size + at_out, mask=inside, other=0) + 1, mask=inside)
    tl.store(done + at_out, over & inside, mask=inside)
    tl.store(ended_score + at_out, end_score, mask=inside)
    tl.store(ended_size + at_out, end_size, mask=inside)
    tl.store(full + at_out, end_full, mask=inside)
    tl.store(hope + b, hoped)


@jit  # type: ignore[untyped-decorator]
def _raised(length, penalty):  # type: ignore
    """length ** penalty, as precisely as PyTorch's"""
    return tl.exp2(penalty * tl.log2(length.to(tl.float64))).to(tl.float32)
