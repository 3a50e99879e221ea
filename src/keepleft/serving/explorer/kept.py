"""What one layer's attention needs to be worked out again, piece by piece: queries and keys instead of maps.

A text of 2,000 tokens has 12 × 12 maps of 16 MB each in a small model; its queries and keys are a hundredth of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepleft.attention.attend import Sight, Watcher
from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask, full
from keepleft.models.design import Design
from keepleft.models.watch import attentions, watched
from keepleft.nn.position import Nearness

TALL = 128  # rows of a strip: few enough for its scores to stay near the processor


class Strip(NamedTuple):
    """Some rows of a map, over the columns that any of them sees."""

    begin: int       # the first of its rows, among those asked for
    end: int
    left: int        # the first of its columns
    right: int
    weights: Tensor  # (heads, rows, columns)


@dataclass(frozen=True)
class Layer:
    """One attention of one layer, over one text."""

    q: Tensor                  # (H, Q, D)
    k: Tensor                  # (H or a divisor of it, K, D)
    scale: float
    mask: Mask                 # through which it looked
    claim: Mask                # through which its design says it looks
    grid: Grid
    nearness: Nearness | None  # T5's bias on the scores

    @property
    def heads(self) -> int:
        return self.q.shape[0]

    @property
    def rows(self) -> int:
        return self.q.shape[1]

    @property
    def columns(self) -> int:
        return self.k.shape[1]

    def strips(self, heads: Sequence[int], rows: Tensor | None = None, tall: int = TALL) -> Iterator[Strip]:
        """The weights of some heads, strip by strip; of all rows, or of some of them."""
        device = self.q.device
        which = torch.tensor(list(heads), device=device)
        rows = torch.arange(self.rows, device=device) if rows is None else rows.to(device)
        q, k = _fine(self.q[which]) * self.scale, _fine(self.k[which // (self.heads // self.k.shape[0])])
        near = None if self.nearness is None else self._near(self.nearness)[which].to(q.dtype)
        for begin in range(0, len(rows), tall):
            some = rows[begin:begin + tall]
            seen = self.table(self.mask, some, which)
            left, right = span(seen.any(0).any(0))
            seen = seen[..., left:right]
            scores = torch.matmul(q[:, some], k[:, left:right].mT)
            if near is not None:
                scores += near.unfold(1, right - left, 1)[:, self.rows - 1 - some + left]
            hidden = ~seen
            if bool(hidden.any()):
                first, last = span(hidden.any(0).any(0))  # to the left of the diagonal all is seen
                scores[..., first:last].masked_fill_(hidden[..., first:last], float("-inf"))
            weights = scores.softmax(-1)
            if bool((blind := hidden.all(-1, keepdim=True)).any()):
                weights = weights.masked_fill(blind, 0.0)
            yield Strip(begin, begin + len(some), left, right, weights)

    def _near(self, nearness: Nearness) -> Tensor:
        """(H, Q - 1 + K) the bias at each distance, the farthest to the left first: of each row it is a stretch."""
        if not self.grid.plain or self.grid.start:
            raise ValueError("the bias of nearness is worked out for one text at positions 0, 1, 2, …: leave segments out")
        far = torch.arange(1 - self.rows, self.columns, device=self.q.device)
        return nearness(torch.zeros_like(far[None, :1]), far[None])[0, :, 0]

    def weights(self, heads: Sequence[int], rows: Tensor) -> Tensor:
        """(heads, rows, K) of a few rows."""
        out = _fine(self.q).new_zeros(len(heads), len(rows), self.columns)
        for strip in self.strips(heads, rows):
            out[:, strip.begin:strip.end, strip.left:strip.right] = strip.weights
        return out

    def table(self, mask: Mask, rows: Tensor, heads: Tensor) -> Tensor:
        """(heads or 1, rows, K): what a mask lets these rows see."""
        return self.grid.table(mask, batch=1, heads=self.heads, device=self.q.device, some_heads=heads, queries=rows)[0]

    def claimed(self, heads: Sequence[int], rows: Tensor) -> Tensor:
        """(rows, K): what the design lets any of these heads see."""
        return self.table(self.claim, rows.to(self.q.device), torch.tensor(list(heads), device=self.q.device)).any(0)


def claimed(design: Design, name: str) -> Mask:
    """The mask that a design gives to an attention, by a name such as "decoder.3.self"."""
    side, number, kind = name.split(".")
    masks = getattr(design, side).mask
    return full if kind == "cross" else masks[int(number) % len(masks)]  # type: ignore[no-any-return]


def keeping(model: Any, forward: Callable[[], Any]) -> dict[str, Layer]:
    """Every attention of one pass over one text, by names such as "decoder.3.cross"."""
    found: dict[str, Layer] = {}

    def watcher(name: str) -> Watcher:
        side, _, kind = name.split(".")
        claim, nearness = claimed(model.design, name), None if kind == "cross" else near.get(side)

        def look(q: Tensor, k: Tensor, sight: Sight, scale: float) -> None:
            found[name] = Layer(_own(q[0]), _own(k[0]), scale, sight.mask, claim, sight.grid, nearness)
        return look

    near = {side: deepcopy(part) for side in ("encoder", "decoder")  # it may learn on
            if (part := getattr(getattr(model, side, None), "nearness", None)) is not None}
    with watched(attentions(model), watcher):
        forward()
    return found


def _own(x: Tensor) -> Tensor:
    """Not a view, which would keep the values alive too."""
    return x.clone(memory_format=torch.contiguous_format)


def _fine(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def span(seen: Tensor) -> tuple[int, int]:
    """The first column that is seen, and the one after the last; a strip that sees nothing keeps one column."""
    there = seen.nonzero()
    return (int(there[0]), int(there[-1]) + 1) if len(there) else (0, 1)
