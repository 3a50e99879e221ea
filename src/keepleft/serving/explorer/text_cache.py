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

from keepleft.models.design import Design
from keepleft.models.iterate_layers import iterate_layers
from keepleft.models.watch import attention_modules
from keepleft.nn.position import RelativeBias
from keepleft.serving.explorer.attention_store import StoredAttention, store_attentions
from keepleft.serving.explorer.params import MAX_TOKENS, ExpiredError, shorten
from keepleft.serving.explorer.rollout import Rollout, attention_rollout

MAX_TEXTS = 4  # texts
MAX_BYTES = 1 << 29  # of queries and keys, all texts together
MAX_BIAS_BYTES = 1 << 30  # of the biases that T5 holds while it reads


class LayerwisePass:
    """One pass of a model, as far as anyone asked."""

    def __init__(self, model: Any, inputs: Sequence[Tensor]) -> None:
        self.model = model
        self.weights_version = weights_version(model)
        self.layers: dict[str, StoredAttention] = {}
        self.names = list(attention_modules(model))
        self.iterator: Iterator[str] | None = iterate_layers(model, *inputs)
        if isinstance(
            model.design.position, RelativeBias
        ):  # what it holds while it reads is too large to be kept
            for name in self.names:
                self.layer(name)

    def layer(self, name: str) -> StoredAttention:
        """By names such as "decoder.3.cross"."""
        while name not in self.layers:
            if self.iterator is None or weights_version(self.model) != self.weights_version:
                raise ExpiredError(
                    "the weights have changed since this text was read: ask for its attention again"
                )
            self.layers |= store_attentions(self.model, partial(next, self.iterator))
            if len(self.layers) == len(self.names):
                self.iterator = None
        return self.layers[name]


class LazyLayers(Sequence[StoredAttention]):
    """The layers of one attention."""

    def __init__(self, forward_pass: LayerwisePass, names: list[str]) -> None:
        self.forward_pass = forward_pass
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, n: Any) -> Any:
        selected = self.names[n]
        return (
            self.forward_pass.layer(selected)
            if isinstance(selected, str)
            else [self.forward_pass.layer(name) for name in selected]
        )


@dataclass
class ReadText:
    """One text, and a source where there is one, with all that was attended to."""

    key: str
    tokens: list[int]
    source_tokens: list[int]
    attentions: dict[str, LazyLayers]  # "decoder.self" → its layers
    attention_bytes: int  # bytes of their queries and keys, at most, once all are there
    rollout: Rollout | None = None  # the last that was asked for

    @property
    def bytes(self) -> int:
        return self.attention_bytes + (0 if self.rollout is None else self.rollout.bytes)

    def compute_rollout(self, name: str, layer: int) -> Rollout:
        """All layers up to this one; one layer more costs one product more."""
        self.rollout = attention_rollout(name, self.attentions[name], layer, self.rollout)
        return self.rollout


class TextCache:
    """Reads texts and keeps a few."""

    def __init__(self, model: Any, max_texts: int = MAX_TEXTS, max_bytes: int = MAX_BYTES) -> None:
        self.model = model
        self.max_texts = max_texts
        self.max_bytes = max_bytes
        self.entries: OrderedDict[str, ReadText] = OrderedDict()

    @property
    def max_tokens(self) -> int:
        """Tokens of one text that there is room for."""
        return min(
            MAX_TOKENS,
            self.model.design.max_positions or MAX_TOKENS,
            max_tokens(self.model.design, self._element_size, self.max_bytes),
        )

    @property
    def _element_size(self) -> int:
        return next(self.model.parameters()).element_size()

    def read(self, tokens: Sequence[int], source_tokens: Sequence[int]) -> ReadText:
        """A pass over the text; none where the same was read before by the same weights."""
        key = hashlib.sha256(
            repr((list(tokens), list(source_tokens), weights_version(self.model))).encode()
        ).hexdigest()[:16]
        if key not in self.entries:
            self.entries[key] = self._read(key, list(tokens), list(source_tokens))
        self.entries.move_to_end(key)
        while len(self.entries) > self.max_texts or (
            len(self.entries) > 1 and sum(entry.bytes for entry in self.entries.values()) > self.max_bytes
        ):
            self.entries.popitem(last=False)
        return self.entries[key]

    def __getitem__(self, key: str) -> ReadText:
        if key not in self.entries:
            raise ExpiredError(f"the text {shorten(key)} is no longer kept: ask for its attention again")
        self.entries.move_to_end(key)
        return self.entries[key]

    def _read(self, key: str, tokens: list[int], source_tokens: list[int]) -> ReadText:
        device = next(self.model.parameters()).device
        inputs = [torch.tensor([side], device=device) for side in (source_tokens, tokens) if side]
        forward_pass = LayerwisePass(self.model, inputs)
        names: dict[str, list[str]] = {}
        for name in forward_pass.names:
            side, _, kind = name.split(".")
            names.setdefault(f"{side}.{kind}", []).append(name)
        order = [name for name in ("encoder.self", "decoder.self", "decoder.cross") if name in names]
        attention_bytes = max(len(tokens), len(source_tokens)) * bytes_per_token(
            self.model.design, self._element_size
        )
        return ReadText(
            key,
            tokens,
            source_tokens,
            {name: LazyLayers(forward_pass, names[name]) for name in order},
            attention_bytes,
        )


def weights_version(model: Any) -> int:
    """Changes whenever weights are changed in place, as training does."""
    return sum(0 if p.is_inference() else p._version for p in model.parameters())


def bytes_per_token(design: Design, element_size: int) -> int:
    """Bytes of the queries and keys of one token in all layers, numbers of `element_size` bytes."""
    # cross-attention has the queries of one side and the keys of the other
    cross_attention = None if design.encoder is None else design.decoder
    numbers = 0
    for stack in filter(None, (design.encoder, design.decoder, cross_attention)):
        config = design.stack_attention(stack)
        numbers += stack.layers * (config.heads + config.kv_heads) * config.head_dim
    return numbers * element_size


def max_tokens(design: Design, element_size: int, max_bytes: int) -> int:
    """Tokens whose queries and keys fit into the room; and whose biases are not too many."""
    tokens = max_bytes // bytes_per_token(design, element_size)
    if isinstance(design.position, RelativeBias):
        stacks = filter(None, (design.encoder, design.decoder))
        heads = max(design.stack_attention(stack).heads for stack in stacks)
        tokens = min(tokens, math.isqrt(MAX_BIAS_BYTES // (2 * 4 * heads)))
    return max(1, tokens)
