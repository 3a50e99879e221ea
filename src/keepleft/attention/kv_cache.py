"""Keys and values already computed.

Where a cache keeps a token is its own business; it only has to say, for every slot that it hands
back, which position and which segment sits there. The mask does the rest.

    admit(queries, positions, segments) -> grid    once per forward pass, before any layer writes
    put(layer, k, v) -> k, v                       write this layer's new pairs, get all that may be looked at
    keep(rows)                                     reorder, drop or repeat batch rows
    drop(n)                                        forget the last n tokens, if the cache can

Positions and segments are (B, queries), or None: consecutive after what is there, and one text.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from keepleft.attention.grid import Grid

KV = tuple[Tensor, Tensor]  # k, v: (B, H, slots, D)


class Cache(Protocol):
    """The contract; the law is that any chunking equals one pass."""

    def admit(
        self, queries: int, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Grid: ...
    def update(self, layer: int, k: Tensor, v: Tensor) -> KV: ...
    def reorder(self, rows: Tensor) -> None: ...


class DynamicCache:
    """Keeps everything, in buffers with some room to grow; where gradients are wanted, in tensors that are
    never written to.
    """

    MIN_GROWTH = 32  # tokens added at least when a buffer is full; half of what it holds where that is more

    def __init__(self) -> None:
        self.length = self.num_new = 0
        self.layers: dict[int, KV] = {}
        self.scratch: Tensor | None = None
        self.positions: Tensor | None = None  # (B, length); None: 0, 1, 2, …
        self.segments: Tensor | None = None  # (B, length); None: one text

    @property
    def rows(self) -> int | None:
        """Of the batch; None as long as it is empty."""
        return next((k.shape[0] for k, _ in self.layers.values()), None)

    def admit(self, queries: int, positions: Tensor | None = None, segments: Tensor | None = None) -> Grid:
        start = self.length
        self.length = self.length + queries
        self.num_new = queries
        self.positions = _extend(self.positions, positions, start, queries, _arange_like)
        self.segments = _extend(self.segments, segments, start, queries, _ones_like)
        tail = lambda t: None if t is None else t[:, start:]
        return Grid(
            queries,
            self.length,
            start,
            tail(self.positions) if start else self.positions,
            self.positions,
            tail(self.segments) if start else self.segments,
            self.segments,
        )

    def update(self, layer: int, k: Tensor, v: Tensor) -> KV:
        start = self.length - self.num_new
        if not start:
            self.layers[layer] = (k, v)
            return k, v
        old_k, old_v = self.layers[layer]
        if k.requires_grad or v.requires_grad or old_k.requires_grad or old_v.requires_grad:
            kv = self.layers[layer] = (
                torch.cat([old_k[:, :, :start], k], 2),
                torch.cat([old_v[:, :, :start], v], 2),
            )
            return kv
        if old_k.shape[2] < self.length:
            growth = max(self.MIN_GROWTH, start // 2) + self.num_new
            old_k, old_v = self.layers[layer] = (
                _grow(old_k[:, :, :start], growth),
                _grow(old_v[:, :, :start], growth),
            )
        old_k[:, :, start : self.length] = k
        old_v[:, :, start : self.length] = v
        return old_k[:, :, : self.length], old_v[:, :, : self.length]

    def reorder(self, rows: Tensor) -> None:
        """Each buffer moves into the one that was emptied before it: fresh memory costs more than the copy."""
        for layer, kv in self.layers.items():
            reordered = []
            for buffer in kv:
                reordered.append(_gather_rows(buffer, rows, self.scratch))
                self.scratch = None if buffer.requires_grad else buffer
            self.layers[layer] = (reordered[0], reordered[1])
        self.positions, self.segments = _select_rows(self.positions, rows), _select_rows(self.segments, rows)

    def crop(self, n: int) -> None:
        self.length -= n
        self.positions, self.segments = (
            None if t is None else t[:, : self.length] for t in (self.positions, self.segments)
        )


class StaticCache:
    """Keeps up to `capacity` tokens in buffers that never move.

    With `fixed`, shapes never change either: every slot is handed back, empty ones as padding, and the place
    to write is a tensor, so that a CUDA graph can replay the step.
    """

    def __init__(
        self, capacity: int, *, batch: int, device: str | torch.device = "cpu", static_shapes: bool = False
    ) -> None:
        self.capacity = capacity
        self.static_shapes = static_shapes
        self.length = 0
        self.num_new = 0
        self.layers: dict[int, KV] = {}
        self.positions = torch.zeros(batch, capacity, dtype=torch.long, device=device)
        self.segments = torch.zeros_like(self.positions)
        self.cursor = torch.zeros((), dtype=torch.long, device=device)  # length, where a graph can read it
        self.slots = self.cursor
        self.is_plain = not static_shapes

    @property
    def rows(self) -> int:
        return len(self.positions)

    def check_room(self, queries: int) -> None:
        """An error where there is no room for them."""
        if self.length + queries > self.capacity:
            raise ValueError(
                f"the cache holds {self.length} of {self.capacity} tokens and cannot take {queries} more: "
                "ask for a larger capacity"
            )

    def admit(self, queries: int, positions: Tensor | None = None, segments: Tensor | None = None) -> Grid:
        self.check_room(queries)
        start, stop = self.length, self.length + queries
        self.is_plain = self.is_plain and positions is None and segments is None
        self.length = stop
        self.num_new = queries
        batch, device = len(self.positions), self.positions.device
        self.slots = self.cursor + torch.arange(queries, device=device)
        self.cursor += queries
        if positions is None:
            positions = self.slots.expand(batch, -1)
        if segments is None:
            segments = torch.ones_like(positions)
        self.positions.index_copy_(1, self.slots, positions)
        self.segments.index_copy_(1, self.slots, segments)
        if self.is_plain:
            return Grid(queries, stop, start)
        num_slots = self.capacity if self.static_shapes else stop
        return Grid(
            queries,
            num_slots,
            0,
            positions,
            self.positions[:, :num_slots],
            segments,
            self.segments[:, :num_slots],
        )

    def update(self, layer: int, k: Tensor, v: Tensor) -> KV:
        if layer not in self.layers:
            self.layers[layer] = tuple(t.new_zeros(*t.shape[:2], self.capacity, t.shape[3]) for t in (k, v))  # type: ignore[assignment]
        buffers = self.layers[layer]
        if self.static_shapes:
            for buffer, new in zip(buffers, (k, v), strict=True):
                buffer.index_copy_(2, self.slots, new)
            return buffers
        for buffer, new in zip(buffers, (k, v), strict=True):
            buffer[:, :, self.length - self.num_new : self.length] = new
        return buffers[0][:, :, : self.length], buffers[1][:, :, : self.length]

    def reorder(self, rows: Tensor) -> None:
        """In place when the number of rows stays as it is."""
        if len(rows) == len(self.positions):
            for tensor in (self.positions, self.segments):
                tensor.copy_(tensor[rows])
            scratch = None
            for kv in self.layers.values():
                for buffer in kv:
                    used = buffer[:, :, : self.length]
                    scratch = _gather_rows(used, rows, scratch)
                    used.copy_(scratch)
        else:
            self.positions = self.positions[rows]
            self.segments = self.segments[rows]
            self.layers = {layer: (k[rows], v[rows]) for layer, (k, v) in self.layers.items()}

    def crop(self, n: int) -> None:
        self.length -= n
        self.cursor -= n
        self.segments[:, self.length :] = 0


class RingCache:
    """Keeps the last `window` tokens of each row, each new one in the place of the oldest.

    For causal & window(n).
    """

    def __init__(self, window: int, *, batch: int, device: str | torch.device = "cpu") -> None:
        self.window = window
        self.layers: dict[int, KV] = {}
        # the last slot is a bin
        self.positions = torch.zeros(batch, window + 1, dtype=torch.long, device=device)
        self.segments = torch.zeros_like(self.positions)
        self.count = torch.zeros(batch, 1, dtype=torch.long, device=device)  # real tokens so far
        self.slots = self.count
        self.single_query = False

    @property
    def rows(self) -> int:
        return len(self.count)

    def admit(self, queries: int, positions: Tensor | None = None, segments: Tensor | None = None) -> Grid:
        if segments is None:
            segments = self.count.new_ones(len(self.count), queries)
        real = segments != 0
        order = real.cumsum(1)
        if positions is None:
            positions = self.count + (order - 1).clamp(min=0)
        retained = real & (order[:, -1:] - order < self.window)
        self.slots = torch.where(retained, (self.count + order - 1) % self.window, self.window)
        self.count = self.count + order[:, -1:]
        old_pos, old_seg = self.positions[:, :-1], self.segments[:, :-1]
        self.single_query = queries == 1
        if not self.single_query:  # the old ones are looked at as they were, beside the new ones
            k_pos, k_seg = torch.cat([old_pos, positions], 1), torch.cat([old_seg, segments], 1)
        self._write(positions, segments)
        if self.single_query:
            k_pos, k_seg = self.positions[:, :-1], self.segments[:, :-1]
        return Grid(queries, k_pos.shape[1], 0, positions, k_pos, segments, k_seg)

    def _write(self, positions: Tensor, segments: Tensor) -> None:
        self.positions.scatter_(1, self.slots, positions)
        self.segments.scatter_(1, self.slots, segments)
        self.segments[:, -1] = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> KV:
        if layer not in self.layers:
            self.layers[layer] = tuple(t.new_zeros(*t.shape[:2], self.window + 1, t.shape[3]) for t in (k, v))  # type: ignore[assignment]
        visible_kv = []
        for buffer, new in zip(self.layers[layer], (k, v), strict=True):
            visible = buffer[:, :, :-1]
            if not self.single_query:
                visible = torch.cat([visible, new], 2)
            buffer.scatter_(2, self.slots[:, None, :, None].expand_as(new), new)
            visible_kv.append(visible)
        return visible_kv[0], visible_kv[1]

    def reorder(self, rows: Tensor) -> None:
        self.positions = self.positions[rows]
        self.segments = self.segments[rows]
        self.count = self.count[rows]
        self.layers = {layer: (k[rows], v[rows]) for layer, (k, v) in self.layers.items()}


def _gather_rows(tensor: Tensor, rows: Tensor, scratch: Tensor | None) -> Tensor:
    """Those rows, written over the spare tensor where it fits."""
    if (
        scratch is None
        or tensor.requires_grad
        or scratch.shape != (len(rows), *tensor.shape[1:])
        or scratch.dtype != tensor.dtype
    ):
        return tensor.index_select(0, rows)
    return torch.index_select(tensor, 0, rows, out=scratch)


def _grow(tensor: Tensor, extra_slots: int) -> Tensor:
    """(B, H, slots, D) with so many more slots, empty."""
    batch, heads, slots, head_dim = tensor.shape
    out = tensor.new_empty(batch, heads, slots + extra_slots, head_dim)
    out[:, :, :slots] = tensor
    return out


def _select_rows(tensor: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if tensor is None else tensor[rows]


def _arange_like(like: Tensor, begin: int, n: int) -> Tensor:
    return torch.arange(begin, begin + n, device=like.device).expand(len(like), n)


def _ones_like(like: Tensor, begin: int, n: int) -> Tensor:
    return like.new_ones(len(like), n)


def _extend(old: Tensor | None, new: Tensor | None, start: int, n: int, fill) -> Tensor | None:  # type: ignore[no-untyped-def]
    """Old and new side by side; where only one of them was given, the other is filled in."""
    if old is None and new is None:
        return None
    if new is None:
        assert old is not None
        new = fill(old, start, n)
    if old is None:
        if not start:
            return new
        old = fill(new, 0, start)
    return torch.cat([old, new], 1)
