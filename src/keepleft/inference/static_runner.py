"""The fused decode step over a static KV cache: one token per row, in buffers that never move.

The general step (models/transformer.py) serves any mask, any cache and any number of tokens, and works out
anew each time what may be attended to. Nearly all decoding is simpler: causal masks, perhaps with a sliding
window, one token per row, sequences that all end in the last column. `StaticRunner` does just that, with
tensors alone, so that it can also be compiled, or captured as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.attention.cross_memory import Memory
from keepleft.inference.decode_layers import ByPosition, DecodeLayers
from keepleft.inference.ops import DecodeContext, DecodeOps, StaticLayout
from keepleft.inference.ops_torch import TorchOps
from keepleft.models.embedding import check_tokens
from keepleft.models.heads import first_real
from keepleft.models.state import DecoderState
from keepleft.models.transformer import CausalModel

GROW_BY = 64  # columns added at least when a growable cache is full


@dataclass
class StaticKV:
    """A static KV cache: what a decode step keeps between tokens."""

    # keys and values of each layer, (capacity, R, Hk, D), views of `buffer`
    layers: list[tuple[Tensor, Tensor]]
    buffer: Tensor  # (2 · layers, capacity, R, Hk, D)
    length: int  # tokens so far
    position: Tensor  # (1,) the same, on the device
    starts: Tensor | None = None  # (R,) column where each row's sequence starts; None: 0
    memory: Memory | None = None
    source_bias: Tensor | None = None  # (B, S) 0, or -∞ at padding of the sources; None: no padding
    beam_rows: Tensor | None = None  # (capacity, R) buffer row that holds a column of a row; None: its own
    growable: bool = False  # reallocate when full

    @classmethod
    def allocate(cls, buffer: Tensor, **fields: Any) -> StaticKV:
        layers = list(zip(buffer[::2].unbind(), buffer[1::2].unbind(), strict=True))
        return cls(layers, buffer, 0, torch.zeros(1, dtype=torch.long, device=buffer.device), **fields)

    def fill(self, state: DecoderState, rows: Tensor | None = None) -> None:
        """Copy the KV cache of prefilled prompts; `rows` selects or repeats prompts."""
        for n, buffers in enumerate(self.layers):
            cache: Any = state.caches[n % len(state.caches)]
            self.length = cache.length
            for layer_buffer, cached in zip(buffers, cache.layers[n], strict=True):
                filled = cached[:, :, : self.length] if rows is None else cached[:, :, : self.length][rows]
                layer_buffer[: self.length] = filled.permute(2, 0, 1, 3)
        self.position.fill_(self.length)

    def reorder(self, rows: Tensor) -> None:
        """Reorder, drop or repeat rows; if their number stays, only those that change are moved."""
        self.starts = None if self.starts is None else self.starts[rows]
        if self.memory is not None:
            old_segments = self.memory.segments
            self.memory.reorder(rows)
            if self.memory.segments is not old_segments:
                self.source_bias = padding_bias(self.memory.segments, self.buffer.dtype)
        filled = self.buffer[:, : self.length]
        if len(rows) != self.buffer.shape[2]:
            self.reallocate(filled.index_select(2, rows), self.buffer.shape[1])
        elif len(moved_rows := (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]):
            filled.index_copy_(2, moved_rows, filled.index_select(2, rows[moved_rows]))

    def reallocate(self, filled: Tensor, capacity: int) -> None:
        """Move to new buffers of `capacity` columns."""
        target = StaticKV.allocate(filled.new_zeros(len(filled), capacity, *filled.shape[2:]))
        target.buffer[:, : self.length] = filled
        self.buffer = target.buffer
        self.layers = target.layers


def weight_pointers(model: nn.Module) -> tuple[int, ...]:
    """Addresses of the weights: they change when weights are replaced, and what was built from them must be
    rebuilt.
    """
    return tuple(weight.data_ptr() for weight in model.parameters())


_runners: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], StaticRunner]] = WeakKeyDictionary()


def static_runner(model: CausalModel) -> StaticRunner:
    """The model's runner, cached as long as its weights keep their memory."""
    pointers = weight_pointers(model)
    cached = _runners.get(model)
    if cached is None or cached[0] != pointers:
        cached = _runners[model] = pointers, StaticRunner(model)
    return cached[1]


def padding_bias(segments: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(B, S) 0 at tokens, -∞ at padding."""
    return (
        None
        if segments is None
        else torch.zeros_like(segments, dtype=dtype).masked_fill(segments == 0, float("-inf"))
    )


class StaticRunner:
    """Decodes one token per row. Two verbs, as the model has: start() and step()."""

    def __init__(self, model: CausalModel, ops: DecodeOps | None = None) -> None:
        self.ops = ops = TorchOps() if ops is None else ops
        self.decode_layers = DecodeLayers(model, ops)
        self.model = model
        self.design = model.design

    def start(
        self,
        prompt: Tensor,
        *,
        segments: Tensor | None = None,
        memory: Memory | None = None,
        capacity: int | None = None,
    ) -> tuple[Tensor, StaticKV]:
        """Prefill prompts, (B, T), that all end in the last column → next-token logits and a KV cache.

        It holds `capacity` tokens; None: it grows.
        """
        logits, state = self.model.start(prompt, segments=segments, memory=memory)
        starts = None if segments is None else first_real(segments != 0)
        source_bias = None if memory is None else padding_bias(memory.segments, self.dtype)
        size = prompt.shape[1] + GROW_BY if capacity is None else capacity
        static_kv = self.allocate(
            len(prompt),
            size,
            starts=starts,
            memory=memory,
            source_bias=source_bias,
            growable=capacity is None,
        )
        static_kv.fill(state)
        return logits, static_kv

    @property
    def dtype(self) -> torch.dtype:
        return self.model.token.weight.dtype

    def allocate(self, rows: int, capacity: int, **fields: Any) -> StaticKV:
        """An empty KV cache of `rows` rows and `capacity` columns."""
        self.decode_layers.prepare_tables(capacity)
        config, table = self.design.attention, self.model.token.weight
        return StaticKV.allocate(
            table.new_zeros(
                2 * len(self.decode_layers.layers), capacity, rows, config.kv_heads, config.head_dim
            ),
            **fields,
        )

    def step(self, tokens: Tensor, static_kv: StaticKV) -> Tensor:
        """(R, 1) the next token of each row → (R, V) logits"""
        if static_kv.length >= static_kv.buffer.shape[1] and static_kv.growable:
            static_kv.reallocate(
                static_kv.buffer[:, : static_kv.length],
                static_kv.length + max(GROW_BY, static_kv.length // 2),
            )
            self.decode_layers.prepare_tables(static_kv.buffer.shape[1])
        if static_kv.length >= static_kv.buffer.shape[1]:
            raise ValueError(
                f"the buffers hold {static_kv.length} tokens and are full: ask for a larger capacity"
            )
        max_positions = self.design.max_positions  # finished rows may go beyond it beside others that go on
        min_position = (
            static_kv.length if static_kv.starts is None else static_kv.length - int(static_kv.starts.max())
        )
        if max_positions is not None and min_position >= max_positions:
            raise ValueError(
                f"position {min_position} is beyond the {max_positions} that this model has learned: "
                "shorten the text"
            )
        if tokens.device.type == "cpu":
            check_tokens("tokens", tokens, self.design.vocab)
        logits = self.forward(tokens[:, 0], static_kv)
        static_kv.length += 1
        static_kv.position += 1
        return logits

    def forward(self, tokens: Tensor, static_kv: StaticKV) -> Tensor:
        """(R,) tokens → (R, V) logits, by tensors alone."""
        by_position = lambda table: self._at_position(table, static_kv)
        context = self.decode_context(static_kv, by_position)
        source_kv = None if static_kv.memory is None else static_kv.memory.layers
        return self.decode_layers.forward(tokens, by_position, context, static_kv.layers, source_kv)

    def decode_context(self, static_kv: StaticKV, by_position: ByPosition) -> DecodeContext:
        """What all layers of this step share."""
        layout = StaticLayout(
            static_kv.length, static_kv.starts, static_kv.beam_rows, source_bias=static_kv.source_bias
        )
        if isinstance(self.ops, TorchOps):
            make_bias = self._static_attention_bias if self.ops.static_shapes else self._attention_bias
            layout.biases = {
                window: make_bias(window, static_kv) for window in set(self.decode_layers.windows)
            }
        return self.decode_layers.context(static_kv.position, layout, by_position)

    def _attention_bias(self, window: int | None, static_kv: StaticKV) -> Tensor | None:
        """Added to the scores of the filled columns, (R · Hk, G or 1, K); None: nothing."""
        stop = static_kv.length + 1
        begin = 0 if window is None else max(0, stop - window)
        kv_heads = static_kv.buffer.shape[3]
        bias = None
        if len(self.decode_layers.relative_bias):
            bias = (
                self.decode_layers.relative_bias[:, : stop - begin]
                .flip(-1)
                .view(1, kv_heads, -1, stop - begin)
            )
        if static_kv.starts is not None:
            outside = (
                torch.arange(begin, stop, device=static_kv.position.device)
                < static_kv.starts[:, None, None, None]
            )
            bias = torch.zeros(outside.shape, dtype=static_kv.buffer.dtype) if bias is None else bias
            bias = bias.masked_fill(outside, float("-inf"))
        return (
            None if bias is None else bias.expand(static_kv.buffer.shape[2], kv_heads, -1, -1).flatten(0, 1)
        )

    def _static_attention_bias(self, window: int | None, static_kv: StaticKV) -> Tensor:
        """The same for whole buffers, (capacity, R or 1, Hk or 1, G or 1)."""
        kv_heads, dtype = static_kv.buffer.shape[3], static_kv.buffer.dtype
        column = torch.arange(static_kv.buffer.shape[1], device=static_kv.position.device)[:, None]
        outside = column > static_kv.position
        if window is not None:
            outside = outside | (column <= static_kv.position - window)
        if static_kv.starts is not None:
            outside = outside | (column < static_kv.starts)
        bias = torch.zeros((), dtype=dtype, device=outside.device)
        if len(self.decode_layers.relative_bias):
            bias = self.decode_layers.relative_bias.t()[
                (static_kv.position - column).clamp(min=0)[:, 0]
            ].view(len(column), 1, kv_heads, -1)
        return bias.masked_fill(outside[..., None, None], float("-inf"))

    def _at_position(self, table: Tensor, static_kv: StaticKV) -> Tensor:
        """(R or 1, …) entries of a table at the current positions"""
        if static_kv.starts is not None:
            return F.embedding(static_kv.position - static_kv.starts, table)
        if isinstance(self.ops, TorchOps) and not self.ops.static_shapes:
            return table[static_kv.length : static_kv.length + 1]
        return F.embedding(static_kv.position, table)
