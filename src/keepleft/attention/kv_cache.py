"""KV caches: where self-attention keeps the keys and values of the tokens before.

    DynamicCache     keeps everything, in buffers that grow
    StaticCache      keeps up to a capacity, in buffers allocated once; fixed shapes for CUDA graphs
    RingCache        keeps the last `window` tokens of each row (sliding-window attention)
    QuantizedCache   keeps everything in 8 bits
    OffloadedCache   keeps everything in host memory

(The paged cache of the serving engine is in paged_kv_cache.py, the cross-attention cache in cross_memory.py.)
Where a cache stores a token is its own business: for every slot that it returns, its grid says which position
and which segment sits there, and the mask does the rest.

    admit(queries, positions, segments) -> grid    once per forward pass, before any layer writes
    update(layer, k, v) -> k, v                    write a layer's new keys and values, return all visible
    reorder(rows)                                  reorder, drop or repeat batch rows
    crop(n)                                        remove the last n tokens, if the cache can

Positions and segments are (B, queries), or None: consecutive after what is there, and one sequence per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from keepleft.attention.grid import Grid

KV = tuple[Tensor, Tensor]  # k, v: (B, H, slots, D)


class Cache(Protocol):
    """The interface. Feeding a sequence in chunks of any sizes must equal one pass over it."""

    def admit(
        self, queries: int, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Grid: ...
    def update(self, layer: int, k: Tensor, v: Tensor) -> KV: ...
    def reorder(self, rows: Tensor) -> None: ...


class DynamicCache:
    """Keeps everything, in buffers with spare slots; with gradients, in tensors that are never written to."""

    MIN_GROWTH = 32  # slots added when a buffer is full; half of the length where that is more

    def __init__(self) -> None:
        self.length = 0
        self.num_new = 0
        self.layers: dict[int, KV] = {}
        self.scratch: Tensor | None = None
        self.positions: Tensor | None = None  # (B, length); None: 0, 1, 2, …
        self.segments: Tensor | None = None  # (B, length); None: one sequence per row

    @property
    def rows(self) -> int | None:
        """Batch rows; None while the cache is empty."""
        return next((k.shape[0] for k, _ in self.layers.values()), None)

    def admit(self, queries: int, positions: Tensor | None = None, segments: Tensor | None = None) -> Grid:
        start = self.length
        self.length += queries
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
        """Each buffer is gathered into the one freed before it: fresh memory costs more than the copy."""
        for layer, kv in self.layers.items():
            reordered = []
            for buffer in kv:
                reordered.append(_gather_rows(buffer, rows, self.scratch))
                self.scratch = None if buffer.requires_grad else buffer
            self.layers[layer] = (reordered[0], reordered[1])
        self.positions = _select_rows(self.positions, rows)
        self.segments = _select_rows(self.segments, rows)

    def crop(self, n: int) -> None:
        self.length -= n
        if self.positions is not None:
            self.positions = self.positions[:, : self.length]
        if self.segments is not None:
            self.segments = self.segments[:, : self.length]


class StaticCache:
    """Keeps up to `capacity` tokens in buffers whose addresses never change.

    With `static_shapes` their shapes never change either: every slot is returned, empty ones as padding, and
    the slot to write to is a tensor, so that a CUDA graph can replay the step.
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
        self.cursor = torch.zeros((), dtype=torch.long, device=device)  # length, readable by a CUDA graph
        self.slots = self.cursor
        self.is_plain = not static_shapes

    @property
    def rows(self) -> int:
        return len(self.positions)

    def check_room(self, queries: int) -> None:
        """ValueError if so many more tokens do not fit."""
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
            self.layers[layer] = (_zero_slots(k, self.capacity), _zero_slots(v, self.capacity))
        buffers = self.layers[layer]
        if self.static_shapes:
            for buffer, new in zip(buffers, (k, v), strict=True):
                buffer.index_copy_(2, self.slots, new)
            return buffers
        for buffer, new in zip(buffers, (k, v), strict=True):
            buffer[:, :, self.length - self.num_new : self.length] = new
        return buffers[0][:, :, : self.length], buffers[1][:, :, : self.length]

    def reorder(self, rows: Tensor) -> None:
        """In place when the number of rows stays the same."""
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
    """Keeps the last `window` tokens of each row, for causal & window(n): a new one overwrites the oldest."""

    def __init__(self, window: int, *, batch: int, device: str | torch.device = "cpu") -> None:
        self.window = window
        self.layers: dict[int, KV] = {}
        # the last slot takes what is not kept: padding, and tokens already out of the window
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
        if not self.single_query:  # queries attend to the slots as they were, with the new tokens beside them
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
            self.layers[layer] = (_zero_slots(k, self.window + 1), _zero_slots(v, self.window + 1))
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


class QuantizedCache(DynamicCache):
    """Keeps keys and values in int8 with a scale per token and head: a quarter of float32, half of bfloat16.

    What is returned is within 1/254 of the largest value of its token and head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scales: dict[int, KV] = {}

    def update(self, layer: int, k: Tensor, v: Tensor) -> KV:
        int8_k, scale_k = _quantize_int8(k)
        int8_v, scale_v = _quantize_int8(v)
        if layer in self.layers:
            old_k, old_v = self.layers[layer]
            old_scale_k, old_scale_v = self.scales[layer]
            int8_k, int8_v = torch.cat([old_k, int8_k], 2), torch.cat([old_v, int8_v], 2)
            scale_k, scale_v = torch.cat([old_scale_k, scale_k], 2), torch.cat([old_scale_v, scale_v], 2)
        self.layers[layer] = (int8_k, int8_v)
        self.scales[layer] = (scale_k, scale_v)
        return int8_k.to(k.dtype) * scale_k, int8_v.to(v.dtype) * scale_v

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        self.scales = {layer: (k[rows], v[rows]) for layer, (k, v) in self.scales.items()}

    def crop(self, n: int) -> None:
        super().crop(n)
        crop_layers = lambda layers: {
            layer: (k[:, :, : self.length], v[:, :, : self.length]) for layer, (k, v) in layers.items()
        }
        self.layers, self.scales = crop_layers(self.layers), crop_layers(self.scales)


class OffloadedCache(DynamicCache):
    """Keeps keys and values in host memory and copies a layer's to the device while it attends."""

    def update(self, layer: int, k: Tensor, v: Tensor) -> KV:
        device = k.device
        host_k, host_v = super().update(layer, k.cpu(), v.cpu())
        return host_k.to(device, non_blocking=True), host_v.to(device, non_blocking=True)

    def reorder(self, rows: Tensor) -> None:
        positions, segments = self.positions, self.segments  # these are on the device
        self.positions = None
        self.segments = None
        super().reorder(rows.cpu())
        self.positions = _select_rows(positions, rows)
        self.segments = _select_rows(segments, rows)


def _gather_rows(tensor: Tensor, rows: Tensor, scratch: Tensor | None) -> Tensor:
    """tensor[rows], written into `scratch` where its shape and type fit."""
    if (
        scratch is None
        or tensor.requires_grad
        or scratch.shape != (len(rows), *tensor.shape[1:])
        or scratch.dtype != tensor.dtype
    ):
        return tensor.index_select(0, rows)
    return torch.index_select(tensor, 0, rows, out=scratch)


def _grow(tensor: Tensor, extra_slots: int) -> Tensor:
    """(B, H, slots, D) with `extra_slots` more, uninitialised."""
    batch, heads, slots, head_dim = tensor.shape
    out = tensor.new_empty(batch, heads, slots + extra_slots, head_dim)
    out[:, :, :slots] = tensor
    return out


def _zero_slots(like: Tensor, slots: int) -> Tensor:
    """(B, H, n, D) → zeros (B, H, slots, D)"""
    batch, heads, _, head_dim = like.shape
    return like.new_zeros(batch, heads, slots, head_dim)


def _select_rows(tensor: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if tensor is None else tensor[rows]


def _arange_like(like: Tensor, begin: int, n: int) -> Tensor:
    return torch.arange(begin, begin + n, device=like.device).expand(len(like), n)


def _ones_like(like: Tensor, begin: int, n: int) -> Tensor:
    return like.new_ones(len(like), n)


def _extend(
    old: Tensor | None, new: Tensor | None, start: int, n: int, fill: Callable[[Tensor, int, int], Tensor]
) -> Tensor | None:
    """(B, start) and (B, n) → (B, start + n); where only one of them is there, `fill` makes the other."""
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


def _quantize_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, n, D) → int8 from -127 to 127, and the scale to multiply it by, (B, H, n, 1)."""
    scale = tensor.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(tensor.dtype).tiny) / 127
    return (tensor / scale).round().clamp(-127, 127).to(torch.int8), scale
