"""The same step with less around it: one token for each row, over buffers that never move.

The general step (models/wholes.py) serves any mask, any cache and any number of tokens, and works out anew each time what may
be looked at. Nearly all decoding is simpler: causal masks, perhaps with a window, one token for each row, texts that all end
in the last column. `Steady` does just that, with tensors alone, so that it can also be compiled, or recorded on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.attention.memory import Memory
from keepleft.models.embed import check
from keepleft.models.heads import first
from keepleft.models.lean import At, Lean
from keepleft.models.state import State
from keepleft.models.wholes import Writer
from keepleft.nn.lone import Here, Plain, Tools

ROOM = 64  # tokens that are made room for at least


@dataclass
class Track:
    """What a steady step keeps between tokens."""

    pairs: list[tuple[Tensor, Tensor]]  # of each layer: keys and values (capacity, R, Hk, D), parts of `whole`
    whole: Tensor                       # (2 · layers, capacity, R, Hk, D)
    length: int                         # tokens so far
    now: Tensor                         # (1,) the same, on the device
    first: Tensor | None = None         # (R,) the column where each row's text begins; None: 0
    memory: Memory | None = None
    bias: Tensor | None = None          # (B, S) 0 or -∞ by what is text of the sources; None: all is
    parents: Tensor | None = None       # (capacity, R) which row of the buffers holds a column of a row; None: itself
    grows: bool = False                 # more room is made where it is needed

    @classmethod
    def blank(cls, whole: Tensor, **given: Any) -> Track:
        pairs = list(zip(whole[::2].unbind(), whole[1::2].unbind(), strict=True))
        return cls(pairs, whole, 0, torch.zeros(1, dtype=torch.long, device=whole.device), **given)

    def fill(self, state: State, rows: Tensor | None = None) -> None:
        """What a model remembers of prompts; some of them, or some several times."""
        for n, pair in enumerate(self.pairs):
            cache: Any = state.caches[n % len(state.caches)]
            self.length = cache.length
            for mine, given in zip(pair, cache.pairs[n], strict=True):
                there = given[:, :, :self.length] if rows is None else given[:, :, :self.length][rows]
                mine[:self.length] = there.permute(2, 0, 1, 3)
        self.now.fill_(self.length)

    def keep(self, rows: Tensor) -> None:
        """Reorder, drop or repeat rows; where their number stays, only those that change are moved."""
        self.first = None if self.first is None else self.first[rows]
        if self.memory is not None:
            before = self.memory.segments
            self.memory.keep(rows)
            if self.memory.segments is not before:
                self.bias = hidden(self.memory.segments, self.whole.dtype)
        filled = self.whole[:, :self.length]
        if len(rows) != self.whole.shape[2]:
            self.moved(filled.index_select(2, rows), self.whole.shape[1])
        elif len(moved := (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]):
            filled.index_copy_(2, moved, filled.index_select(2, rows[moved]))

    def moved(self, filled: Tensor, capacity: int) -> None:
        """Into other buffers, of so many tokens."""
        other = Track.blank(filled.new_zeros(len(filled), capacity, *filled.shape[2:]))
        other.whole[:, :self.length] = filled
        self.whole, self.pairs = other.whole, other.pairs


def stamp(model: nn.Module) -> tuple[int, ...]:
    """Where the weights lie: another one where they were replaced, so that what was made of them must be made again."""
    return tuple(weight.data_ptr() for weight in model.parameters())


_made: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], Steady]] = WeakKeyDictionary()


def steady(model: Writer) -> Steady:
    """A model's steady steps, made once for as long as its weights lie where they lie."""
    where = stamp(model)
    known = _made.get(model)
    if known is None or known[0] != where:
        known = _made[model] = where, Steady(model)
    return known[1]


def hidden(segments: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(B, S) 0 where there is text, -∞ where there is none."""
    return None if segments is None else torch.zeros_like(segments, dtype=dtype).masked_fill(segments == 0, float("-inf"))


class Steady:
    """A model's steps of one token for each row. Two verbs, as the model has: start() and step()."""

    def __init__(self, model: Writer, tools: Tools | None = None) -> None:
        self.tools = tools = Plain() if tools is None else tools
        self.lean = Lean(model, tools)
        self.model, self.design = model, model.design

    def start(self, prompt: Tensor, *, segments: Tensor | None = None, memory: Memory | None = None,
              capacity: int | None = None) -> tuple[Tensor, Track]:
        """Read prompts, (B, T), that all end in the last column: scores of what follows, and a track.

        It holds `capacity` tokens; None: it grows.
        """
        scores, state = self.model.start(prompt, segments=segments, memory=memory)
        begin = None if segments is None else first(segments != 0)
        bias = None if memory is None else hidden(memory.segments, self.dtype)
        room = prompt.shape[1] + ROOM if capacity is None else capacity
        track = self.blank(len(prompt), room, first=begin, memory=memory, bias=bias, grows=capacity is None)
        track.fill(state)
        return scores, track

    @property
    def dtype(self) -> torch.dtype:
        return self.model.token.weight.dtype

    def blank(self, rows: int, capacity: int, **given: Any) -> Track:
        """An empty track for so many rows and tokens."""
        self.lean.ready(capacity)
        shape, table = self.design.attention, self.model.token.weight
        return Track.blank(table.new_zeros(2 * len(self.lean.layers), capacity, rows, shape.kv_heads, shape.width), **given)

    def step(self, tokens: Tensor, track: Track) -> Tensor:
        """(R, 1) the next token of each row → (R, V)"""
        if track.length >= track.whole.shape[1] and track.grows:
            track.moved(track.whole[:, :track.length], track.length + max(ROOM, track.length // 2))
            self.lean.ready(track.whole.shape[1])
        if track.length >= track.whole.shape[1]:
            raise ValueError(f"the buffers hold {track.length} tokens and are full: ask for a larger capacity")
        longest = self.design.longest  # rows that are done may go beyond it beside others that are not
        least = track.length if track.first is None else track.length - int(track.first.max())
        if longest is not None and least >= longest:
            raise ValueError(f"position {least} is beyond the {longest} that this model has learned: shorten the text")
        if tokens.device.type == "cpu":
            check("tokens", tokens, self.design.vocab)
        scores = self.run(tokens[:, 0], track)
        track.length += 1
        track.now += 1
        return scores

    def run(self, tokens: Tensor, track: Track) -> Tensor:
        """(R,) → (R, V), by tensors alone."""
        at = lambda table: self._at(table, track)
        return self.lean.run(tokens, at, self.here(track, at), track.pairs,
                             None if track.memory is None else track.memory.pairs, track.bias)

    def here(self, track: Track, at: At) -> Here:
        """What all layers share in this step."""
        near = self.lean.near
        here = Here(track.length, track.now, self.lean.turn(at), track.first, near if len(near) else None, track.parents)
        if isinstance(self.tools, Plain):
            bias = self._whole_bias if self.tools.whole else self._bias
            here.biases = {size: bias(size, track) for size in set(self.lean.windows)}
        return here

    def _bias(self, size: int | None, track: Track) -> Tensor | None:
        """What is added to scores of the filled part, (R · Hk, G or 1, K); None: nothing."""
        stop = track.length + 1
        begin = 0 if size is None else max(0, stop - size)
        few = track.whole.shape[3]
        bias = None
        if len(self.lean.near):
            bias = self.lean.near[:, :stop - begin].flip(-1).view(1, few, -1, stop - begin)
        if track.first is not None:
            outside = torch.arange(begin, stop, device=track.now.device) < track.first[:, None, None, None]
            bias = torch.zeros(outside.shape, dtype=track.whole.dtype) if bias is None else bias
            bias = bias.masked_fill(outside, float("-inf"))
        return None if bias is None else bias.expand(track.whole.shape[2], few, -1, -1).flatten(0, 1)

    def _whole_bias(self, size: int | None, track: Track) -> Tensor:
        """The same for buffers as they are, (capacity, R or 1, Hk or 1, G or 1)."""
        few, dtype = track.whole.shape[3], track.whole.dtype
        column = torch.arange(track.whole.shape[1], device=track.now.device)[:, None]
        outside = column > track.now
        if size is not None:
            outside = outside | (column <= track.now - size)
        if track.first is not None:
            outside = outside | (column < track.first)
        bias = torch.zeros((), dtype=dtype, device=outside.device)
        if len(self.lean.near):
            bias = self.lean.near.t()[(track.now - column).clamp(min=0)[:, 0]].view(len(column), 1, few, -1)
        return bias.masked_fill(outside[..., None, None], float("-inf"))

    def _at(self, table: Tensor, track: Track) -> Tensor:
        """(R or 1, …) of a table by position"""
        if track.first is not None:
            return F.embedding(track.now - track.first, table)
        if isinstance(self.tools, Plain) and not self.tools.whole:
            return table[track.length:track.length + 1]
        return F.embedding(track.now, table)

