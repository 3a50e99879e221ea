"""Caches that live in the model or are set up beforehand: static slots, rings, buffers."""

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
from .cache_past import Past, causal, chunked, prove_callables
from .layers import Attention, FeedForward, RMSNorm, merge, rotate, split
from .proofs import cache, future, ready


class ReferenceAttention(nn.Module):
    """Attention with keys and values of up to max_batch_size rows kept in the module."""

    def __init__(self, dim: int, n_heads: int = 2, max_batch_size: int = 8, max_seq_len: int = 128) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.cache_k = torch.zeros(max_batch_size, n_heads, max_seq_len, dim // n_heads)
        self.cache_v = torch.zeros(max_batch_size, n_heads, max_seq_len, dim // n_heads)

    def read(self, cache: Tensor, new: Tensor, start_pos: int) -> Tensor:
        return torch.cat([cache[: len(new), :, :start_pos], new], dim=2)

    def forward(self, x: Tensor, start_pos: int, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq, xk, xv = (split(w(x), self.n_heads) for w in (self.wq, self.wk, self.wv))
        positions = torch.arange(start_pos, start_pos + seqlen)
        xq, xk = rotate(xq, positions), rotate(xk, positions)
        self.cache_k, self.cache_v = self.cache_k.to(xq), self.cache_v.to(xq)
        self.cache_k[:bsz, :, start_pos : start_pos + seqlen] = xk.detach()
        self.cache_v[:bsz, :, start_pos : start_pos + seqlen] = xv.detach()
        keys, values = self.read(self.cache_k, xk, start_pos), self.read(self.cache_v, xv, start_pos)
        scores = xq @ keys.mT / math.sqrt(xq.shape[-1])
        scores = scores if mask is None else scores + mask
        return self.wo(merge(scores.softmax(-1) @ values))


class HighMarkAttention(ReferenceAttention):
    """Keeps the number of slots that were ever filled."""

    filled = 0

    def read(self, cache: Tensor, new: Tensor, start_pos: int) -> Tensor:
        self.filled = max(self.filled, start_pos + new.shape[2])
        if new.shape[2] == 1:
            return cache[: len(new), :, : self.filled]
        return super().read(cache, new, start_pos)


class ReferenceTransformer(nn.Module):
    """A decoder in the style of the LLaMA reference code."""

    def __init__(self, attention: type[ReferenceAttention], vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.attention = nn.ModuleList(attention(dim) for _ in range(2))
        self.norm, self.feed_forward = RMSNorm(dim), FeedForward(dim, 32)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        seqlen = tokens.shape[1]
        mask = None
        if seqlen > 1:
            mask = torch.full((seqlen, seqlen), float("-inf")).triu(1)
            mask = torch.hstack([torch.zeros(seqlen, start_pos), mask])
        h = self.tok_embeddings(tokens)
        mask = None if mask is None else mask.type_as(h)
        for layer in self.attention:
            h = h + layer(self.norm(h), start_pos, mask)
        return self.output(h + self.feed_forward(h))


def by_start_pos(model: nn.Module) -> Callable[[Tensor, tuple[int, ...], Tensor | None], Tensor]:
    """Decode with start_pos."""
    return chunked(lambda text, past, start: (model(text, start), True))


@case(
    leaks=True,
    kinds=("cache", "batch"),
    modules=("", "attention.0", "attention.1"),
    after="a common mistake: a single token attends to slots that a longer prompt before it has filled",
    prove=lambda: cache(
        lambda text: ready(slots_of_the_prompt_before)(text, 0),
        by_start_pos(ready(slots_of_the_prompt_before)),
    ),
)
def slots_of_the_prompt_before() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ReferenceTransformer(HighMarkAttention)}


def prove_start_pos() -> float:
    """Chunks after longer prompts, and the future."""
    model = ready(start_pos_reference)
    return max(cache(lambda text: model(text, 0), by_start_pos(model)), future(lambda text: model(text, 0)))


@case(
    leaks=False,
    after="the LLaMA reference: buffers in the module, never cleared, read up to start_pos + seqlen",
    prove=prove_start_pos,
)
def start_pos_reference() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ReferenceTransformer(ReferenceAttention)}


class KVCache(nn.Module):
    """Static slots."""

    def __init__(self, max_batch_size: int, max_seq_length: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(max_batch_size, max_seq_length, dim, dtype=dtype))
        self.register_buffer("v_cache", torch.zeros(max_batch_size, max_seq_length, dim, dtype=dtype))

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.k_cache[: len(k)].clone(), self.v_cache[: len(v)].clone()
        keys[:, input_pos], values[:, input_pos] = k, v
        self.k_cache[: len(k)], self.v_cache[: len(v)] = keys.detach(), values.detach()
        return keys, values


class FastTransformer(nn.Module):
    """A decoder in the style of gpt-fast: setup_caches, then input_pos."""

    def __init__(self, vocab_size: int = 50, dim: int = 16, n_layer: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.wqkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(n_layer))
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(n_layer))
        self.output = nn.Linear(dim, vocab_size)
        self.kv_cache: nn.ModuleList | None = None

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        weight = self.output.weight
        self.kv_cache = nn.ModuleList(
            KVCache(max_batch_size, max_seq_length, weight.shape[1], weight.dtype) for _ in self.wqkv
        )
        self.causal_mask = torch.ones(max_seq_length, max_seq_length, dtype=torch.bool).tril()

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        if input_pos is None:
            input_pos, mask = torch.arange(idx.shape[1]), causal(idx.shape[1], idx.shape[1])
            caches = [None] * len(self.wqkv)
        else:
            assert self.kv_cache is not None, "call setup_caches first"
            mask, caches = self.causal_mask[input_pos], list(self.kv_cache)
        x = self.tok_embeddings(idx)
        for norm, wqkv, kv_cache in zip(self.norms, self.wqkv, caches, strict=True):
            q, k, v = wqkv(norm(x)).chunk(3, dim=-1)
            q, k = rotate(q[:, None], input_pos)[:, 0], rotate(k[:, None], input_pos)[:, 0]
            if kv_cache is not None:
                k, v = kv_cache.update(input_pos, k, v)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.output(x)


def by_input_pos(
    model: nn.Module, slots: int = 32
) -> Callable[[Tensor, tuple[int, ...], Tensor | None], Tensor]:
    """Decode with setup_caches and input_pos."""
    model.setup_caches(4, slots)  # type: ignore[operator]
    return chunked(lambda text, past, start: (model(text, torch.arange(start, start + text.shape[1])), True))


@case(
    leaks=False,
    after="gpt-fast: static slots over the whole length, the causal mask of input_pos hides the unwritten",
    prove=lambda: max(
        cache(ready(static_slots_masked), by_input_pos(ready(static_slots_masked))),
        future(ready(static_slots_masked)),
    ),
)
def static_slots_masked() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": FastTransformer()}


class RingAttention(nn.Module):
    """Sliding-window attention with as many slots as the window, written round and round."""

    def __init__(self, dim: int, window: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ring: tuple[Tensor, Tensor, Tensor] | None = None

    def setup(self, max_batch_size: int) -> None:
        weight = self.out.weight
        kv = weight.new_zeros(max_batch_size, self.heads, self.window, len(weight) // self.heads)
        self.ring = kv, kv.clone(), torch.full((self.window,), -1)

    def forward(self, x: Tensor, input_pos: Tensor | None) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        position = torch.arange(x.shape[1]) if input_pos is None else input_pos
        q, k, where = rotate(q, position), rotate(k, position), position
        if input_pos is not None and self.ring is not None:
            ring_k, ring_v, ring_pos = self.ring
            if int(position[0]) == 0:
                ring_pos.fill_(-1)
            for i, slot in enumerate((position % self.window).tolist()):
                ring_k[: len(x), :, slot] = k[:, :, i].detach()
                ring_v[: len(x), :, slot] = v[:, :, i].detach()
                ring_pos[slot] = position[i]
            k, v, where = ring_k[: len(x)], ring_v[: len(x)], ring_pos
        back = position[:, None] - where[None, :]
        visible = (back >= 0) & (back < self.window) & (where >= 0)
        return self.out(merge(F.scaled_dot_product_attention(q, k, v, attn_mask=visible)))


class RingLM(nn.Module):
    """Sliding-window layers with ring buffers that setup_caches makes."""

    def __init__(self, vocab: int = 50, dim: int = 16, window: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(RingAttention(dim, window) for _ in range(2))
        self.ffn, self.head = FeedForward(dim, 32), nn.Linear(dim, vocab)

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        for layer in self.layers:
            layer.setup(max_batch_size)

    def forward(self, tokens: Tensor, input_pos: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, input_pos)
        return self.head(x + self.ffn(x))


@case(
    leaks=True,
    kinds=("cache",),
    modules=("", "layers.0", "layers.1"),
    after="after pytorch/executorch #20346 (a chunk overwrites ring slots that its first queries still need)",
    prove=lambda: cache(ready(ring_overwritten_by_chunk), by_input_pos(ready(ring_overwritten_by_chunk))),
)
def ring_overwritten_by_chunk() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RingLM(), "claim": kl.causal & kl.window(4), "layers": 2}


class StaticCache:
    """Slots for a known length."""

    def __init__(self, layers: int, batch: int, max_cache_len: int, like: Tensor) -> None:
        self.keys = [like.new_zeros(batch, max_cache_len, like.shape[-1]) for _ in range(layers)]
        self.values = [like.new_zeros(batch, max_cache_len, like.shape[-1]) for _ in range(layers)]

    def update(self, k: Tensor, v: Tensor, layer: int, cache_position: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer] = self.keys[layer].index_copy(1, cache_position, k)
        self.values[layer] = self.values[layer].index_copy(1, cache_position, v)
        return self.keys[layer], self.values[layer]


class StaticCacheLM(nn.Module):
    """A decoder with a static cache and cache_position."""

    def __init__(self, vocab_size: int = 50, hidden_size: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.qkv_proj = nn.ModuleList(nn.Linear(hidden_size, 3 * hidden_size) for _ in range(2))
        self.lm_head = nn.Linear(hidden_size, vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: StaticCache | None = None,
        cache_position: Tensor | None = None,
    ) -> SimpleNamespace:
        time = input_ids.shape[1]
        position = torch.arange(time) if cache_position is None else cache_position
        x = self.embed_tokens(input_ids)
        for i, proj in enumerate(self.qkv_proj):
            q, k, v = proj(x).chunk(3, dim=-1)
            q, k = rotate(q[:, None], position)[:, 0], rotate(k[:, None], position)[:, 0]
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, i, position)
            mask = None if time == 1 else position[:, None] >= torch.arange(k.shape[1])[None, :]
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return SimpleNamespace(logits=self.lm_head(x), past_key_values=past_key_values)


@case(
    leaks=True,
    kinds=("cache",),
    modules=("", "qkv_proj.0", "qkv_proj.1"),
    after="a common mistake: no mask for a single token, though a static cache has slots not yet written",
    prove=lambda: prove_callables(static_slots_unwritten),
)
def static_slots_unwritten() -> dict[str, Any]:
    torch.manual_seed(0)
    model = StaticCacheLM()

    def prefill(tokens: Tensor) -> tuple[Tensor, tuple[StaticCache, int]]:
        past = StaticCache(2, tokens.shape[0], 64, model.lm_head.weight)
        return model(tokens, past, torch.arange(tokens.shape[1])).logits, (past, tokens.shape[1])

    def step(tokens: Tensor, state: tuple[StaticCache, int]) -> tuple[Tensor, tuple[StaticCache, int]]:
        past, seen = state
        position = torch.arange(seen, seen + tokens.shape[1])
        return model(tokens, past, position).logits, (past, seen + tokens.shape[1])

    def reorder(state: tuple[StaticCache, int], rows: Tensor) -> tuple[StaticCache, int]:
        state[0].keys = [x[rows] for x in state[0].keys]
        state[0].values = [x[rows] for x in state[0].values]
        return state

    return {"target": model, "prefill": prefill, "step": step, "reorder": reorder}


class CachedCrossAttention(nn.Module):
    """Cross-attention that projects the memory once while decoding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.projected: Tensor | None = None

    def forward(self, x: Tensor, memory: Tensor, use_cache: bool) -> Tensor:
        if not use_cache:
            projected = self.kv(memory)
        elif self.projected is not None and self.projected.shape[:2] == memory.shape[:2]:
            projected = self.projected
        else:
            projected = self.projected = self.kv(memory).detach()
        k, v = projected.chunk(2, dim=-1)
        return self.out((self.q(x) @ k.mT / 4).softmax(-1) @ v)


class TranslationModel(nn.Module):
    """An encoder-decoder that caches both kinds of attention."""

    def __init__(self, vocab_size: int = 50, d_model: int = 16) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab_size, d_model)
        self.encoder, self.decoder = Attention(d_model), nn.Linear(d_model, 3 * d_model)
        self.cross_attn, self.ffn = CachedCrossAttention(d_model), FeedForward(d_model, 32)
        self.lm_head = nn.Linear(d_model, vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        past_key_values: Past = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        memory = self.shared(input_ids)
        memory = memory + self.encoder(memory)
        x = self.shared(decoder_input_ids)
        q, k, v = self.decoder(x).chunk(3, dim=-1)
        if past_key_values is not None:
            k, v = torch.cat([past_key_values[0], k], dim=1), torch.cat([past_key_values[1], v], dim=1)
        past = k.shape[1] - q.shape[1]
        position = torch.arange(k.shape[1])
        rotated, keys = rotate(q[:, None], position[past:]), rotate(k[:, None], position)
        mask = causal(q.shape[1], k.shape[1])
        x = x + F.scaled_dot_product_attention(rotated, keys, v[:, None], attn_mask=mask)[:, 0]
        x = x + self.cross_attn(x, memory, use_cache)
        logits = self.lm_head(x + self.ffn(x))
        return SimpleNamespace(logits=logits, past_key_values=(k, v) if use_cache else None)


def prove_memory() -> float:
    """Another source for each text."""
    model = ready(memory_of_the_input_before)

    def step(text: Tensor, past: Past, start: int) -> tuple[Tensor, Past]:
        output = model(sources[0], text, past_key_values=past, use_cache=True)
        return output.logits, output.past_key_values

    def full(text: Tensor) -> Tensor:
        sources[0] = (text[:, :1] * torch.arange(1, 7)) % 50
        return model(sources[0], text).logits

    sources = [torch.zeros(1)]
    return cache(full, chunked(step))


@case(
    leaks=True,
    kinds=("cache", "batch"),
    modules=("cross_attn", ""),
    after="a common mistake: the projected memory of one input is kept for the next of the same shape",
    prove=prove_memory,
)
def memory_of_the_input_before() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": TranslationModel()}


class TimeFirstLM(nn.Module):
    """One tensor of keys and values, time first, rows second."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(vocab, dim), nn.Linear(dim, 3 * dim)
        self.mlp, self.head = FeedForward(dim, 32), nn.Linear(dim, vocab)

    def decode(self, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens.T)
        q, kv = self.qkv(x).split([x.shape[-1], 2 * x.shape[-1]], dim=-1)
        memory = torch.cat([memory, kv])
        k, v = memory.chunk(2, dim=-1)
        back = torch.arange(len(memory) - len(x), len(memory))[:, None] - torch.arange(len(memory))
        scores = torch.einsum("tbd,sbd->bts", q, k) / 4 - 0.3 * back.to(x.dtype)
        y = torch.einsum("bts,sbd->tbd", scores.masked_fill(back < 0, -math.inf).softmax(-1), v)
        return self.head(x + y + self.mlp(x + y)).transpose(0, 1), memory

    def forward(self, tokens: Tensor) -> Tensor:
        empty = self.head.weight.new_zeros(0, len(tokens), 2 * self.embed.embedding_dim)
        return self.decode(tokens, empty)[0]


@case(
    leaks=False,
    after="callables of a user for a cache with rows on the second axis, batch of rows reordered by the user",
    prove=lambda: prove_callables(time_first_callables),
)
def time_first_callables() -> dict[str, Any]:
    torch.manual_seed(0)
    model = TimeFirstLM()

    def prefill(tokens: Tensor) -> tuple[Tensor, Tensor]:
        return model.decode(tokens, model.head.weight.new_zeros(0, len(tokens), 32))

    return {
        "target": model,
        "prefill": prefill,
        "step": model.decode,
        "reorder": lambda memory, rows: memory.index_select(1, rows),
    }
