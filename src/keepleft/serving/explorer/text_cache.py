"""Cache of texts that the model has read, with their attention; the least recently used are evicted.

Tenants share nothing in it: the same text of two of them is read twice, and has two keys.

The forward pass runs only as far as needed: a map of the first layer does not wait for the thirty after it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_bytes
from typing import overload

import torch
from torch import Tensor

from keepleft.models.design import Design
from keepleft.models.transformer import CausalModel, Encoder, Model
from keepleft.models.watch import attention_modules, iterate_layers
from keepleft.nn.position import RelativeBias
from keepleft.serving.explorer.attention_store import StoredAttention, store_attentions
from keepleft.serving.explorer.params import MAX_TOKENS, ExpiredError, shorten
from keepleft.serving.explorer.rollout import Rollout, attention_rollout

MAX_TEXTS = 4  # of one tenant
MAX_TEXTS_OF_ALL = 32
MAX_BYTES = 1 << 29  # of the queries and keys of all texts
MAX_BIAS_BYTES = 1 << 30  # of T5's relative biases during the forward pass


class LayerwisePass:
    """A forward pass over one text that runs layer by layer, as far as it is needed."""

    def __init__(self, model: Encoder | CausalModel, inputs: Sequence[Tensor]) -> None:
        self.model = model
        self.weights_version = weights_version(model)
        self.layers: dict[str, StoredAttention] = {}
        self.names = list(attention_modules(model))
        self.iterator: Iterator[str] | None = iterate_layers(model, *inputs)
        if isinstance(model.design.position, RelativeBias):  # the biases are too large to keep: finish now
            for name in self.names:
                self.layer(name)

    def layer(self, name: str) -> StoredAttention:
        """One attention, as in "decoder.3.cross"; ExpiredError if the weights changed before it was run."""
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
    """The layers of one attention, each computed when it is accessed."""

    def __init__(self, forward_pass: LayerwisePass, names: list[str]) -> None:
        self.forward_pass = forward_pass
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> StoredAttention: ...
    @overload
    def __getitem__(self, index: slice) -> list[StoredAttention]: ...
    def __getitem__(self, index: int | slice) -> StoredAttention | list[StoredAttention]:
        if isinstance(index, slice):
            return [self.forward_pass.layer(name) for name in self.names[index]]
        return self.forward_pass.layer(self.names[index])


@dataclass
class ReadText:
    """A text, and the source of an encoder-decoder, with all their attentions."""

    key: str
    tenant: str
    tokens: list[int]
    source_tokens: list[int]
    attentions: dict[str, LazyLayers]  # "decoder.self" → its layers
    attention_bytes: int  # of their queries and keys, at most, once all layers have run
    rollout: Rollout | None = None  # the last one requested

    @property
    def bytes(self) -> int:
        return self.attention_bytes + (0 if self.rollout is None else self.rollout.bytes)

    def compute_rollout(self, name: str, layer: int) -> Rollout:
        """The rollout up to this layer; one layer more than last time costs one product."""
        self.rollout = attention_rollout(name, self.attentions[name], layer, self.rollout)
        return self.rollout


class TextCache:
    """Runs the model over texts and keeps the last few of each tenant, at most `max_bytes` of all."""

    def __init__(
        self, model: Encoder | CausalModel, max_texts: int = MAX_TEXTS, max_bytes: int = MAX_BYTES
    ) -> None:
        self.model = model
        self.max_texts = max_texts
        self.max_bytes = max_bytes
        self.salt = token_bytes(16)  # a key says nothing about the text, even to one who guesses it
        self.entries: OrderedDict[str, ReadText] = OrderedDict()  # the least recently used first

    @property
    def max_tokens(self) -> int:
        """The most tokens of one text."""
        return min(
            MAX_TOKENS,
            self.model.design.max_positions or MAX_TOKENS,
            max_tokens(self.model.design, self._element_size, self.max_bytes),
        )

    @property
    def _element_size(self) -> int:
        return next(self.model.parameters()).element_size()

    def read(self, tokens: Sequence[int], source_tokens: Sequence[int], tenant: str = "") -> ReadText:
        """Run the model over a text, unless it is cached for the same tenant and weights."""
        content = (tenant, list(tokens), list(source_tokens), weights_version(self.model))
        key = hashlib.sha256(self.salt + repr(content).encode()).hexdigest()[:32]
        if key not in self.entries:
            self.entries[key] = self._read(key, tenant, list(tokens), list(source_tokens))
        self.entries.move_to_end(key)
        self._evict(self.entries[key])
        return self.entries[key]

    def get(self, key: str, tenant: str = "") -> ReadText:
        """A text that the tenant has had read. Raises ExpiredError."""
        if key not in self.entries or self.entries[key].tenant != tenant:
            raise ExpiredError(f"the text {shorten(key)} is no longer kept: ask for its attention again")
        self.entries.move_to_end(key)
        return self.entries[key]

    def _evict(self, newest: ReadText) -> None:
        """Make room for this text: first among those of its tenant, last where another has only one."""
        while True:
            num_texts = Counter(entry.tenant for entry in self.entries.values())
            others = [entry for entry in self.entries.values() if entry is not newest]
            has_too_many = num_texts[newest.tenant] > self.max_texts
            is_full = (
                len(self.entries) > MAX_TEXTS_OF_ALL
                or sum(entry.bytes for entry in self.entries.values()) > self.max_bytes
            )
            if not others or not (has_too_many or is_full):
                return

            def rank(entry: ReadText, num_texts: Counter[str] = num_texts) -> int:
                return 2 if entry.tenant == newest.tenant else int(num_texts[entry.tenant] > 1)

            del self.entries[max(others, key=rank).key]  # of the highest rank, the least recently used

    def _read(self, key: str, tenant: str, tokens: list[int], source_tokens: list[int]) -> ReadText:
        device = next(self.model.parameters()).device
        inputs = [torch.tensor([side], device=device) for side in (source_tokens, tokens) if side]
        forward_pass = LayerwisePass(self.model, inputs)
        names: dict[str, list[str]] = {}
        for name in forward_pass.names:
            side, _, kind = name.split(".")
            names.setdefault(f"{side}.{kind}", []).append(name)
        order = ("encoder.self", "decoder.self", "decoder.cross")
        attentions: dict[str, LazyLayers] = {
            name: LazyLayers(forward_pass, names[name]) for name in order if name in names
        }
        num_tokens = max(len(tokens), len(source_tokens))
        attention_bytes = num_tokens * bytes_per_token(self.model.design, self._element_size)
        return ReadText(key, tenant, tokens, source_tokens, attentions, attention_bytes)


def weights_version(model: Model) -> int:
    """A number that changes whenever weights are updated in place, as training does."""
    return sum(0 if p.is_inference() else p._version for p in model.parameters())


def bytes_per_token(design: Design, element_size: int) -> int:
    """Bytes of one token's queries and keys in all layers."""
    # cross-attention has the queries of one side and the keys of the other
    cross_attention = design.decoder if design.is_encoder_decoder else None
    numbers = 0
    for stack in filter(None, (design.encoder, design.decoder, cross_attention)):
        config = design.stack_attention(stack)
        numbers += stack.layers * (config.heads + config.kv_heads) * config.head_dim
    return numbers * element_size


def max_tokens(design: Design, element_size: int, max_bytes: int) -> int:
    """Tokens whose queries and keys fit into `max_bytes`, and whose relative biases fit into theirs."""
    tokens = max_bytes // bytes_per_token(design, element_size)
    if isinstance(design.position, RelativeBias):
        stacks = filter(None, (design.encoder, design.decoder))
        heads = max(design.stack_attention(stack).heads for stack in stacks)
        tokens = min(tokens, math.isqrt(MAX_BIAS_BYTES // (2 * 4 * heads)))
    return max(1, tokens)
