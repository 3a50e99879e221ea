"""A decoder's layers for one token in each row, as bare functions over tensors: what steady and paged steps share.

Where keys and values lie, and what a row may look at, is the business of whoever takes the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.attention.masks import is_causal_window, window_size
from keepleft.models.heads import Scores
from keepleft.models.pack import PackedScores
from keepleft.models.wholes import Writer
from keepleft.nn.attention import Attention
from keepleft.nn.lone import Tools, Turn
from keepleft.nn.packed import Fixed
from keepleft.nn.position import Learned, RelativeBias, Rotary, Sinusoidal, rotation, waves

At = Callable[[Tensor], Tensor]       # a table by position → (R or 1, …) of each row's own
Pairs = Sequence[tuple[Tensor, Tensor]]  # of each layer: where its keys and values lie


def why_not(model: Any) -> str | None:
    """What keeps a model from steady steps, in words; None where nothing does."""
    if not isinstance(model, Writer):
        return "it is not a decoder of ours"
    if not all(map(is_causal_window, model.decoder.masks)):
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


class Lean:
    """The layers, made once for as long as the weights lie where they lie."""

    def __init__(self, model: Writer, tools: Tools) -> None:
        if (reason := why_not(model)) is not None:
            raise ValueError(f"the model cannot take steady steps, {reason}: take its own start() and step()")
        self.model, self.design, self.tools = model, model.design, tools
        self.windows = tuple(map(window_size, model.decoder.masks))
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

    def run(self, tokens: Tensor, at: At, here: Any, pairs: Pairs, sources: Pairs | None = None,
            across_sight: Any = None) -> Tensor:
        """(R,) → (R, V), by tensors alone. `here` and `across_sight` are what the tools' two attentions want to know."""
        x = self.embedded(tokens, at)
        pre = self.design.norm_first
        for n, (enter, look, leave, across, widen, narrow) in enumerate(self.layers):
            stream, even, qkv = enter(x)
            found = look(qkv, *pairs[n], here)
            x = leave(stream if pre else even, found)
            if sources is not None:
                enter, look, leave = across
                stream, even, q = enter(x)
                x = leave(stream if pre else even, look(q, *sources[n], across_sight))
            stream, even, wide = widen(x)
            x = narrow(stream if pre else even, wide)
        for norm in self.between:
            x = norm(x)[1]
        return self.scores(x)[2]

    def embedded(self, tokens: Tensor, at: At) -> Tensor:
        """(R,) → (R, dim)"""
        model = self.model
        x = F.embedding(tokens, model.token.weight)
        if self.design.scale_embedding:
            x = x * self.design.dim ** 0.5
        if len(self.places):
            x = x + at(self.places)
        return model.embed.norm(x) if self.design.norm_embedding else x

    def turn(self, at: At) -> Turn | None:
        """How each row's queries and keys are rotated; None: not at all."""
        return Turn(*at(self.turns)[:, None].chunk(2, -1)) if len(self.turns) else None

    def ready(self, capacity: int) -> None:
        """Tables by position for so many tokens. Those that are learned are read anew each time: weights may have changed."""
        learned = isinstance(self.design.position, Learned | RelativeBias) or self.design.kinds > 0
        have = max(len(self.places), len(self.turns), self.near.shape[-1])
        if have >= capacity and not learned:
            return
        positions = torch.arange(max(have, rounded(capacity)), device=self.model.token.weight.device)
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


def rounded(capacity: int) -> int:
    """To a power of two: so that tables are seldom made again."""
    return 1 << max(6, (capacity - 1).bit_length())
