"""The step of nn/lone.py over pages, in plain PyTorch: queries go to the pages, pages stay where they lie.

Copying the pages of each text into a row costs more than looking at them. Here each page is asked by the text that it belongs
to, and what the pages of one text found is put together. Pages that belong to nobody are asked too, as long as few do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.nn.attention import Heads
from keepleft.nn.feedforward import Feed
from keepleft.nn.lone import Across, Enter, Leave, Look, Plain, Turn, apart


@dataclass
class Lot:
    """Rows of texts that each have `width` rows, and the pages that they look at."""

    first: int                  # of the rows
    count: int                  # texts
    width: int
    begin: int                  # of the pages, one after the other …
    end: int
    only: Tensor | None         # … or just these
    owner: Tensor               # (n,) the text of each page; `count`: none
    home: Tensor | None         # (count,) the page of each text, where each has but one
    fill: int                   # slots of a page that are in use
    biases: dict[int | None, Tensor] = field(default_factory=dict)  # by window: (n · Hk, width · G, fill)

    @property
    def last(self) -> int:
        return self.first + self.count * self.width


@dataclass
class Spread:
    """Where a step over pages stands: what all layers share."""

    lots: list[Lot]
    page: Tensor                # (R,) where each row's own key and value go
    within: Tensor              # (R,)
    turn: Turn | None = None


class Paging:
    """Tools for steps over pages: buffers are (pages, Hk, size, D)."""

    whole = False

    def __init__(self) -> None:
        self.plain = Plain()

    def enter(self, norm: nn.Module | None, product: nn.Module, feed: Feed | None = None) -> Enter:
        return self.plain.enter(norm, product, feed)

    def leave(self, product: nn.Module) -> Leave:
        return self.plain.leave(product)

    def look(self, shape: Heads, window: int | None) -> Look:
        def run(qkv: Tensor, keys: Tensor, values: Tensor, here: Any) -> Tensor:
            q, k, v = apart(qkv, shape, here.turn)
            keys[here.page, :, here.within] = k
            values[here.page, :, here.within] = v
            return _joined([asked(q[lot.first:lot.last], keys, values, lot, lot.biases[window], shape) for lot in here.lots])
        return run

    def across(self, shape: Heads) -> Across:
        def run(q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
            q = q.view(len(q), -1, shape.width)
            return _joined([asked(q[lot.first:lot.last], keys, values, lot, lot.biases[None], shape) for lot in bias])
        return run


def asked(q: Tensor, keys: Tensor, values: Tensor, lot: Lot, bias: Tensor, shape: Heads) -> Tensor:
    """(R, H, D) over pages → (R, H · D)"""
    few, width, rows = shape.kv_heads, shape.width, lot.count
    q = q.view(rows, lot.width, few, -1, width).transpose(1, 2).reshape(rows, few, -1, width)
    inside, whose = lot.owner.clamp(max=rows - 1), lot.owner
    many = q.shape[2]
    q = q.index_select(0, inside).flatten(0, 1)
    k, v = (part(buffer, lot).flatten(0, 1) for buffer in (keys, values))
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=shape.factor)
    if lot.home is not None:
        found = torch.bmm(scores.softmax(-1), v).view(-1, few, many, width).index_select(0, lot.home)
    else:
        scores = scores.view(-1, few, many, lot.fill)
        highest = scores.amax(-1)
        top = highest.new_full((rows + 1, few, many), float("-inf"))
        top.scatter_reduce_(0, whose[:, None, None].expand_as(highest), highest, "amax")
        share = (scores - top.index_select(0, whose)[..., None]).exp()
        found = torch.bmm(share.flatten(0, 1), v).view(-1, few, many, width)
        found = found.new_zeros(rows + 1, few, many, width).index_add_(0, whose, found)[:rows]
        found = found / found.new_zeros(rows + 1, few, many).index_add_(0, whose, share.sum(-1))[:rows, ..., None]
    return found.view(rows, few, lot.width, -1, width).transpose(1, 2).reshape(rows * lot.width, -1)


def part(buffer: Tensor, lot: Lot) -> Tensor:
    """(pages, Hk, size, D) → (n, Hk, fill, D)"""
    pages = buffer[lot.begin:lot.end] if lot.only is None else buffer.index_select(0, lot.only)
    return pages[:, :, :lot.fill]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
