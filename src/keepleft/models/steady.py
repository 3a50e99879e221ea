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

from keepleft.attention.masks import Mask, causal, window
from keepleft.attention.memory import Memory
from keepleft.models.embed import check
from keepleft.models.heads import Scores, first
from keepleft.models.pack import PackedScores
from keepleft.models.state import State
from keepleft.models.wholes import Writer
from keepleft.nn.attention import Attention
from keepleft.nn.lone import Here, Plain, Tools, Turn
from keepleft.nn.packed import Fixed
from keepleft.nn.position import Learned, RelativeBias, Rotary, Sinusoidal, rotation, waves

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


def why_not(model: Any) -> str | None:
    """What keeps a model from steady steps, in words; None where nothing does."""
    if not isinstance(model, Writer):
        return "it is not a decoder of ours"
    if not all(mask == causal or _window(mask) is not None for mask in model.decoder.masks):
        return f"its mask is {' / '.join(map(str, model.decoder.masks))}"
    if not isinstance(model.head, Scores | PackedScores):
        return "it has no head over a vocabulary"
    for name, part in model.decoder.named_modules():
        if isinstance(part, Attention) and part.watcher is not None:
            return "someone watches its attention"
        product = name.endswith((".qkv", ".q", ".out", ".up", ".down"))
        if product and type(part) is not nn.Linear and not isinstance(part, Fixed):
            return f"{name} is a {type(part).__name__}"
    return None


class Steady:
    """A model's steps of one token for each row. Two verbs, as the model has: start() and step()."""

    def __init__(self, model: Writer, tools: Tools | None = None) -> None:
        if (reason := why_not(model)) is not None:
            raise ValueError(f"the model cannot take steady steps, {reason}: take its own start() and step()")
        self.model, self.design = model, model.design
        self.tools = tools = Plain() if tools is None else tools
        self.windows = tuple(_window(mask) for mask in model.decoder.masks)
        self.layers = [self._layer(n, layer) for n, layer in enumerate(model.decoder.layers)]
        final = model.decoder.norm if not isinstance(model.decoder.norm, nn.Identity) else None
        last: Any = model.decoder.layers[-1]
        if not self.design.norm_first:  # the norm behind a layer is the one before the next
            self.final = [last.norm_feed] if final is None else [last.norm_feed, final]
        else:
            self.final = [] if final is None else [final]
        self.scores = tools.enter(self.final[-1] if self.final else None, _product(model.head, model.token))
        self.between = [tools.enter(norm, nn.Identity()) for norm in self.final[:-1]]
        self.places = self.turns = self.near = torch.empty(0)

    def _layer(self, n: int, layer: Any) -> tuple[Any, ...]:
        tools, shape = self.tools, layer.self.shape
        norms = [layer.norm_self, *([layer.norm_cross] if self.design.encoder else []), layer.norm_feed]
        if not self.design.norm_first:
            before: Any = self.model.decoder.layers[n - 1] if n else None
            norms = [before.norm_feed if n else None, *norms[:-1]]
        inside = [tools.enter(norms[0], layer.self.qkv), tools.look(shape, self.windows[n % len(self.windows)]),
                  tools.leave(layer.self.out)]
        across = None
        if self.design.encoder:
            across = (tools.enter(norms[1], layer.cross.q), tools.across(layer.cross.shape), tools.leave(layer.cross.out))
        return *inside, across, tools.enter(norms[-1], layer.feed.up, layer.feed), tools.leave(layer.feed.down)

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
        self.ready(capacity)
        shape, table = self.design.attention, self.model.token.weight
        return Track.blank(table.new_zeros(2 * len(self.layers), capacity, rows, shape.kv_heads, shape.width), **given)

    def step(self, tokens: Tensor, track: Track) -> Tensor:
        """(R, 1) the next token of each row → (R, V)"""
        if track.length >= track.whole.shape[1] and track.grows:
            track.moved(track.whole[:, :track.length], track.length + max(ROOM, track.length // 2))
            self.ready(track.whole.shape[1])
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
        here = self.here(track)
        x = self.embedded(tokens, track)
        pre, memory = self.design.norm_first, track.memory
        for n, (enter, look, leave, across, widen, narrow) in enumerate(self.layers):
            stream, even, qkv = enter(x)
            found = look(qkv, *track.pairs[n], here)
            x = leave(stream if pre else even, found)
            if memory is not None:
                enter, look, leave = across
                stream, even, q = enter(x)
                x = leave(stream if pre else even, look(q, *memory.pairs[n], track.bias))
            stream, even, wide = widen(x)
            x = narrow(stream if pre else even, wide)
        for norm in self.between:
            x = norm(x)[1]
        return self.scores(x)[2]

    def embedded(self, tokens: Tensor, track: Track) -> Tensor:
        """(R,) → (R, dim)"""
        model = self.model
        x = F.embedding(tokens, model.token.weight)
        if self.design.scale_embedding:
            x = x * self.design.dim ** 0.5
        if len(self.places):
            x = x + self._at(self.places, track)
        return model.embed.norm(x) if self.design.norm_embedding else x

    def here(self, track: Track) -> Here:
        """What all layers share in this step."""
        turn = None
        if len(self.turns):
            turn = Turn(*self._at(self.turns, track)[:, None].chunk(2, -1))
        here = Here(track.length, track.now, turn, track.first, self.near if len(self.near) else None, track.parents)
        if isinstance(self.tools, Plain):
            bias = self._whole_bias if self.tools.whole else self._bias
            here.biases = {size: bias(size, track) for size in set(self.windows)}
        return here

    def _bias(self, size: int | None, track: Track) -> Tensor | None:
        """What is added to scores of the filled part, (R · Hk, G or 1, K); None: nothing."""
        stop = track.length + 1
        begin = 0 if size is None else max(0, stop - size)
        few = track.whole.shape[3]
        bias = None
        if len(self.near):
            bias = self.near[:, :stop - begin].flip(-1).view(1, few, -1, stop - begin)
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
        if len(self.near):
            bias = self.near.t()[(track.now - column).clamp(min=0)[:, 0]].view(len(column), 1, few, -1)
        return bias.masked_fill(outside[..., None, None], float("-inf"))

    def _at(self, table: Tensor, track: Track) -> Tensor:
        """(R or 1, …) of a table by position"""
        if track.first is not None:
            return F.embedding(track.now - track.first, table)
        if isinstance(self.tools, Plain) and not self.tools.whole:
            return table[track.length:track.length + 1]
        return F.embedding(track.now, table)

    def ready(self, capacity: int) -> None:
        """Tables by position for so many tokens. Those that are learned are read anew each time: weights may have changed."""
        learned = isinstance(self.design.position, Learned | RelativeBias) or self.design.kinds > 0
        have = max(len(self.places), len(self.turns), self.near.shape[-1])
        if have >= capacity and not learned:
            return
        positions = torch.arange(max(have, _rounded(capacity)), device=self.model.token.weight.device)
        with torch.no_grad():
            for name, table in self._tables(positions).items():
                if (old := getattr(self, name)).shape == table.shape:
                    old.copy_(table)  # in place: recordings point to it
                else:
                    setattr(self, name, table)

    def _tables(self, positions: Tensor) -> dict[str, Tensor]:
        design, embed, like = self.design, self.model.embed, self.model.token.weight
        out: dict[str, Tensor] = {}
        match design.position:
            case Sinusoidal():
                out["places"] = waves(positions, design.dim).to(like.dtype)
            case Learned():
                out["places"] = embed.position(positions.clamp(max=design.position.length - 1))
            case Rotary():
                out["turns"] = torch.cat(rotation(design.position, positions[None], design.head_width, like.dtype), -1)[0, 0]
            case _:
                near = self.model.decoder.nearness
                out["near"] = near(positions[-1:][None], positions[None])[0, :, 0].flip(-1).contiguous()
        if design.kinds:
            kind = embed.kind.weight[:1]
            out["places"] = out["places"] + kind if "places" in out else kind.repeat(len(positions), 1)
        return out


class Matrix(nn.Module):
    """The product of a head, whose matrix may belong to another."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: float) -> None:
        super().__init__()
        self.given, self.scale = (weight, bias), scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x if self.scale == 1.0 else x * self.scale, *self.given)


class Scaled(nn.Module):
    """A packed product of a head, with the scale before it."""

    def __init__(self, product: nn.Module, scale: float) -> None:
        super().__init__()
        self.product, self.scale = product, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x * self.scale)  # type: ignore[no-any-return]


def _product(head: Any, table: nn.Embedding) -> nn.Module:
    if not isinstance(head, PackedScores):
        weight, bias = head.matrix(table)
        return Matrix(weight, bias, head.scale)
    return head.product if head.head.scale == 1.0 else Scaled(head.product, head.head.scale)  # type: ignore[arg-type]


def _window(mask: Mask) -> int | None:
    """How far back a causal mask with a window looks."""
    parts = getattr(mask, "parts", ())
    sizes = [part.size for part in parts if type(part) is type(window(1))]
    return sizes[0] if len(parts) == 2 and causal in parts and sizes else None


def _rounded(capacity: int) -> int:
    """To a power of two: so that tables are seldom made again."""
    return 1 << max(6, (capacity - 1).bit_length())
