"""Caches that are handed from call to call: tuples, dicts and objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepleft as kl

from ..case import case
from .layers import FeedForward, RMSNorm, merge, rotate, split
from .proofs import cache, future, ready

Past = Any


def chunked(
    step: Callable[[Tensor, Past, int], tuple[Tensor, Past]],
    reorder: Callable[[Past, Tensor], Past] | None = None,
) -> Callable[[Tensor, tuple[int, ...], Tensor | None], Tensor]:
    """Decode in chunks with step(tokens, past, start) -> (logits, past)."""

    def decode(text: Tensor, chunks: tuple[int, ...], rows: Tensor | None) -> Tensor:
        past, start, outputs = None, 0, []
        for size in chunks:
            logits, past = step(text[:, start : start + size], past, start)
            outputs.append(logits)
            if rows is not None and start == 0 and reorder is not None:
                past = reorder(past, rows)
            start += size
        return torch.cat(outputs, dim=1)

    return decode


def causal(new: int, total: int) -> Tensor:
    """The last `new` rows of a causal mask over `total` keys."""
    return torch.ones(new, total, dtype=torch.bool).tril(total - new)


class PastAttention(nn.Module):
    """Attention that appends to a (key, value) pair."""

    def __init__(self, n_embd: int, n_head: int = 2) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(
        self, x: Tensor, layer_past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (split(y, self.n_head) for y in self.c_attn(x).chunk(3, dim=-1))
        if layer_past is not None:
            k, v = torch.cat([layer_past[0], k], dim=2), torch.cat([layer_past[1], v], dim=2)
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf"))
        return self.c_proj(merge(scores.softmax(-1) @ v)), (k, v)


class TinyGPT2(nn.Module):
    """GPT-2 with a tuple of past keys and values."""

    def __init__(self, vocab_size: int = 50, n_embd: int = 16, n_layer: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(128, n_embd)
        self.h = nn.ModuleList(PastAttention(n_embd) for _ in range(n_layer))
        self.ln = nn.ModuleList(nn.LayerNorm(n_embd) for _ in range(n_layer))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, past_key_values: Past = None, use_cache: bool = False
    ) -> SimpleNamespace:
        past_length = 0 if past_key_values is None else past_key_values[0][0].size(1)
        position_ids = torch.arange(past_length, past_length + input_ids.shape[1])
        hidden, presents = self.wte(input_ids) + self.wpe(position_ids), []
        for i, (ln, block) in enumerate(zip(self.ln, self.h, strict=True)):
            out, present = block(ln(hidden), None if past_key_values is None else past_key_values[i])
            hidden = hidden + out
            presents.append(present)
        return SimpleNamespace(
            logits=self.lm_head(hidden), past_key_values=tuple(presents) if use_cache else None
        )


def past_step(model: nn.Module) -> Callable[[Tensor, Past, int], tuple[Tensor, Past]]:
    """A step with past_key_values and use_cache."""

    def step(text: Tensor, past: Past, start: int) -> tuple[Tensor, Past]:
        output = model(text, past_key_values=past, use_cache=True)
        return output.logits, output.past_key_values

    return step


@case(
    leaks=True,
    kinds=("cache",),
    modules=("wpe", ""),
    after="a common mistake: the length of the past is read from the wrong axis of the cached keys",
    prove=lambda: cache(ready(past_of_the_wrong_axis), chunked(past_step(ready(past_of_the_wrong_axis)))),
)
def past_of_the_wrong_axis() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": TinyGPT2()}


class LateRotaryAttention(nn.Module):
    """Keys are cached as they are and rotated when they are read."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def query_positions(self, new: int, total: int) -> Tensor:
        return torch.arange(new)

    def forward(self, x: Tensor, kv: dict[str, Tensor]) -> Tensor:
        q, k, v = (split(proj(x), self.heads) for proj in (self.wq, self.wk, self.wv))
        if "k" in kv:
            k, v = torch.cat([kv["k"], k], dim=2), torch.cat([kv["v"], v], dim=2)
        kv.update(k=k, v=v)
        new, total = q.shape[2], k.shape[2]
        q, k = rotate(q, self.query_positions(new, total)), rotate(k, torch.arange(total))
        return self.wo(merge(F.scaled_dot_product_attention(q, k, v, attn_mask=causal(new, total))))


class OffsetRotaryAttention(LateRotaryAttention):
    """The same, with queries that stand at the end of the keys."""

    def query_positions(self, new: int, total: int) -> Tensor:
        return torch.arange(total - new, total)


class RotaryLM(nn.Module):
    """A decoder whose cache is a list of dicts, one for each layer, filled in place."""

    def __init__(self, attention: type[LateRotaryAttention], vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attns = nn.ModuleList(attention(dim) for _ in range(2))
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(2))
        self.out = nn.Linear(dim, vocab)

    def forward(
        self, tokens: Tensor, cache: list[dict[str, Tensor]] | None = None
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        cache = [{} for _ in self.attns] if cache is None else cache
        x = self.embed(tokens)
        for norm, attn, kv in zip(self.norms, self.attns, cache, strict=True):
            x = x + attn(norm(x), kv)
        return self.out(x), cache


@case(
    leaks=True,
    kinds=("cache",),
    modules=("attns.0", "attns.1", ""),
    after="a common mistake: keys rotated at read time by their positions, queries counted from zero again",
    prove=lambda: cache(
        ready(queries_from_zero), chunked(lambda text, past, _: ready(queries_from_zero)(text, past))
    ),
)
def queries_from_zero() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RotaryLM(LateRotaryAttention)}


def prove_late_rotary() -> float:
    """Chunks, reordered rows, and the future."""
    model = ready(keys_rotated_when_read)
    decode = chunked(
        lambda text, past, _: model(text, past),
        lambda past, rows: [{name: x[rows] for name, x in kv.items()} for kv in past],
    )
    return max(cache(model, decode, reorder=True), future(model))


@case(
    leaks=False,
    after="caches keys without rotation and rotates all of them at every step",
    prove=prove_late_rotary,
)
def keys_rotated_when_read() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RotaryLM(OffsetRotaryAttention)}


class FlagAttention(nn.Module):
    """Attention by the fused kernel, causal by its flag."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        kv = torch.stack([k, v])
        if past is not None:
            kv = torch.cat([past, kv], dim=2)
        q, k, v = (split(y, self.heads) for y in (q, kv[0], kv[1]))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        return self.proj(merge(y)), kv


class FlagLM(nn.Module):
    """Sinusoidal positions; the cache is one tensor for each layer, keys and values stacked."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(FlagAttention(dim) for _ in range(2))
        self.ffn, self.head = FeedForward(dim, 32), nn.Linear(dim, vocab)

    def forward(self, idx: Tensor, cache: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        offset, dim = 0 if cache is None else cache[0].shape[2], self.embed.embedding_dim
        t = torch.arange(offset, offset + idx.shape[1], dtype=self.head.weight.dtype)[:, None]
        rate = 30.0 ** (-torch.arange(dim // 2).to(t.dtype) * 2 / dim)
        x = self.embed(idx) + torch.cat([(t * rate).sin(), (t * rate).cos()], dim=-1)
        new_cache = []
        for i, layer in enumerate(self.layers):
            y, kv = layer(x, None if cache is None else cache[i])
            x = x + y
            new_cache.append(kv)
        return self.head(x + self.ffn(x)), new_cache


@case(
    leaks=True,
    kinds=("cache",),
    modules=("layers.0", "layers.1", ""),
    after="after pytorch/pytorch #108108 (is_causal is aligned to the top left: wrong after a past)",
    prove=lambda: cache(
        ready(causal_flag_with_a_past),
        chunked(lambda text, past, _: ready(causal_flag_with_a_past)(text, past)),
    ),
)
def causal_flag_with_a_past() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": FlagLM()}


class WindowAttention(nn.Module):
    """Sliding-window attention; the cache holds keys, values and positions of the last tokens."""

    def __init__(self, dim: int, window: int, kept: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.window, self.kept = heads, window, kept
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, past: Past, start: int) -> tuple[Tensor, Past]:
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        position = torch.arange(start, start + x.shape[1])
        q, k, where = rotate(q, position), rotate(k, position), position
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
            where = torch.cat([past[2], position])
        back = position[:, None] - where[None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back < self.window))
        return self.out(merge(y)), (k[:, :, -self.kept :], v[:, :, -self.kept :], where[-self.kept :])


class WindowLM(nn.Module):
    """Two layers of sliding-window attention."""

    def __init__(self, kept: int, window: int = 4, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(WindowAttention(dim, window, kept) for _ in range(2))
        self.lm_head = nn.Linear(dim, vocab_size)

    def forward(
        self, input_ids: Tensor, past_key_values: Past = None, use_cache: bool = False
    ) -> SimpleNamespace:
        past = past_key_values or {"seen": 0, "layers": [None] * len(self.layers)}
        x, layers = self.embed_tokens(input_ids), []
        for layer, layer_past in zip(self.layers, past["layers"], strict=True):
            y, kept = layer(x, layer_past, past["seen"])
            x = x + y
            layers.append(kept)
        new = {"seen": past["seen"] + input_ids.shape[1], "layers": layers} if use_cache else None
        return SimpleNamespace(logits=self.lm_head(x), past_key_values=new)


@case(
    leaks=True,
    kinds=("cache",),
    modules=("layers.0", "layers.1", ""),
    after="after huggingface/transformers #37574 (sliding cache wrong at the window; here one slot too few)",
    prove=lambda: cache(ready(window_one_slot_short), chunked(past_step(ready(window_one_slot_short)))),
)
def window_one_slot_short() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": WindowLM(kept=2), "claim": kl.causal & kl.window(4), "layers": 2}


def window_rows(past: Past, rows: Tensor) -> Past:
    """Rows of a window's cache."""
    layers = [(k[rows], v[rows], where) for k, v, where in past["layers"]]
    return {"seen": past["seen"], "layers": layers}


@case(
    leaks=False,
    after="a cache one shorter than the window: the new token is the window's last",
    prove=lambda: max(
        cache(
            ready(window_less_the_new_token),
            chunked(past_step(ready(window_less_the_new_token)), window_rows),
            reorder=True,
        ),
        future(ready(window_less_the_new_token), reach=7),
    ),
)
def window_less_the_new_token() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": WindowLM(kept=3), "claim": kl.causal & kl.window(4), "layers": 2}


class ConvState:
    """What a convolution and a gated recurrence remember."""

    __slots__ = ("_conv", "_hidden")

    def __init__(self, conv: Tensor, hidden: Tensor) -> None:
        self._conv, self._hidden = conv, hidden

    def reorder(self, rows: Tensor) -> None:
        self._hidden = self._hidden[rows]


class FullState(ConvState):
    """The same for both parts."""

    __slots__ = ()

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        self._conv = self._conv[rows]


class StreamingLM(nn.Module):
    """A convolution and a recurrence, with start and step."""

    def __init__(self, state: type[ConvState], vocab: int = 50, dim: int = 16, taps: int = 3) -> None:
        super().__init__()
        self.embed, self.taps, self.state = nn.Embedding(vocab, dim), taps, state
        self.conv = nn.Conv1d(dim, dim, taps)
        self.forget, self.readout = nn.Linear(dim, dim), nn.Linear(dim, vocab)

    def _advance(self, tokens: Tensor, state: ConvState) -> Tensor:
        x = torch.cat([state._conv, self.embed(tokens)], dim=1)
        state._conv = x[:, 1 - self.taps :]
        u, outputs = F.silu(self.conv(x.mT).mT), []
        for value in u.unbind(1):
            gate = torch.sigmoid(self.forget(value))
            state._hidden = gate * state._hidden + (1 - gate) * value
            outputs.append(state._hidden)
        return self.readout(torch.stack(outputs, dim=1))

    def start(self, tokens: Tensor) -> tuple[Tensor, ConvState]:
        empty = self.readout.weight.new_zeros(len(tokens), self.taps - 1, self.embed.embedding_dim)
        state = self.state(empty, empty.new_zeros(len(tokens), self.embed.embedding_dim))
        return self._advance(tokens, state), state

    def step(self, tokens: Tensor, state: ConvState) -> Tensor:
        return self._advance(tokens, state)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.start(tokens)[0]


def streaming(model: StreamingLM) -> Callable[[Tensor, tuple[int, ...], Tensor | None], Tensor]:
    """Decode with start and step."""

    def step(text: Tensor, past: Past, start: int) -> tuple[Tensor, Past]:
        return model.start(text) if past is None else (model.step(text, past), past)

    def reorder(past: Past, rows: Tensor) -> Past:
        past.reorder(rows)
        return past

    return chunked(step, reorder)


@case(
    leaks=True,
    kinds=("cache",),
    modules=("conv", ""),
    after="after huggingface/transformers #46612 (beams reordered, a recurrent state not)",
    prove=lambda: cache(ready(beams_without_conv), streaming(ready(beams_without_conv)), reorder=True),
)
def beams_without_conv() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": StreamingLM(ConvState)}


@case(
    leaks=False,
    after="a private state object that reorders all it holds, changed in place",
    prove=lambda: max(
        cache(ready(private_state), streaming(ready(private_state)), reorder=True),
        future(ready(private_state)),
    ),
)
def private_state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": StreamingLM(FullState)}


class SelectiveMixer(nn.Module):
    """A Mamba-like mixer: convolution, then a diagonal recurrence, with a state for both."""

    def __init__(self, dim: int, taps: int = 4) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(dim, dim, taps, groups=dim)
        self.dt_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.taps = taps

    def kept(self, window: Tensor) -> Tensor:
        return window[..., -self.taps : -1]

    def forward(self, x: Tensor, state: dict[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
        before = x.new_zeros(len(x), x.shape[2], self.taps - 1) if state is None else state["conv"]
        window = torch.cat([before, x.mT], dim=-1)
        u = F.silu(self.conv1d(window)).mT
        decay = torch.sigmoid(self.dt_proj(u))
        h, ys = torch.zeros_like(u[:, 0]) if state is None else state["ssm"], []
        for t in range(u.shape[1]):
            h = decay[:, t] * h + u[:, t]
            ys.append(h)
        return self.out_proj(torch.stack(ys, 1)), {"conv": self.kept(window), "ssm": h}


class LastTapsMixer(SelectiveMixer):
    """The same; keeps the last inputs."""

    def kept(self, window: Tensor) -> Tensor:
        return window[..., 1 - self.taps :]


class SelectiveLM(nn.Module):
    """A state space model with cache_params."""

    def __init__(self, mixer: type[SelectiveMixer], vocab_size: int = 50, hidden_size: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(mixer(hidden_size) for _ in range(2))
        self.norm_f, self.lm_head = RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size)

    def forward(
        self, input_ids: Tensor, cache_params: list[dict[str, Tensor]] | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        hidden, states = self.embeddings(input_ids), []
        for i, layer in enumerate(self.layers):
            out, state = layer(hidden, None if cache_params is None else cache_params[i])
            hidden = hidden + out
            states.append(state)
        logits = self.lm_head(self.norm_f(hidden))
        return SimpleNamespace(logits=logits, cache_params=states if use_cache else None)


def selective(model: SelectiveLM) -> Callable[[Tensor, tuple[int, ...], Tensor | None], Tensor]:
    """Decode with cache_params."""

    def step(text: Tensor, past: Past, start: int) -> tuple[Tensor, Past]:
        output = model(text, cache_params=past, use_cache=True)
        return output.logits, output.cache_params

    return chunked(step, lambda past, rows: [{name: x[rows] for name, x in s.items()} for s in past])


@case(
    leaks=True,
    kinds=("cache",),
    modules=("", *(f"layers.{i}{part}" for i in (0, 1) for part in ("", ".conv1d"))),
    after="a common mistake: the state of a short convolution is shifted by one token",
    prove=lambda: cache(ready(conv_state_shifted), selective(ready(conv_state_shifted))),
)
def conv_state_shifted() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": SelectiveLM(SelectiveMixer)}


@case(
    leaks=False,
    after="a convolution's and a recurrence's state in a dict, prompts shorter than the convolution included",
    prove=lambda: max(
        cache(ready(conv_and_scan_state), selective(ready(conv_and_scan_state)), reorder=True),
        future(ready(conv_and_scan_state)),
    ),
)
def conv_and_scan_state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": SelectiveLM(LastTapsMixer)}


class Int8Cache:
    """Keys or values as int8; one scale for each row, as large as any token needs."""

    def __init__(self) -> None:
        self.ints: Tensor | None = None
        self.scale: Tensor | None = None

    def append(self, x: Tensor) -> Tensor:
        token_scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / 127
        fresh = (x / token_scale).round() * token_scale
        if self.ints is None or self.scale is None:
            self.scale = token_scale.amax(dim=1, keepdim=True)
            self.ints = (x / self.scale).round()
            return fresh
        before = self.ints * self.scale
        self.scale = torch.maximum(self.scale, token_scale.amax(dim=1, keepdim=True))
        self.ints = torch.cat([self.ints, (x / self.scale).round()], dim=1)
        return torch.cat([before, fresh], dim=1)

    def reorder(self, rows: Tensor) -> None:
        if self.ints is not None and self.scale is not None:
            self.ints, self.scale = self.ints[rows], self.scale[rows]


class Int8TokenCache(Int8Cache):
    """Keys and values as int8, one scale for each token."""

    def append(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / 127
        ints = (x / scale).round()
        if self.ints is not None and self.scale is not None:
            ints, scale = torch.cat([self.ints, ints], dim=1), torch.cat([self.scale, scale], dim=1)
        self.ints, self.scale = ints, scale
        return ints * scale


class Int8LM(nn.Module):
    """Keys and values pass through int8 whether or not they are kept."""

    def __init__(self, store: type[Int8Cache], vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.store, self.embed = store, nn.Embedding(vocab, dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.mlp, self.head = FeedForward(dim, 32), nn.Linear(dim, vocab)

    def new_cache(self) -> dict[str, Int8Cache]:
        return {"k": self.store(), "v": self.store()}

    def forward(self, tokens: Tensor, cache: dict[str, Int8Cache] | None = None) -> Tensor:
        cache = self.new_cache() if cache is None else cache
        x = self.embed(tokens)
        k, v = cache["k"].append(self.k(x)), cache["v"].append(self.v(x))
        back = torch.arange(k.shape[1] - x.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        scores = self.q(x) @ k.mT / 4 - 0.2 * back.to(x.dtype)
        x = x + scores.masked_fill(back < 0, float("-inf")).softmax(-1) @ v
        return self.head(x + self.mlp(x))


def int8_arguments(store: type[Int8Cache]) -> dict[str, Any]:
    """The model with its prefill, step and reorder."""
    torch.manual_seed(0)
    model = Int8LM(store)

    def prefill(tokens: Tensor) -> tuple[Tensor, dict[str, Int8Cache]]:
        cache = model.new_cache()
        return model(tokens, cache), cache

    def step(tokens: Tensor, cache: dict[str, Int8Cache]) -> tuple[Tensor, dict[str, Int8Cache]]:
        return model(tokens, cache), cache

    def reorder(cache: dict[str, Int8Cache], rows: Tensor) -> dict[str, Int8Cache]:
        for part in cache.values():
            part.reorder(rows)
        return cache

    return {"target": model, "prefill": prefill, "step": step, "reorder": reorder}


def prove_callables(build: Callable[[], dict[str, Any]]) -> float:
    """A full pass against the callables that go with the model."""
    arguments = build()
    model, prefill, step = arguments["target"].double().eval(), arguments["prefill"], arguments["step"]
    decode = chunked(
        lambda text, past, _: prefill(text) if past is None else step(text, past), arguments["reorder"]
    )
    return max(cache(model, decode, reorder=True), future(model))


@case(
    leaks=True,
    kinds=("cache",),
    modules=("", "k", "v"),
    after="a common mistake: a quantized cache whose scale grows while its old integers stay",
    prove=lambda: prove_callables(int8_scale_grows),
)
def int8_scale_grows() -> dict[str, Any]:
    return int8_arguments(Int8Cache)


@case(
    leaks=False,
    after="a quantized cache with one scale for each token; the pass without a cache rounds alike",
    prove=lambda: prove_callables(int8_scale_per_token),
)
def int8_scale_per_token() -> dict[str, Any]:
    return int8_arguments(Int8TokenCache)
