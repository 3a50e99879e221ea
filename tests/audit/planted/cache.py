"""Steps from a cache that differ from one full pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from audit.planted.case import Planted, seeded
from audit.planted.parts import HEADS, VOCAB, WIDTH, apply_rotary, masked_softmax, sinusoidal_positions


def causal_mask(queries: int, keys: int, device=None):
    """(queries, keys): which keys the last positions may attend to."""
    at = torch.arange(keys, device=device)
    return at[None, :] <= at[keys - queries :, None]


class Attention(nn.Module):
    """Causal attention with a growing cache (k, v); forward returns (out, cache)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache=None):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = self.placed(q, k, 0 if cache is None else cache[0].shape[2])
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = self.mix(q, k, v, cache is None)
        return self.out(y.transpose(1, 2).reshape(rows, length, width)), self.kept(k, v, length)

    def placed(self, q, k, start):
        return q, k

    def mix(self, q, k, v, first):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=causal_mask(q.shape[2], k.shape[2], q.device)
        )

    def kept(self, k, v, length):
        return k, v


class TopLeftMask(Attention):
    """is_causal aligns its triangle at the top left: with a cache, a new token attends to the oldest key
    only.
    """

    def mix(self, q, k, v, first):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class UnmaskedSteps(Attention):
    """No mask once there is a cache: right for one new token, wrong for several."""

    def mix(self, q, k, v, first):
        return F.scaled_dot_product_attention(q, k, v, is_causal=first)


class NoBiasOffset(Attention):
    """The distance bias counts the queries from zero."""

    def mix(self, q, k, v, first):
        queries, keys = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
        bias = -0.3 * (queries[:, None] - keys[None, :]).abs().to(q.dtype)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias
        return masked_softmax(scores, causal_mask(q.shape[2], k.shape[2], q.device)) @ v


class NoRotaryOffset(Attention):
    """Rotary positions of new tokens start at zero."""

    def placed(self, q, k, start):
        at = torch.arange(q.shape[2], device=q.device)
        return apply_rotary(q, at), apply_rotary(k, at)


class QueryOffsetOnly(Attention):
    """Rotary positions: new queries get the offset of the cache, new keys do not."""

    def placed(self, q, k, start):
        at = torch.arange(q.shape[2], device=q.device)
        return apply_rotary(q, at + start), apply_rotary(k, at)


class ChunkScale(Attention):
    """Scores scaled by the logarithm of the number of visible keys; new tokens all use that of the last."""

    def mix(self, q, k, v, first):
        at = torch.arange(1, k.shape[2] + 1, device=q.device, dtype=torch.float32)
        seen = at if first else at[-1:].expand(q.shape[2])
        scores = q @ k.transpose(-2, -1) * torch.log(seen + 1)[:, None].to(q.dtype)
        return masked_softmax(scores, causal_mask(q.shape[2], k.shape[2], q.device)) @ v


class LastChunkOnly(Attention):
    """Only the keys of the last call are kept: from the third call on, those of the first are missing."""

    def kept(self, k, v, length):
        return k[:, :, -length:], v[:, :, -length:]


class RingCache(Attention):
    """A window over keys; the cache keeps one too few."""

    def __init__(self, window: int = 4) -> None:
        super().__init__()
        self.window = window

    def mix(self, q, k, v, first):
        at = torch.arange(k.shape[2], device=q.device)
        ago = at[k.shape[2] - q.shape[2] :, None] - at[None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(ago >= 0) & (ago < self.window))

    def kept(self, k, v, length):
        return k[:, :, -(self.window - 2) :], v[:, :, -(self.window - 2) :]


class OverwrittenRing(RingCache):
    """A ring that is written before it is read: with several new tokens the oldest keys are gone too soon."""

    def mix(self, q, k, v, first):
        new, all_keys = q.shape[2], k.shape[2]
        at = torch.arange(all_keys, device=q.device)
        ago = at[all_keys - new :, None] - at[None, :]
        seen = (ago >= 0) & (ago < self.window)
        if not first:
            seen = seen & (at >= all_keys - max(self.window, new))[None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    def kept(self, k, v, length):
        return k[:, :, -self.window :], v[:, :, -self.window :]


class LanguageModel(nn.Module):
    """Tokens to logits through layers that return (out, cache)."""

    shared = False  # do all layers use the cache of the first?
    counted = True  # do positions continue after the cache?

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def run(self, tokens, past):
        start, caches = (0, [None] * len(self.layers)) if past is None else past
        x = self.embed(tokens)
        at = torch.arange(tokens.shape[1], device=tokens.device) + (start if self.counted else 0)
        x = x + sinusoidal_positions(at, WIDTH).to(x.dtype)
        new = []
        for number, layer in enumerate(self.layers):
            y, cache = layer(x, caches[0 if self.shared else number])
            x = x + y
            new.append(cache)
        return self.head(self.norm(x)), (start + tokens.shape[1], new)

    def forward(self, tokens, cache=None):
        return self.run(tokens, cache)


class SharedCache(LanguageModel):
    """Every layer gets the first layer's cache."""

    shared = True


class RestartedPositions(LanguageModel):
    """Positions of new tokens start at zero again."""

    counted = False

    def forward(self, x, kv_cache=None):
        return self.run(x, kv_cache)


class UseCache(LanguageModel):
    """Returns a cache only with use_cache."""

    def forward(self, tokens, past=None, use_cache=False):
        scores, past = self.run(tokens, past)
        return (scores, past) if use_cache else scores


@dataclass
class ModelOutput:
    """The output of a Hugging Face model."""

    logits: torch.Tensor
    past_key_values: tuple | None = None


class HuggingFaceStyle(LanguageModel):
    """Hugging Face's names; the past is a tuple of (keys, values), and positions are counted from it."""

    def forward(self, input_ids, past_key_values=None, use_cache=None):
        past = None if past_key_values is None else (past_key_values[0][0].shape[2], past_key_values)
        scores, (_, new) = self.run(input_ids, past)
        return ModelOutput(scores, tuple(new) if use_cache else None)


class Stepping(nn.Module):
    """start(prompt) and step(tokens, state) around a language model; calling it is one full pass."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.model = LanguageModel(*layers)

    def forward(self, tokens):
        return self.model(tokens)[0]

    def start(self, prompt):
        scores, state = self.model(prompt)
        return scores[:, -1], {"past": state}

    def step(self, tokens, state):
        scores, state["past"] = self.model(tokens, state["past"])
        return scores


class SlotAttention(nn.Module):
    """As in Llama's first code: an internal cache of 48 slots, and start_pos."""

    def __init__(self, empty: bool = False, counted: bool = True, slots: int = 48, rows: int = 5) -> None:
        super().__init__()
        self.empty = empty  # do steps attend to empty slots?
        self.counted = counted  # do positions start at start_pos?
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for name in ("cache_k", "cache_v"):
            self.register_buffer(name, torch.zeros(rows, slots, WIDTH), persistent=False)

    def forward(self, x, start_pos):
        rows, length, _ = x.shape
        at = torch.arange(length, device=x.device) + (start_pos if self.counted else 0)
        q, k = apply_rotary(self.wq(x), at), apply_rotary(self.wk(x), at)
        self.cache_k[:rows, start_pos : start_pos + length] = k.detach()
        self.cache_v[:rows, start_pos : start_pos + length] = self.wv(x).detach()
        if self.empty and start_pos > 0:
            end = self.cache_k.shape[1]
            seen = torch.ones(length, self.cache_k.shape[1], dtype=torch.bool, device=x.device)
            seen[:, start_pos : start_pos + length] = causal_mask(length, length, x.device)
        else:
            end, seen = start_pos + length, causal_mask(length, start_pos + length, x.device)
        scores = q @ self.cache_k[:rows, :end].transpose(1, 2) / math.sqrt(q.shape[-1])
        return self.wo(masked_softmax(scores, seen) @ self.cache_v[:rows, :end])


class StartPosModel(nn.Module):
    """forward(tokens, start_pos) with an internal cache."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, start_pos=0):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = x + layer(x, start_pos)
        return self.output(x)


class StaleCache(nn.Module):
    """Keeps the keys of the last prompt: a shorter new prompt attends to the rest of the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.memory = {}

    def attend(self, x, keys, values, seen):
        return self.head(
            x + masked_softmax(self.q(x) @ keys.transpose(1, 2) / math.sqrt(WIDTH), seen) @ values
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.attend(x, self.k(x), self.v(x), causal_mask(x.shape[1], x.shape[1], x.device))

    def start(self, prompt):
        rows = len(prompt)
        if rows not in self.memory:
            self.memory[rows] = [0, torch.zeros(rows, 64, WIDTH), torch.zeros(rows, 64, WIDTH)]
        state = {"written": 0, "slots": self.memory[rows]}
        return self.step(prompt, state), state

    def step(self, tokens, state):
        x = self.embed(tokens)
        begin = state["written"]
        slots = state["slots"]
        end = state["written"] = begin + tokens.shape[1]
        slots[1][:, begin:end], slots[2][:, begin:end] = self.k(x).detach(), self.v(x).detach()
        slots[0] = max(slots[0], end)  # never reset
        at = torch.arange(slots[0])
        seen = (at[None, :] <= torch.arange(begin, end)[:, None]) | (at >= end)[None, :]
        return self.attend(x, slots[1][:, : slots[0]].to(x), slots[2][:, : slots[0]].to(x), seen)


class Conv(nn.Module):
    """A causal convolution; how many of the last inputs a step remembers is `memory` (two would be right)."""

    def __init__(self, memory: int) -> None:
        super().__init__()
        self.memory = memory
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x, cache=None):
        x = x.transpose(1, 2)
        before = F.pad(x[..., :0] if cache is None else cache, (2, 0))[..., -2:]
        wide = torch.cat([before, x], -1)
        return torch.tanh(self.conv(wide)).transpose(1, 2), wide[..., wide.shape[-1] - self.memory :]


class Shift(nn.Module):
    """Mixes in the previous token; the state keeps the first token of a chunk instead of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x, cache=None):
        before = torch.cat([torch.zeros_like(x[:, :1]) if cache is None else cache, x[:, :-1]], 1)
        return x * self.mix + before * (1 - self.mix), x[:, :1]


class ForgottenCell(nn.Module):
    """An LSTM whose step keeps the hidden state and drops the cell state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 11)
        self.rnn = nn.LSTM(11, 13, batch_first=True)
        self.head = nn.Linear(13, VOCAB)

    def forward(self, tokens, state=None):
        before = None if state is None else (state, torch.zeros_like(state))
        x, (hidden, _) = self.rnn(self.embed(tokens), before)
        return self.head(x), hidden


class Scan(nn.Module):
    """A state-space model; a step adds the old state to its first token without letting it decay."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.decay = nn.Parameter(torch.randn(WIDTH))

    def scan(self, tokens, state):
        states = []
        for number, u in enumerate(self.embed(tokens).unbind(1)):
            if state is None:
                state = u
            else:
                state = (state if number == 0 else torch.sigmoid(self.decay) * state) + u
            states.append(state)
        return self.head(torch.tanh(torch.stack(states, 1))), state

    def forward(self, tokens):
        return self.scan(tokens, None)[0]


def prefill_and_step(model):
    """The prefill= and step= of an audit, for a model without a cache interface."""
    return {
        "prefill": lambda tokens: model.scan(tokens, None),
        "step": lambda tokens, state: model.scan(tokens, state),
    }


def planted_cache(name, module, model, *layers):
    return Planted(name, seeded(lambda: model(*[layer() for layer in layers])), "cache", module)


PLANTED = [
    planted_cache("triangle in the top left corner", "layers.1", LanguageModel, Attention, TopLeftMask),
    planted_cache("steps of several tokens unmasked", "layers.0", UseCache, UnmaskedSteps, Attention),
    planted_cache(
        "steps of several tokens unmasked in the last layer",
        "layers.2",
        HuggingFaceStyle,
        Attention,
        Attention,
        UnmaskedSteps,
    ),
    planted_cache("distance bias without the offset", "layers.1", LanguageModel, Attention, NoBiasOffset),
    planted_cache("rotary without the offset", "layers.0", UseCache, NoRotaryOffset, Attention),
    planted_cache("rotary offset for queries only", "model.layers.1", Stepping, Attention, QueryOffsetOnly),
    planted_cache("scale of the chunk's last token", "layers.1", HuggingFaceStyle, Attention, ChunkScale),
    planted_cache("only the last call's keys kept", "layers.1", LanguageModel, Attention, LastChunkOnly),
    planted_cache("ring one too small", "layers.0", LanguageModel, RingCache, Attention),
    planted_cache(
        "ring overwritten before it is read", "model.layers.1", Stepping, Attention, OverwrittenRing
    ),
    planted_cache("first layer's cache for all", None, SharedCache, Attention, Attention),
    planted_cache("positions begin again", "", RestartedPositions, Attention, Attention),
    planted_cache(
        "unused slots attended", "layers.1", StartPosModel, SlotAttention, lambda: SlotAttention(empty=True)
    ),
    planted_cache(
        "start_pos ignored in one layer",
        "layers.1",
        StartPosModel,
        SlotAttention,
        lambda: SlotAttention(counted=False),
        SlotAttention,
    ),
    Planted("keys of the last conversation", seeded(StaleCache), "cache", None),
    planted_cache("convolution state forgotten", "layers.1", LanguageModel, Attention, lambda: Conv(0)),
    planted_cache(
        "convolution state one too short", "layers.1", HuggingFaceStyle, Attention, lambda: Conv(1)
    ),
    planted_cache("token shift state from the wrong end", "layers.1", LanguageModel, Attention, Shift),
    Planted("cell of an LSTM forgotten", seeded(ForgottenCell), "cache", None),
    Planted("state that does not decay between calls", seeded(Scan, options=prefill_and_step), "cache", None),
]
