"""Caches: objects with layers, buffers, rings, pages, quantised keys, and states that are kept too long."""

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
from ..part_b.layers import FeedForward, RMSNorm, merge, rotate, split
from ..part_b.proofs import batch, cache, future, logits_of, ready

Past = Any
Decode = Callable[[Tensor, tuple[int, ...], Tensor | None], Tensor]


def in_chunks(step: Callable[[Tensor, Past, int], tuple[Tensor, Past]], reorder: Any = None) -> Decode:
    """Decode chunk by chunk; rows are taken after the first."""

    def decode(text: Tensor, chunks: tuple[int, ...], rows: Tensor | None) -> Tensor:
        past, start, outputs = None, 0, []
        for size in chunks:
            logits, past = step(text[:, start : start + size], past, start)
            outputs.append(logits)
            if rows is not None and start == 0:
                past = reorder(past, rows)
            start += size
        return torch.cat(outputs, dim=1)

    return decode


def last_rows(new: int, total: int) -> Tensor:
    """Which of `total` keys the last `new` of them may see."""
    return torch.arange(total - new, total)[:, None] >= torch.arange(total)[None, :]


class LayeredCache:
    """Keys and values of each layer."""

    def __init__(self) -> None:
        self.key_cache: list[Tensor] = []
        self.value_cache: list[Tensor] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.key_cache[layer_idx].shape[2] if layer_idx < len(self.key_cache) else 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self.key_cache):
            self.key_cache.append(key)
            self.value_cache.append(value)
        else:
            self.key_cache[layer_idx] = torch.cat([self.key_cache[layer_idx], key], dim=2)
            self.value_cache[layer_idx] = torch.cat([self.value_cache[layer_idx], value], dim=2)
        return self.key_cache[layer_idx], self.value_cache[layer_idx]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.key_cache = [x.index_select(0, beam_idx) for x in self.key_cache]
        self.value_cache = [x.index_select(0, beam_idx) for x in self.value_cache]


class CachedLayer(nn.Module):
    """Rotary attention that asks the cache where it is."""

    def __init__(self, dim: int, layer_idx: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.layer_idx = heads, layer_idx
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def offset(self, past: LayeredCache) -> int:
        return past.get_seq_length()

    def forward(self, x: Tensor, past: LayeredCache | None) -> Tensor:
        q, k, v = (split(f(x), self.heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        start = 0 if past is None else self.offset(past)
        positions = torch.arange(start, start + x.shape[1])
        q, k = rotate(q, positions), rotate(k, positions)
        if past is not None:
            k, v = past.update(k, v, self.layer_idx)
        mask = last_rows(q.shape[2], k.shape[2])
        return self.o_proj(merge(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class OwnLengthLayer(CachedLayer):
    """The same; each layer asks for its own length."""

    def offset(self, past: LayeredCache) -> int:
        return past.get_seq_length(self.layer_idx)


class CachedLM(nn.Module):
    """Three layers and a cache object that is changed in place."""

    def __init__(self, layer: type[CachedLayer], vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(layer(dim, i) for i in range(3))
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(3))
        self.lm_head = nn.Linear(dim, vocab_size)

    def forward(
        self, input_ids: Tensor, past_key_values: LayeredCache | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        if use_cache and past_key_values is None:
            past_key_values = LayeredCache()
        x = self.embed_tokens(input_ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), past_key_values)
        return SimpleNamespace(logits=self.lm_head(x), past_key_values=past_key_values)


def with_past(model: nn.Module, reorder: Any = None) -> Decode:
    """Decode with past_key_values and use_cache."""

    def step(text: Tensor, past: Past, start: int) -> tuple[Tensor, Past]:
        output = model(text, past_key_values=past, use_cache=True)
        return (output.logits, output.past_key_values) if hasattr(output, "logits") else output

    return in_chunks(step, reorder)


@case(
    leaks=True,
    kinds=("cache",),
    modules=("", *(f"layers.{i}{part}" for i in (1, 2) for part in ("", ".q_proj", ".k_proj"))),
    after="a common mistake with cache objects: layers ask for the length after layer 0 has been updated",
    prove=lambda: cache(
        ready(offset_after_first_update),
        with_past(ready(offset_after_first_update)),
        chunks=((4,) + (1,) * 7,),
    ),
)
def offset_after_first_update() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": CachedLM(CachedLayer)}


def prove_own_length() -> float:
    """Chunks, reordered rows, the future, other rows."""
    model = ready(offset_of_each_layer)

    def reorder(past: LayeredCache, rows: Tensor) -> LayeredCache:
        past.reorder_cache(rows)
        return past

    return max(cache(model, with_past(model, reorder), reorder=True), future(model), batch(model))


@case(
    leaks=False,
    after="a cache object of its own class, changed in place, whose layers each know their length",
    prove=prove_own_length,
)
def offset_of_each_layer() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": CachedLM(OwnLengthLayer)}


class ConvAttention(nn.Module):
    """A short convolution in front of attention; both keep what they need in buffers."""

    def __init__(self, dim: int, taps: int = 3, rows: int = 16, slots: int = 160) -> None:
        super().__init__()
        self.taps, self.conv, self.qkv = taps, nn.Conv1d(dim, dim, taps), nn.Linear(dim, 3 * dim)
        self.register_buffer("tail", torch.zeros(rows, taps - 1, dim), persistent=False)
        self.register_buffer("slots", torch.zeros(rows, slots, 2 * dim), persistent=False)

    def before(self, x: Tensor, start_pos: int) -> Tensor:
        return self.tail[: len(x)]

    def forward(self, x: Tensor, start_pos: int | None) -> Tensor:
        if start_pos is None:
            head = x.new_zeros(len(x), self.taps - 1, x.shape[2])
        else:
            head = self.before(x, start_pos)
        u = torch.cat([head, x], dim=1)
        if start_pos is not None:
            self.tail = self.tail.index_copy(0, torch.arange(len(x)), u[:, 1 - self.taps :].detach())
        q, kv = self.qkv(F.silu(self.conv(u.mT).mT)).split([x.shape[2], 2 * x.shape[2]], dim=-1)
        if start_pos is not None:
            end = start_pos + x.shape[1]
            slots = self.slots.clone()
            slots[: len(x), start_pos:end] = kv.detach()
            self.slots, kv = slots, slots[: len(x), :end]
        k, v = kv.chunk(2, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=last_rows(q.shape[1], k.shape[1]))


class ClearedConvAttention(ConvAttention):
    """The same; a text that starts finds nothing before it."""

    def before(self, x: Tensor, start_pos: int) -> Tensor:
        return torch.zeros_like(self.tail[: len(x)]) if start_pos == 0 else self.tail[: len(x)]


class BufferedLM(nn.Module):
    """Decodes with start_pos."""

    def __init__(self, layer: type[ConvAttention], vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(layer(dim) for _ in range(2))
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, start_pos: int | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(self.norm(x), start_pos)
        return self.head(x)


def with_start(model: nn.Module) -> Decode:
    """Decode with start_pos."""
    return in_chunks(lambda text, past, start: (model(text, start_pos=start), True))


@case(
    leaks=True,
    kinds=("cache", "batch", "future"),
    modules=("", *(f"blocks.{i}{part}" for i in (0, 1) for part in ("", ".conv"))),
    after="a common mistake: slots start over at start_pos=0, but the convolution's old tail remains",
    prove=lambda: cache(ready(tail_of_the_text_before), with_start(ready(tail_of_the_text_before))),
)
def tail_of_the_text_before() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": BufferedLM(ConvAttention)}


@case(
    leaks=False,
    after="buffers in the module, done right: at start_pos=0 the convolution's tail counts as zero",
    prove=lambda: max(
        cache(ready(tail_cleared_at_the_start), with_start(ready(tail_cleared_at_the_start))),
        future(ready(tail_cleared_at_the_start)),
        batch(ready(tail_cleared_at_the_start)),
    ),
)
def tail_cleared_at_the_start() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": BufferedLM(ClearedConvAttention)}


class RollingAttention(nn.Module):
    """Sliding window; the last keys of a prompt fill the ring, then one token after another."""

    def __init__(self, dim: int, window: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.keys = self.values = torch.empty(0)

    def setup(self, rows: int) -> None:
        weight = self.wo.weight
        self.keys = weight.new_zeros(rows, self.heads, self.window, len(weight) // self.heads)
        self.values = torch.zeros_like(self.keys)

    def slots(self, positions: Tensor) -> Tensor:
        return torch.arange(len(positions))

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys, self.values = self.keys.clone(), self.values.clone()
        self.keys[: len(k), :, slots], self.values[: len(v), :, slots] = k.detach(), v.detach()

    def forward(self, x: Tensor, positions: Tensor, cached: bool) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.wqkv(x).chunk(3, dim=-1))
        q, k = rotate(q, positions), rotate(k, positions)
        if cached and int(positions[0]) > 0:
            outputs = []
            for i, position in enumerate(positions.tolist()):
                self.write(torch.tensor([position % self.window]), k[:, :, i : i + 1], v[:, :, i : i + 1])
                filled = min(position + 1, self.window)
                keys, values = self.keys[: len(x), :, :filled], self.values[: len(x), :, :filled]
                outputs.append(F.scaled_dot_product_attention(q[:, :, i : i + 1], keys, values))
            return self.wo(merge(torch.cat(outputs, dim=2)))
        if cached:
            last = slice(max(0, len(positions) - self.window), None)
            self.write(self.slots(positions[last]), k[:, :, last], v[:, :, last])
        back = positions[:, None] - positions[None, :]
        mask = (back >= 0) & (back < self.window)
        return self.wo(merge(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class SlottedAttention(RollingAttention):
    """The same; a prompt goes where single tokens would have gone."""

    def slots(self, positions: Tensor) -> Tensor:
        return positions % self.window


class RollingLM(nn.Module):
    """Sliding-window layers with setup_caches and input_pos."""

    def __init__(self, layer: type[RollingAttention], vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(layer(dim, 4) for _ in range(2))
        self.feed_forward, self.output = FeedForward(dim, 32), nn.Linear(dim, vocab_size)

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        for layer in self.layers:
            layer.setup(max_batch_size)

    def forward(self, tokens: Tensor, input_pos: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1]) if input_pos is None else input_pos
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = x + layer(x, positions, input_pos is not None)
        return self.output(x + self.feed_forward(x))


def with_positions(model: Any) -> Decode:
    """Set up, then decode with input_pos."""
    model.setup_caches(4, 32)
    return in_chunks(lambda text, past, start: (model(text, torch.arange(start, start + text.shape[1])), 0))


@case(
    leaks=True,
    kinds=("cache",),
    modules=("", "layers.0", "layers.1"),
    after="after the rolling buffer of Mistral's reference: a long prompt fills the ring from slot 0 on",
    prove=lambda: cache(ready(ring_filled_from_slot_zero), with_positions(ready(ring_filled_from_slot_zero))),
)
def ring_filled_from_slot_zero() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RollingLM(RollingAttention), "claim": kl.causal & kl.window(4), "layers": 2}


@case(
    leaks=False,
    after="a rolling buffer, done right: the last keys of a prompt go to their positions modulo the window",
    prove=lambda: max(
        cache(ready(ring_filled_by_position), with_positions(ready(ring_filled_by_position))),
        future(ready(ring_filled_by_position), reach=7, time=12),
    ),
)
def ring_filled_by_position() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RollingLM(SlottedAttention), "claim": kl.causal & kl.window(4), "layers": 2}


class QuantStore:
    """Keys and values as integers, with a scale for each token."""

    def __init__(self) -> None:
        self.ints: Tensor | None = None
        self.scales: Tensor | None = None

    def append(self, x: Tensor) -> Tensor:
        scales = x.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / 127
        ints = (x / scales).round().to(torch.int8)
        if self.ints is not None and self.scales is not None:
            ints, scales = torch.cat([self.ints, ints], dim=1), torch.cat([self.scales, scales], dim=1)
        self.ints, self.scales = ints, scales
        return ints * scales

    def take(self, rows: Tensor) -> None:
        assert self.ints is not None
        self.ints = self.ints[rows]


class QuantCacheLM(nn.Module):
    """Keys and values are always read back from int8."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(vocab, dim), nn.Linear(dim, 3 * dim)
        self.mlp, self.out = FeedForward(dim, 32), nn.Linear(dim, vocab)

    def decode(self, tokens: Tensor, stores: list[QuantStore]) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, v = stores[0].append(k), stores[1].append(v)
        back = torch.arange(k.shape[1] - x.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        scores = q @ k.mT / 4 - 0.1 * back.to(x.dtype)
        x = x + scores.masked_fill(back < 0, -math.inf).softmax(-1) @ v
        return self.out(x + self.mlp(x))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decode(tokens, [QuantStore(), QuantStore()])


def callables(build: Callable[[], dict[str, Any]], *, reorder: bool = True) -> float:
    """A full pass against prefill, step and reorder."""
    given = build()
    model = given["target"].double().eval()
    step = lambda text, past, _: given["prefill"](text) if past is None else given["step"](text, past)
    return cache(model, in_chunks(step, given["reorder"]), reorder=reorder)


@case(
    leaks=True,
    kinds=("cache", "batch"),
    modules=("", "qkv"),
    after="after reports of beam search with quantised caches: integers are reordered, scales are not",
    prove=lambda: callables(scales_left_behind),
)
def scales_left_behind() -> dict[str, Any]:
    torch.manual_seed(0)
    model = QuantCacheLM()

    def prefill(tokens: Tensor) -> tuple[Tensor, list[QuantStore]]:
        stores = [QuantStore(), QuantStore()]
        return model.decode(tokens, stores), stores

    def reorder(stores: list[QuantStore], rows: Tensor) -> list[QuantStore]:
        for store in stores:
            store.take(rows)
        return stores

    step = lambda tokens, stores: (model.decode(tokens, stores), stores)
    return {"target": model, "prefill": prefill, "step": step, "reorder": reorder}


class DraftBlock(nn.Module):
    """GPT-2's block with a causal mask for prompts."""

    def __init__(self, n_embd: int, n_head: int = 2) -> None:
        super().__init__()
        self.n_head, self.c_attn, self.c_proj = (
            n_head,
            nn.Linear(n_embd, 3 * n_embd),
            nn.Linear(n_embd, n_embd),
        )

    def bias(self, new: int, total: int) -> Tensor:
        mask = torch.zeros(new, total)
        return mask if total > new else mask.masked_fill(torch.ones(new, new).triu(1).bool(), -math.inf)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (split(y, self.n_head) for y in self.c_attn(x).chunk(3, dim=-1))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + self.bias(q.shape[2], k.shape[2]).to(q.dtype)
        return self.c_proj(merge(scores.softmax(-1) @ v)), (k, v)


class KeyAlibiBlock(DraftBlock):
    """The same with ALiBi as in BLOOM: it grows with the key's position, whatever the query's."""

    def bias(self, new: int, total: int) -> Tensor:
        return 0.3 * torch.arange(total) + torch.zeros(new, total).masked_fill(
            ~last_rows(new, total), -math.inf
        )


class DraftLM(nn.Module):
    """Returns logits and pairs of keys and values."""

    def __init__(self, block: type[DraftBlock], vocab_size: int = 50, n_embd: int = 16) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(vocab_size, n_embd), nn.ModuleList(block(n_embd) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, past_key_values: Past = None, use_cache: bool = False
    ) -> tuple[Tensor, Past]:
        x, presents = self.wte(input_ids), []
        for i, block in enumerate(self.h):
            y, present = block(x, None if past_key_values is None else past_key_values[i])
            x = x + y
            presents.append(present)
        return self.lm_head(self.ln_f(x)), tuple(presents) if use_cache else None


@case(
    leaks=True,
    kinds=("cache", "future"),
    modules=("", "h.0", "h.1"),
    after="after reports of speculative decoding: with a past, the tokens of a draft are not masked",
    prove=lambda: cache(ready(draft_tokens_unmasked), with_past(ready(draft_tokens_unmasked))),
)
def draft_tokens_unmasked() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": DraftLM(DraftBlock)}


def prove_key_alibi() -> float:
    """Chunks, rows, the future."""
    model = ready(bias_of_the_key_only)
    reorder = lambda past, rows: tuple((k[rows], v[rows]) for k, v in past)
    return max(cache(model, with_past(model, reorder), reorder=True), future(model), batch(model))


@case(
    leaks=False,
    after="ALiBi as in BLOOM: no offset of the query, which softmax would cancel anyway",
    prove=prove_key_alibi,
)
def bias_of_the_key_only() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": DraftLM(KeyAlibiBlock)}


class KeptWindowLayer(nn.Module):
    """A window of four; positions follow from how many keys are kept."""

    def __init__(self, dim: int, window: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, Past]:
        start = 0 if past is None else past[0].shape[2]
        positions = torch.arange(start, start + q.shape[2])
        q, k = rotate(q, positions), rotate(k, positions)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        return self.look(q, k, v), (k, v)

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new, total = q.shape[2], k.shape[2]
        back = torch.arange(total - new, total)[:, None] - torch.arange(total)[None, :]
        mask = (back >= 0) & (back < self.window)
        return merge(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    def forward(self, x: Tensor, past: Past) -> tuple[Tensor, Past]:
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        y, (keys, values) = self.attend(q, k, v, past)
        kept = slice(max(0, keys.shape[2] - self.window + 1), None)
        return self.out(y), (keys[:, :, kept], values[:, :, kept])


class RerotatedWindowLayer(KeptWindowLayer):
    """The same; keys are kept unrotated, and positions count inside what is kept."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, Past]:
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        positions = torch.arange(k.shape[2])
        return self.look(rotate(q, positions[-q.shape[2] :]), rotate(k, positions), v), (k, v)


class KeptWindowLM(nn.Module):
    """Two layers; the cache is a list of pairs."""

    def __init__(self, layer: type[KeptWindowLayer], vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(vocab, dim), nn.ModuleList(layer(dim) for _ in range(2))
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, cache: list[Past] | None = None) -> tuple[Tensor, list[Past]]:
        x, new = self.embed(tokens), []
        for i, layer in enumerate(self.layers):
            y, kept = layer(self.norm(x), None if cache is None else cache[i])
            x = x + y
            new.append(kept)
        return self.head(x), new


def kept_rows(past: list[Past], rows: Tensor) -> list[Past]:
    """Rows of such a cache."""
    return [(k[rows], v[rows]) for k, v in past]


@case(
    leaks=True,
    kinds=("cache",),
    modules=("", *(f"layers.{i}{part}" for i in (0, 1) for part in ("", ".qkv"))),
    after="a common mistake: the position is the length of a sliding cache, which stands still once full",
    prove=lambda: cache(
        ready(position_of_a_full_window),
        in_chunks(lambda text, past, _: ready(position_of_a_full_window)(text, past)),
    ),
)
def position_of_a_full_window() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": KeptWindowLM(KeptWindowLayer), "claim": kl.causal & kl.window(4), "layers": 2}


def prove_rerotated() -> float:
    """Chunks, rows, the window."""
    model = ready(positions_inside_the_window)
    decode = in_chunks(lambda text, past, _: model(text, past), kept_rows)
    return max(cache(model, decode, reorder=True), future(model, reach=7, time=12), batch(model))


@case(
    leaks=False,
    after="a sliding cache of unrotated keys: positions inside of it stand still, and only distances count",
    prove=prove_rerotated,
)
def positions_inside_the_window() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": KeptWindowLM(RerotatedWindowLayer), "claim": kl.causal & kl.window(4), "layers": 2}


class Pages:
    """Keys and values in pages of four tokens, found by the table of each row."""

    size = 4

    def __init__(self, rows: int, like: Tensor) -> None:
        self._like, self._count = like, 0
        self._pool: list[Tensor] = []
        self._tables: list[list[int]] = [[] for _ in range(rows)]

    def _new(self, page: Tensor | None = None) -> int:
        self._pool.append(self._like.new_zeros(self.size, self._like.shape[-1]) if page is None else page)
        return len(self._pool) - 1

    def _grow(self) -> None:
        page = self._new()
        for table in self._tables:
            table.append(page if table else self._new())

    def append(self, kv: Tensor) -> None:
        for t in range(kv.shape[1]):
            if self._count % self.size == 0:
                self._grow()
            for row, table in enumerate(self._tables):
                page = self._pool[table[-1]].clone()
                page[self._count % self.size] = kv[row, t]
                self._pool[table[-1]] = page
            self._count += 1

    def gather(self) -> Tensor:
        return torch.stack([torch.cat([self._pool[p] for p in t])[: self._count] for t in self._tables])

    def take(self, rows: list[int]) -> None:
        self._tables = [[self._new(self._pool[p].clone()) for p in self._tables[row]] for row in rows]


class OwnPages(Pages):
    """The same; every row gets a page of its own."""

    def _grow(self) -> None:
        for table in self._tables:
            table.append(self._new())


class PagedLM(nn.Module):
    """Two layers over paged memory."""

    def __init__(self, pages: type[Pages], vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.pages, self.embed_tokens = pages, nn.Embedding(vocab_size, dim)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(2))
        self.norms, self.lm_head = nn.ModuleList(RMSNorm(dim) for _ in range(2)), nn.Linear(dim, vocab_size)

    def run(self, input_ids: Tensor, memory: list[Pages] | None) -> Tensor:
        x = self.embed_tokens(input_ids)
        for i, (norm, qkv) in enumerate(zip(self.norms, self.qkv, strict=True)):
            q, kv = qkv(norm(x)).split([x.shape[2], 2 * x.shape[2]], dim=-1)
            if memory is not None:
                memory[i].append(kv)
                kv = memory[i].gather()
            total, new = kv.shape[1], x.shape[1]
            k, v = kv.chunk(2, dim=-1)
            positions = torch.arange(total)
            q, k = rotate(q[:, None], positions[-new:]), rotate(k[:, None], positions)
            mask = last_rows(new, total)
            x = x + F.scaled_dot_product_attention(q, k, v[:, None], attn_mask=mask)[:, 0]
        return self.lm_head(x)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.run(input_ids, None)


def paged(pages: type[Pages]) -> dict[str, Any]:
    """The model with callables around its private memory."""
    torch.manual_seed(0)
    model = PagedLM(pages)

    def prefill(tokens: Tensor) -> tuple[Tensor, list[Pages]]:
        kv = model.lm_head.weight.new_zeros(1, 2 * model.embed_tokens.embedding_dim)
        memory = [pages(len(tokens), kv) for _ in model.qkv]
        return model.run(tokens, memory), memory

    def reorder(memory: list[Pages], rows: Tensor) -> list[Pages]:
        for layer in memory:
            layer.take(rows.tolist())
        return memory

    step = lambda tokens, memory: (model.run(tokens, memory), memory)
    return {"target": model, "prefill": prefill, "step": step, "reorder": reorder}


@case(
    leaks=True,
    kinds=("cache", "batch"),
    modules=("", "qkv.0", "qkv.1"),
    after="a common mistake in paged caches: when a page is full, all rows are given the same new one",
    prove=lambda: callables(rows_share_a_page, reorder=False),
)
def rows_share_a_page() -> dict[str, Any]:
    return paged(Pages)


@case(
    leaks=False,
    after="a paged cache whose rows have their own pages, copied when rows are reordered",
    prove=lambda: max(callables(pages_of_each_row), future(paged(OwnPages)["target"].double())),
)
def pages_of_each_row() -> dict[str, Any]:
    return paged(OwnPages)


class LinearState:
    """Sums over keys and values, and over keys."""

    __slots__ = ("_kv", "_z")

    def __init__(self, kv: Tensor, z: Tensor) -> None:
        self._kv, self._z = kv, z

    def reorder(self, rows: Tensor) -> LinearState:
        return LinearState(self._kv[rows], self._z[rows])


class LinearAttentionLM(nn.Module):
    """Linear attention: products with a mask over a whole text, sums while decoding."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(vocab, dim), nn.Linear(dim, 3 * dim)
        self.mlp, self.head = FeedForward(dim, 32), nn.Linear(dim, vocab)

    def features(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x, F.elu(q) + 1, F.elu(k) + 1, v

    def finish(self, x: Tensor, above: Tensor, below: Tensor) -> Tensor:
        x = x + above / below[..., None]
        return self.head(x + self.mlp(x))

    def forward(self, tokens: Tensor) -> Tensor:
        x, q, k, v = self.features(tokens)
        scores = (q @ k.mT).tril()
        return self.finish(x, scores @ v, scores.sum(-1))

    def start(self, tokens: Tensor) -> tuple[Tensor, LinearState]:
        x, q, k, v = self.features(tokens)
        scores = (q @ k.mT).tril()
        return self.finish(x, scores @ v, scores.sum(-1)), LinearState(k.mT @ v, k.sum(1))

    def step(self, tokens: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        x, q, k, v = self.features(tokens)
        kv, z, above, below = state._kv, state._z, [], []
        for t in range(tokens.shape[1]):
            kv, z = kv + k[:, t, :, None] * v[:, t, None, :], z + k[:, t]
            above.append(torch.einsum("bd,bde->be", q[:, t], kv))
            below.append((q[:, t] * z).sum(-1))
        return self.finish(x, torch.stack(above, 1), torch.stack(below, 1)), LinearState(kv, z)


def prove_linear() -> float:
    """start and step against one pass, rows reordered, the future, other rows."""
    model = ready(sums_and_their_normaliser)
    step = lambda text, past, _: model.start(text) if past is None else model.step(text, past)
    decode = in_chunks(step, lambda past, rows: past.reorder(rows))
    start = future(lambda text: logits_of(model.start(text)))
    return max(cache(model, decode, reorder=True), start, future(model), batch(model))


@case(
    leaks=False,
    after="linear attention with start and step: products in one pass, sums and their normaliser in steps",
    prove=prove_linear,
)
def sums_and_their_normaliser() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": LinearAttentionLM()}
