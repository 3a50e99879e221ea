"""The texts that were read: a few are kept under a key, the oldest are forgotten."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keepleft.models.design import Design
from keepleft.nn.position import RelativeBias
from keepleft.serving.explorer.given import TOKENS, ForgottenError, short
from keepleft.serving.explorer.kept import Layer, keeping
from keepleft.serving.explorer.rollout import Rollout, rolled

KEPT = 4            # texts
BYTES = 1 << 29     # of queries and keys, all texts together
BIAS = 1 << 30      # of the biases that T5 holds while it reads


@dataclass
class Read:
    """One text, and a source where there is one, with all that was attended to."""

    key: str
    text: list[int]
    source: list[int]
    attentions: dict[str, list[Layer]]     # "decoder.self" → its layers
    rollout: Rollout | None = None         # the last that was asked for

    @property
    def bytes(self) -> int:
        own = sum(layer.bytes for layers in self.attentions.values() for layer in layers)
        return own + (0 if self.rollout is None else self.rollout.bytes)

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
        width = next(self.model.parameters()).element_size()
        return min(TOKENS, self.model.design.longest or TOKENS, longest(self.model.design, width, self.room))

    def read(self, text: Sequence[int], source: Sequence[int]) -> Read:
        """One pass over the text; none where the same was read before by the same weights."""
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
        found = keeping(self.model, lambda: self.model.states(*given))
        attentions: dict[str, list[Layer]] = {}
        for name, layer in found.items():
            side, _, kind = name.split(".")
            attentions.setdefault(f"{side}.{kind}", []).append(layer)
        order = [name for name in ("encoder.self", "decoder.self", "decoder.cross") if name in attentions]
        return Read(key, text, source, {name: attentions[name] for name in order})


def stamp(model: Any) -> int:
    """Changes whenever weights are changed in place, as training does."""
    return sum(0 if p.is_inference() else p._version for p in model.parameters())


def longest(design: Design, width: int, room: int) -> int:
    """Tokens whose queries and keys, numbers of `width` bytes, fit into the room; and whose biases are not too many."""
    own = design.heads + (design.kv_heads or design.heads)
    stacks = [stack for stack in (design.encoder, design.decoder) if stack is not None]
    each = sum(stack.layers * own for stack in stacks)
    if len(stacks) == 2:
        each += stacks[1].layers * own  # of the cross-attention, queries of one side and keys of the other
    out = room // (each * design.head_width * width)
    if isinstance(design.position, RelativeBias):
        out = min(out, math.isqrt(BIAS // (2 * 4 * design.heads)))
    return max(1, out)
