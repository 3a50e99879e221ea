"""What a decoder keeps between steps: its caches, the memory of a source, and where each row stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keepleft import checks
from keepleft.attention.cross_memory import Memory
from keepleft.attention.kv_cache import (
    Cache,
    DynamicCache,
    OffloadedCache,
    QuantizedCache,
    RingCache,
    StaticCache,
)
from keepleft.attention.masks import Mask, window_size
from keepleft.models.heads import last_real
from keepleft.models.stack import positions_from_segments

CACHE_KINDS = ("dynamic", "static", "ring", "offloaded", "quantized")  # the last one rounds
_DYNAMIC_CACHES: dict[str, type[DynamicCache]] = {
    "dynamic": DynamicCache,
    "offloaded": OffloadedCache,
    "quantized": QuantizedCache,
}


@dataclass
class DecoderState:
    caches: list[Cache]  # one for each mask that the layers take in turn
    memory: Memory | None = None
    position: int | Tensor = 0  # the position of the next token; (B, 1) where rows differ
    segment: Tensor | None = None  # (B, 1) the segment that a row goes on with, once segments were given

    def reorder(self, rows: Tensor) -> None:
        """Reorder, drop or repeat batch rows."""
        for cache in self.caches:
            cache.reorder(rows)
        if self.memory is not None:
            self.memory.reorder(rows)
        if isinstance(self.position, Tensor):
            self.position = self.position[rows]
        if self.segment is not None:
            self.segment = self.segment[rows]

    def crop(self, n: int) -> None:
        """Forget the last n tokens, as if they had never been given.

        For one text in each row, with nothing behind it.
        """
        for cache in self.caches:
            if not hasattr(cache, "crop"):
                raise ValueError(
                    f"a {type(cache).__name__.removesuffix('Cache').lower()} cache has written over what came before and cannot go "
                    "back: take another kind"
                )
            cache.crop(n)
        self.position -= n

    def check(self, tokens: Tensor) -> None:
        """A look at more tokens before anything is written: as many rows as before, and room for them."""
        for cache in self.caches:
            rows = getattr(cache, "rows", None)
            if rows not in (None, tokens.shape[0]):
                raise ValueError(
                    f"the cache is for {rows} rows, the tokens have {tokens.shape[0]} rows: they must be as many"
                )
            if isinstance(cache, StaticCache):
                cache.check_room(tokens.shape[1])

    def next_positions(
        self, n: int, positions: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Positions and segments of n more tokens, spelt out where rows differ."""
        if segments is None and self.segment is not None:
            segments = self.segment.expand(-1, n)
        if positions is None and segments is not None:
            offset = (
                self.position
                if self.segment is None
                else torch.where(segments == self.segment, self.position, 0)
            )
            # a text that begins here is counted from 0
            positions = positions_from_segments(segments) + offset
        elif positions is None and isinstance(self.position, Tensor):
            positions = self.position + torch.arange(n, device=self.position.device)
        return positions, segments

    def advance(self, n: int, positions: Tensor | None, segments: Tensor | None) -> None:
        """Where each row stands after them."""
        if positions is None:
            assert isinstance(self.position, int)
            self.position += n
        elif segments is None:
            self.position = positions[:, -1:] + 1
        else:
            real = segments != 0
            next_position = positions.gather(1, last_real(real)[:, None]) + 1
            self.position = torch.where(real.any(1, keepdim=True), next_position, self.position)
            old_segment = segments.new_ones(len(segments), 1) if self.segment is None else self.segment
            self.segment = torch.where(
                real.any(1, keepdim=True), segments.gather(1, last_real(real)[:, None]), old_segment
            )


def make_caches(
    kind: str, masks: tuple[Mask, ...], *, batch: int, device: torch.device, capacity: int | None
) -> list[Cache]:
    """A cache for each mask.

    A ring serves masks that forget; beside it, those that do not get what else fits.
    """
    if kind not in CACHE_KINDS:
        raise ValueError(f"no cache is called {kind!r}: there are {', '.join(CACHE_KINDS)}")
    if capacity is not None:
        checks.check_int("capacity", capacity)
    elif kind == "static":
        raise ValueError(
            "a static cache needs a capacity: the most tokens, prompt included, that it will hold"
        )

    def make_cache(mask: Mask) -> Cache:
        window = window_size(mask)
        if kind == "ring" and window is not None:
            return RingCache(window, batch=batch, device=device)
        if capacity is not None and kind not in _DYNAMIC_CACHES:
            return StaticCache(capacity, batch=batch, device=device)
        return _DYNAMIC_CACHES.get(kind, DynamicCache)()

    return [make_cache(mask) for mask in masks]
