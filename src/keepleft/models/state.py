"""What a decoder keeps between steps: its caches, the memory of a source, and where each row stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keepleft.attention.cache import Cache, Growing, Ring, Static
from keepleft.attention.lean import Offloaded, Quantized
from keepleft.attention.masks import Mask, window_size
from keepleft.attention.memory import Memory
from keepleft.models.heads import last
from keepleft.models.stack import positions_of
from keepleft.nn import sense

KINDS = ("growing", "static", "ring", "offloaded", "quantized")  # the last one rounds
_THAT_GROW: dict[str, type[Growing]] = {"growing": Growing, "offloaded": Offloaded, "quantized": Quantized}


@dataclass
class State:
    caches: list[Cache]             # one for each mask that the layers take in turn
    memory: Memory | None = None
    next: int | Tensor = 0          # the position of the next token; (B, 1) where rows differ
    segment: Tensor | None = None   # (B, 1) the segment that a row goes on with, once segments were given

    def keep(self, rows: Tensor) -> None:
        """Reorder, drop or repeat batch rows."""
        for cache in self.caches:
            cache.keep(rows)
        if self.memory is not None:
            self.memory.keep(rows)
        if isinstance(self.next, Tensor):
            self.next = self.next[rows]
        if self.segment is not None:
            self.segment = self.segment[rows]

    def drop(self, n: int) -> None:
        """Forget the last n tokens, as if they had never been given. For one text in each row, with nothing behind it."""
        for cache in self.caches:
            if not hasattr(cache, "drop"):
                raise ValueError(f"a {type(cache).__name__.lower()} cache has written over what came before and cannot go "
                                 "back: take another kind")
            cache.drop(n)
        self.next -= n

    def fits(self, tokens: Tensor) -> None:
        """A look at more tokens before anything is written: as many rows as before, and room for them."""
        for cache in self.caches:
            rows = getattr(cache, "rows", None)
            if rows not in (None, tokens.shape[0]):
                raise ValueError(f"the cache is for {rows} rows, the tokens have {tokens.shape[0]} rows: they must be as many")
            if isinstance(cache, Static):
                cache.fits(tokens.shape[1])

    def place(self, n: int, positions: Tensor | None, segments: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Positions and segments of n more tokens, spelt out where rows differ."""
        if segments is None and self.segment is not None:
            segments = self.segment.expand(-1, n)
        if positions is None and segments is not None:
            going_on = self.next if self.segment is None else torch.where(segments == self.segment, self.next, 0)
            positions = positions_of(segments) + going_on  # a text that begins here is counted from 0
        elif positions is None and isinstance(self.next, Tensor):
            positions = self.next + torch.arange(n, device=self.next.device)
        return positions, segments

    def move(self, n: int, positions: Tensor | None, segments: Tensor | None) -> None:
        """Where each row stands after them."""
        if positions is None:
            assert isinstance(self.next, int)
            self.next += n
        elif segments is None:
            self.next = positions[:, -1:] + 1
        else:
            real = segments != 0
            now = positions.gather(1, last(real)[:, None]) + 1
            self.next = torch.where(real.any(1, keepdim=True), now, self.next)
            old = segments.new_ones(len(segments), 1) if self.segment is None else self.segment
            self.segment = torch.where(real.any(1, keepdim=True), segments.gather(1, last(real)[:, None]), old)


def caches(kind: str, masks: tuple[Mask, ...], *, batch: int, device: torch.device, capacity: int | None) -> list[Cache]:
    """A cache for each mask. A ring serves masks that forget; beside it, those that do not get what else fits."""
    if kind not in KINDS:
        raise ValueError(f"no cache is called {kind!r}: there are {', '.join(KINDS)}")
    if capacity is not None:
        sense.whole("capacity", capacity)
    elif kind == "static":
        raise ValueError("a static cache needs a capacity: the most tokens, prompt included, that it will hold")

    def one(mask: Mask) -> Cache:
        size = window_size(mask)
        if kind == "ring" and size is not None:
            return Ring(size, batch=batch, device=device)
        if capacity is not None and kind not in _THAT_GROW:
            return Static(capacity, batch=batch, device=device)
        return _THAT_GROW.get(kind, Growing)()

    return [one(mask) for mask in masks]
