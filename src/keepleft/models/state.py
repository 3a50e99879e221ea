"""The state of a decoder between steps: its KV caches, the cross-attention memory, and the next positions."""

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

CACHE_KINDS = ("dynamic", "static", "ring", "offloaded", "quantized")  # all are exact but the last
_DYNAMIC_CACHES: dict[str, type[DynamicCache]] = {
    "dynamic": DynamicCache,
    "offloaded": OffloadedCache,
    "quantized": QuantizedCache,
}


@dataclass
class DecoderState:
    """What `start` returns and `step` updates."""

    caches: list[Cache]  # one for each mask that the layers cycle through
    memory: Memory | None = None
    position: int | Tensor = 0  # of the next token; (B, 1) where rows differ
    segment: Tensor | None = None  # (B, 1) the segment that each row continues, once segments were given

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
        """Remove the last n tokens, as if they had never been given; ValueError where a cache cannot.

        For rows of one sequence each, without padding on the right.
        """
        for cache in self.caches:
            if not hasattr(cache, "crop"):
                kind = type(cache).__name__.removesuffix("Cache").lower()
                raise ValueError(
                    f"a {kind} cache has overwritten what came before and cannot go back: take another kind"
                )
            cache.crop(n)
        self.position -= n

    def check(self, tokens: Tensor) -> None:
        """ValueError, before anything is written, unless the tokens have as many rows as before and fit."""
        for cache in self.caches:
            rows = getattr(cache, "rows", None)
            if rows not in (None, tokens.shape[0]):
                raise ValueError(
                    f"the cache is for {rows} rows, the tokens have {tokens.shape[0]} rows: "
                    "they must be the same"
                )
            if isinstance(cache, StaticCache):
                cache.check_room(tokens.shape[1])

    def next_positions(
        self, n: int, positions: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Positions and segments of n more tokens, as tensors where rows differ, else None."""
        if segments is None and self.segment is not None:
            segments = self.segment.expand(-1, n)
        if positions is None and segments is not None:
            offset = (
                self.position
                if self.segment is None
                else torch.where(segments == self.segment, self.position, 0)
            )
            # a new segment is counted from 0
            positions = positions_from_segments(segments) + offset
        elif positions is None and isinstance(self.position, Tensor):
            positions = self.position + torch.arange(n, device=self.position.device)
        return positions, segments

    def advance(self, n: int, positions: Tensor | None, segments: Tensor | None) -> None:
        """Update the position and segment of each row after n more tokens."""
        if positions is None:
            assert isinstance(self.position, int)
            self.position += n
        elif segments is None:
            self.position = positions[:, -1:] + 1
        else:
            real = segments != 0
            has_real = real.any(1, keepdim=True)
            last = last_real(real)[:, None]
            self.position = torch.where(has_real, positions.gather(1, last) + 1, self.position)
            old_segment = segments.new_ones(len(segments), 1) if self.segment is None else self.segment
            self.segment = torch.where(has_real, segments.gather(1, last), old_segment)


def make_caches(
    kind: str, masks: tuple[Mask, ...], *, batch: int, device: torch.device, capacity: int | None
) -> list[Cache]:
    """A cache of this kind for each mask.

    A ring cache serves masks with a window. With kind "ring", masks without one get a static cache where
    there is a capacity, else a dynamic one.
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
