"""The texts that were read: a few are kept under a key, the oldest are forgotten.

A text is read as far as someone looks: a map of the first layer does not wait for the thirty behind it.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keepleft.models.by_layer import by_layer
from keepleft.models.design import Design
from keepleft.models.watch import attentions
from keepleft.nn.position import RelativeBias
from keepleft.serving.explorer.given import TOKENS, ForgottenError, short
from keepleft.serving.explorer.kept import Layer, keeping
from keepleft.serving.explorer.rollout import Rollout, rolled

KEPT = 4            # texts
BYTES = 1 << 29     # of queries and keys, all texts together
BIAS = 1 << 30      # of the biases that T5 holds while it reads


class Pass:
    """One pass of a model, as far as anyone asked."""

    def __init__(self, model: Any, given: Sequence[Tensor]) -> None:
        self.model, self.stamp = model, stamp(model)
        self.found: dict[str, Layer] = {}
        self.names = list(attentions(model))
        self.going: Iterator[str] | None = by_layer(model, *given)
        if isinstance(model.design.position, RelativeBias):  # what it holds while it reads is too large to be kept
            for name in self.names:
                self.layer(name)

    def layer(self, name: str) -> Layer:
        """By names such as "decoder.3.cross"."""
        while name not in self.found:
            if self.going is None or stamp(self.model) != self.stamp:
                raise ForgottenError("the weights have changed since this text was read: ask for its attention again")
            self.found |= keeping(self.model, partial(next, self.going))
            if len(self.found) == len(self.names):
                self.going = None
        return self.found[name]


class Layers(Sequence[Layer]):
    """The layers of one attention."""

    def __init__(self, reading: Pass, names: list[str]) -> None:
        self.reading, self.names = reading, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, n: Any) -> Any:
        some = self.names[n]
        return self.reading.layer(some) if isinstance(some, str) else [self.reading.layer(name) for name in some]


@dataclass
class Read:
    """One text, and a source where there is one, with all that was attended to."""

    key: str
    text: list[int]
    source: list[int]
    attentions: dict[str, Layers]          # "decoder.self" → its layers
    size: int                              # bytes of their queries and keys, at most, once all are there
    rollout: Rollout | None = None         # the last that was asked for

    @property
    def bytes(self) -> int:
        return self.size + (0 if self.rollout is None else self.rollout.bytes)

    def rolled(self, name: str, layer: int) -> Rollout:
        """All layers up to this one; one layer more costs one product more."""
        self.rollout = rolled(name, self.attentions[name], layer, self.rollout)
        return self.rollout


class Texts:
    """Reads texts and keeps a few."""

    def __init__(self, model: Any, most: int = KEPT, room: int = BYTES) -> None:
        self.model, self.most, self.room = model, most, room
        self.kept: OrderedDict[str, Read] = OrderedDict()

    @property
    def longest(self) -> int:
        """Tokens of one text that there is room for."""
        return min(TOKENS, self.model.design.longest or TOKENS, longest(self.model.design, self._width, self.room))

    @property
    def _width(self) -> int:
        return next(self.model.parameters()).element_size()

    def read(self, text: Sequence[int], source: Sequence[int]) -> Read:
        """A pass over the text; none where the same was read before by the same weights."""
        key = hashlib.sha256(repr((list(text), list(source), stamp(self.model))).encode()).hexdigest()[:16]
        if key not in self.kept:
            self.kept[key] = self._read(key, list(text), list(source))
        self.kept.move_to_end(key)
        while len(self.kept) > self.most or (len(self.kept) > 1 and sum(one.bytes for one in self.kept.values()) > self.room):
            self.kept.popitem(last=False)
        return self.kept[key]

    def __getitem__(self, key: str) -> Read:
        if key not in self.kept:
            raise ForgottenError(f"the text {short(key)} is no longer kept: ask for its attention again")
        self.kept.move_to_end(key)
        return self.kept[key]

    def _read(self, key: str, text: list[int], source: list[int]) -> Read:
        device = next(self.model.parameters()).device
        given = [torch.tensor([side], device=device) for side in (source, text) if side]
        reading = Pass(self.model, given)
        names: dict[str, list[str]] = {}
        for name in reading.names:
            side, _, kind = name.split(".")
            names.setdefault(f"{side}.{kind}", []).append(name)
        order = [name for name in ("encoder.self", "decoder.self", "decoder.cross") if name in names]
        size = max(len(text), len(source)) * each_token(self.model.design, self._width)
        return Read(key, text, source, {name: Layers(reading, names[name]) for name in order}, size)


def stamp(model: Any) -> int:
    """Changes whenever weights are changed in place, as training does."""
    return sum(0 if p.is_inference() else p._version for p in model.parameters())


def each_token(design: Design, width: int) -> int:
    """Bytes of the queries and keys of one token in all layers, numbers of `width` bytes."""
    own = design.heads + (design.kv_heads or design.heads)
    stacks = [stack.layers for stack in (design.encoder, design.decoder) if stack is not None]
    across = stacks[1] if len(stacks) == 2 else 0  # of the cross-attention, queries of one side and keys of the other
    return (sum(stacks) + across) * own * design.head_width * width


def longest(design: Design, width: int, room: int) -> int:
    """Tokens whose queries and keys fit into the room; and whose biases are not too many."""
    out = room // each_token(design, width)
    if isinstance(design.position, RelativeBias):
        out = min(out, math.isqrt(BIAS // (2 * 4 * design.heads)))
    return max(1, out)
