"""Masks that are built, filled, placed or broadcast wrongly, and masks that only look so."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepleft as kl
from audit_set.case import case
from audit_set.proofs import after_prefix, future, outside, padding, sweep

VOCAB = 50


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int, block_size: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head
        tri = torch.tril(torch.ones(block_size, block_size), diagonal=1)
        self.register_buffer("bias", tri.view(1, 1, block_size, block_size))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = (
            t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for t in self.c_attn(x).split(C, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int, block_size: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, block_size)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int = VOCAB, n_embd: int = 24, n_head: int = 3, block_size: int = 64) -> None:
        super().__init__()
        self.block_size = block_size
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head, block_size) for _ in range(2))
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        t = idx.size(1)
        if t > self.block_size:
            raise ValueError(f"cannot forward {t} tokens, block size is only {self.block_size}")
        x = self.wte(idx) + self.wpe(torch.arange(t, device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


@case(
    leaks=True,
    kinds=("future",),
    modules=("h.0.attn", "h.1.attn"),
    after="a common mistake: torch.tril(…, diagonal=1) where the diagonal should be 0",
    prove=lambda: future(gpt_tril_diagonal),
)
def gpt_tril_diagonal() -> dict[str, Any]:
    """A GPT in the style of nanoGPT whose buffer has one diagonal too many."""
    torch.manual_seed(0)
    return {"target": GPT()}


class MaskedAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.dense = nn.Linear(dim, dim)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        b, t, d = hidden.shape
        split = lambda x: x.reshape(b, t, self.heads, -1).permute(0, 2, 1, 3)
        q, k, v = split(self.query(hidden)), split(self.key(hidden)), split(self.value(hidden))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(d // self.heads)
        scores = scores + (1.0 - mask.to(scores.dtype)) * -10000.0
        context = torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), v)
        return self.dense(context.reshape(b, t, d))


class SmallDecoder(nn.Module):
    def __init__(self, vocab: int = VOCAB, dim: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim)
        self.attention = MaskedAttention(dim, 2)
        self.norm = nn.LayerNorm(dim)
        self.cls = nn.Linear(dim, vocab)

    def forward(self, input_ids: Tensor) -> Tensor:
        t = input_ids.shape[1]
        mask = torch.ones(t, t, device=input_ids.device).tril()
        x = self.embeddings(input_ids)
        return self.cls(self.norm(x + self.attention(x, mask)))


def _with_large_scores(model: SmallDecoder, tokens: Tensor) -> Tensor:
    """The output with queries as large as training can make them."""
    saved = model.attention.query.weight.data
    model.attention.query.weight.data = saved * 1e5
    output = model(tokens)
    model.attention.query.weight.data = saved
    return output


@case(
    leaks=True,
    kinds=("future",),
    modules=("attention",),
    after="a common mistake: a fill of -10000, which large scores exceed (BERT's additive mask)",
    prove=lambda: future(additive_mask_ten_thousand, _with_large_scores),
)
def additive_mask_ten_thousand() -> dict[str, Any]:
    """A decoder whose additive mask is finite and small."""
    torch.manual_seed(0)
    return {"target": SmallDecoder()}


class MultiHead(nn.Module):
    def __init__(self, d_model: int, n_heads: int = 4) -> None:
        super().__init__()
        self.h = n_heads
        self.qkv = nn.Linear(d_model, d_model * 3, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.axis = -2

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        dots = q @ k.mT * (d // self.h) ** -0.5
        dots = dots.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), -torch.inf)
        return self.out((dots.softmax(dim=self.axis) @ v).transpose(1, 2).reshape(b, n, d))


class PreNormLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), MultiHead(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class EncoderStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 32)
        self.layers = nn.Sequential(PreNormLayer(32), PreNormLayer(32))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.emb(tokens)))


@case(
    leaks=True,
    kinds=("future",),
    modules=("layers.0.attn", "layers.1.attn"),
    after="a common mistake: softmax over the queries (dim=-2) instead of the keys",
    prove=lambda: future(softmax_over_queries),
)
def softmax_over_queries() -> dict[str, Any]:
    """Attention whose weights add up to one over the wrong axis; the mask itself is right."""
    torch.manual_seed(0)
    return {"target": EncoderStack()}


class WeightedSum(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))

    def weights(self, scores: Tensor, tri: Tensor) -> Tensor:
        return scores.softmax(-1) * tri

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-2]
        tri = torch.ones(n, n, device=x.device, dtype=x.dtype).tril()
        scores = self.to_q(x) @ self.to_k(x).transpose(1, 2) * x.shape[-1] ** -0.5
        return self.weights(scores, tri) @ self.to_v(x)


class WeightedMean(WeightedSum):
    def weights(self, scores: Tensor, tri: Tensor) -> Tensor:
        top = scores.masked_fill(tri == 0, -torch.inf).amax(-1, keepdim=True)
        raw = torch.exp((scores - top).clamp(max=0.0)) * tri
        return raw / raw.sum(-1, keepdim=True)


class TinyLM(nn.Module):
    def __init__(self, mixer: nn.Module, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.mixer, self.unembed = nn.Embedding(VOCAB, dim), mixer, nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.unembed(x + self.mixer(x))


@case(
    leaks=True,
    kinds=("future",),
    modules=("mixer",),
    after="a common mistake: weights multiplied by the mask after the softmax, and not renormalised",
    prove=lambda: future(mask_multiplied_after_softmax),
)
def mask_multiplied_after_softmax() -> dict[str, Any]:
    """Attention weights that are cut after the softmax: what is cut stays in the denominator."""
    torch.manual_seed(0)
    return {"target": TinyLM(WeightedSum(16))}


@case(
    leaks=False,
    after="a common mistake, done right: exponentials multiplied by the mask, then renormalised",
    prove=lambda: sweep(mask_multiplied_before_the_sum),
)
def mask_multiplied_before_the_sum() -> dict[str, Any]:
    """Exponentials that are cut before they are added up, with a maximum over visible scores only."""
    torch.manual_seed(0)
    return {"target": TinyLM(WeightedMean(16))}


class MemoryAttention(nn.Module):
    def __init__(self, dim: int, heads: int = 2, num_mem_kv: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = nn.Linear(dim, dim * 3, bias=False), nn.Linear(dim, dim)
        self.mem_k = nn.Parameter(torch.randn(heads, num_mem_kv, dim // heads))
        self.mem_v = nn.Parameter(torch.randn(heads, num_mem_kv, dim // heads))

    def join(self, mem: Tensor, t: Tensor) -> Tensor:
        return torch.cat((mem.expand(t.size(0), -1, -1, -1), t), dim=-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        k, v = self.join(self.mem_k, k), self.join(self.mem_v, v)
        i, j = q.shape[-2], k.shape[-2]
        allowed = torch.ones(i, j, dtype=torch.bool, device=x.device).tril(j - i)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.to_out(out.transpose(1, 2).flatten(2))


class AppendedMemory(MemoryAttention):
    def join(self, mem: Tensor, t: Tensor) -> Tensor:
        return torch.cat((t, mem.expand(t.size(0), -1, -1, -1)), dim=-2)


@case(
    leaks=True,
    kinds=("future",),
    modules=("mixer",),
    after="a common mistake: memory keys appended at the end while the mask's offset expects them in front",
    prove=lambda: future(memory_keys_behind),
)
def memory_keys_behind() -> dict[str, Any]:
    """Learned memory keys and values (as in x-transformers) under a causal mask with offset j - i."""
    torch.manual_seed(0)
    return {"target": TinyLM(AppendedMemory(16))}


@case(
    leaks=False,
    after="a common mistake, done right: memory keys in front, causal mask with offset j - i",
    prove=lambda: sweep(memory_keys_in_front),
)
def memory_keys_in_front() -> dict[str, Any]:
    """A causal mask whose diagonal is 3: the first three keys are learned and belong to no position."""
    torch.manual_seed(0)
    return {"target": TinyLM(MemoryAttention(16))}


class HeadwisePadding(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.w_q, self.w_k, self.w_v = (nn.Linear(dim, dim) for _ in range(3))
        self.heads = heads
        self.fc = nn.Linear(dim, VOCAB)

    def fold(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        return x.view(b, t, self.heads, -1).transpose(1, 2).reshape(b * self.heads, t, -1)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        h = self.emb(x)
        b, t, d = h.shape
        scores = torch.bmm(self.fold(self.w_q(h)), self.fold(self.w_k(h)).mT) / (d / self.heads) ** 0.5
        scores = scores + torch.full((t, t), -1e9, device=x.device).triu(1).to(scores.dtype)
        if key_padding_mask is not None:  # True where there is padding
            pad = key_padding_mask.bool().repeat(self.heads, 1).unsqueeze(1)
            scores = scores.masked_fill(pad, torch.finfo(scores.dtype).min)
        out = torch.bmm(scores.softmax(-1), self.fold(self.w_v(h)))
        return self.fc(h + out.view(b, self.heads, t, -1).transpose(1, 2).reshape(b, t, d))


@case(
    leaks=True,
    kinds=("padding", "batch", "future"),
    modules=("",),
    after="a common mistake: key_padding_mask.repeat(heads, 1) where rows lie as (batch · heads)",
    prove=lambda: padding(
        padding_repeated_over_heads, lambda m, x, mask: m(x, key_padding_mask=mask == 0), sides=("left",)
    ),
)
def padding_repeated_over_heads() -> dict[str, Any]:
    """Padding masks of the wrong rows reach the heads as soon as a batch has several rows."""
    torch.manual_seed(0)
    return {"target": HeadwisePadding()}


class LocalLayer(nn.Module):
    def __init__(self, dim: int, window: int) -> None:
        super().__init__()
        self.window, self.norm = window, nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        pos = torch.arange(x.size(1), device=x.device)
        dist = pos[:, None] - pos[None, :]
        mask = (dist >= 0) & (dist <= self.window)
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1))


@case(
    leaks=True,
    kinds=("future",),
    modules=("1", "1.0", "1.1"),
    after="after mlx-lm #390 (a window mask with one position too many)",
    prove=lambda: future(window_of_nine, lengths=(18, 20, 30), hidden=outside(8, 2), most=30),
)
def window_of_nine() -> dict[str, Any]:
    """Two windowed layers, each of which sees one position further back than its claim of eight."""
    torch.manual_seed(0)
    layers = nn.Sequential(LocalLayer(16, 8), LocalLayer(16, 8))
    model = nn.Sequential(nn.Embedding(VOCAB, 16), layers, nn.Linear(16, VOCAB))
    return {"target": model, "claim": kl.causal & kl.window(8), "layers": 2}


class UnfoldedWindow(nn.Module):
    def __init__(self, dim: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        t = x.size(1)
        kv = F.pad(self.kv(x), (0, 0, self.window - 1, 0)).unfold(1, self.window, 1)  # b t 2d w
        k, v = kv.chunk(2, dim=2)
        scores = torch.einsum("btd,btdw->btw", self.q(x), k) / x.size(-1) ** 0.5
        slot = torch.arange(t, device=x.device)[:, None] - torch.arange(
            self.window - 1, -1, -1, device=x.device
        )
        weights = scores.masked_fill(slot < 0, -torch.inf).softmax(-1)
        return x + self.o(torch.einsum("btw,btdw->btd", weights, v))


@case(
    leaks=False,
    after="a common mistake, done right: window attention by unfold with window - 1 zeros in front",
    prove=lambda: sweep(window_by_unfold, hidden=outside(8, 2)),
)
def window_by_unfold() -> dict[str, Any]:
    """Two layers in which each query gathers exactly its last eight keys."""
    torch.manual_seed(0)
    layers = (UnfoldedWindow(16, 8), UnfoldedWindow(16, 8))
    model = nn.Sequential(nn.Embedding(VOCAB, 16), *layers, nn.Linear(16, VOCAB))
    return {"target": model, "claim": kl.causal & kl.window(8), "layers": 2}


class PrefixLM(nn.Module):
    def __init__(self, prefix_len: int = 5, dim: int = 16) -> None:
        super().__init__()
        self.prefix_len = prefix_len
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(80, dim)
        self.qkv, self.o, self.lm = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, VOCAB)

    def mask(self, t: int, device: torch.device) -> Tensor:
        row, col = torch.arange(t, device=device)[:, None], torch.arange(t, device=device)[None]
        return (col <= row) | (col < self.prefix_len)

    def forward(self, ids: Tensor) -> Tensor:
        t = ids.size(1)
        if t > self.pos.num_embeddings:
            raise ValueError(f"{t} tokens are too many")
        x = self.tok(ids) + self.pos.weight[:t]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mask = self.mask(t, ids.device)
        return self.lm(x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class PromptLM(PrefixLM):
    def mask(self, t: int, device: torch.device) -> Tensor:
        row, col = torch.arange(t, device=device)[:, None], torch.arange(t, device=device)[None]
        return (col <= row) | ((row <= self.prefix_len) & (col <= self.prefix_len))


@case(
    leaks=True,
    kinds=("future",),
    modules=("",),
    after="a common mistake: a prefix of n taken as positions 0 to n inclusive",
    prove=lambda: future(prefix_of_six, hidden=after_prefix(5), most=20),
)
def prefix_of_six() -> dict[str, Any]:
    """A prefix language model whose prefix is one position longer than its claim of five."""
    torch.manual_seed(0)
    return {"target": PromptLM(), "claim": kl.causal | kl.prefix(5)}


@case(
    leaks=False,
    after="a common mistake, done right: a prefix of exactly n positions",
    prove=lambda: sweep(prefix_of_five, hidden=after_prefix(5)),
)
def prefix_of_five() -> dict[str, Any]:
    """A prefix language model that keeps to its claim, and looks ahead within the prefix."""
    torch.manual_seed(0)
    return {"target": PrefixLM(), "claim": kl.causal | kl.prefix(5)}


class ShiftedWindowAttention(nn.Module):
    def __init__(self, dim: int, size: int, shift: int) -> None:
        super().__init__()
        self.size, self.shift = size, shift
        self.norm, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        pad = -t % self.size
        h = F.pad(self.norm(x), (0, 0, 0, pad)).roll(-self.shift, dims=1)
        q, k, v = self.qkv(h).view(b, -1, self.size, 3 * d).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.reshape(b, t + pad, d).roll(self.shift, dims=1)
        return x + self.proj(y[:, :t])


class WindowLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.blocks = nn.ModuleList([ShiftedWindowAttention(24, 8, s) for s in (0, 4)])
        self.out = nn.Linear(24, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@case(
    leaks=True,
    kinds=("future",),
    modules=("blocks.1",),
    after="a common mistake: windows shifted by torch.roll (as in Swin) wrap the start around to the end",
    prove=lambda: future(shifted_windows, lengths=(6, 8, 14, 16), most=20),
)
def shifted_windows() -> dict[str, Any]:
    """Causal windows of eight; in the second layer, shifted by four, the first positions follow the last."""
    torch.manual_seed(0)
    return {"target": WindowLM()}


class RelativeBias(nn.Module):
    def __init__(self, heads: int, max_distance: int) -> None:
        super().__init__()
        table = torch.full((heads, 2 * max_distance), -torch.inf)
        table[:, :max_distance] = 0.3 * torch.randn(heads, max_distance)
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self, t: int) -> Tensor:
        distance = torch.arange(t)[:, None] - torch.arange(t)[None]
        return self.table[:, distance.remainder(self.table.size(1))]


class BiasOnlyLM(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2, max_distance: int = 24) -> None:
        super().__init__()
        self.heads = heads
        self.wte = nn.Embedding(VOCAB, dim)
        self.rel = RelativeBias(heads, max_distance)
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attn = (q @ k.mT / q.size(-1) ** 0.5 + self.rel(x.size(1))).softmax(-1)
        return self.head(x + self.out_proj((attn @ v).transpose(1, 2).flatten(2)))


@case(
    leaks=True,
    kinds=("future",),
    modules=("", "rel"),
    after="a common mistake: distances that wrap around in a table of biases that is also the mask",
    prove=lambda: future(relative_bias_table, lengths=(26, 33, 40), most=40),
)
def relative_bias_table() -> dict[str, Any]:
    """Distances are looked up modulo 48: a key 25 or more positions ahead counts as one in the past."""
    torch.manual_seed(0)
    return {"target": BiasOnlyLM()}


class SentenceEncoder(nn.Module):
    def __init__(self, vocab: int = VOCAB, dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.self_attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm, self.classifier = nn.LayerNorm(dim), nn.Linear(dim, 9)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        ignore = None
        if attention_mask is not None:
            ignore = attention_mask.bool()
            ignore = ignore & ~ignore.all(dim=1, keepdim=True)
        attended, _ = self.self_attn(x, x, x, key_padding_mask=ignore, need_weights=False)
        return self.classifier(self.norm(x + attended))


@case(
    leaks=True,
    kinds=("padding", "batch"),
    modules=("self_attn",),
    after="after pytorch #39321 (in nn.MultiheadAttention, True in a key padding mask means masked out)",
    prove=lambda: padding(
        padding_mask_other_sense, lambda m, x, mask: m(x, attention_mask=mask), sides=("right",)
    ),
)
def padding_mask_other_sense() -> dict[str, Any]:
    """An encoder that hides what is real from its attention, and reads the padding."""
    torch.manual_seed(0)
    return {"target": SentenceEncoder(), "claim": kl.full}


class AdditiveMaskLM(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed_tokens = nn.Embedding(VOCAB, dim)
        self.attn = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.lm_head = nn.Linear(dim, VOCAB)

    def prepare(self, mask: Tensor | None, x: Tensor) -> Tensor:
        low, t = torch.finfo(x.dtype).min, x.size(1)
        causal = torch.full((t, t), low, dtype=x.dtype, device=x.device).triu(1)[None, None]
        if mask is None:
            return causal
        expanded = (1.0 - mask[:, None, None, :].to(x.dtype)) * low
        return torch.maximum(causal + expanded, torch.tensor(low, dtype=x.dtype, device=x.device))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed_tokens(input_ids)
        bias = self.prepare(attention_mask, x)
        for attn, out in zip(self.attn, self.out, strict=True):
            q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in attn(x).chunk(3, -1))
            weights = (q @ k.mT * q.size(-1) ** -0.5 + bias).softmax(-1)
            x = x + out((weights @ v).transpose(1, 2).flatten(2))
        return self.lm_head(x)


@case(
    leaks=False,
    after="a common mistake, done right: two finite masks added, whose sum must not overflow",
    prove=lambda: max(
        sweep(additive_masks_clamped),
        padding(additive_masks_clamped, lambda m, x, mask: m(x, attention_mask=mask)),
    ),
)
def additive_masks_clamped() -> dict[str, Any]:
    """Causal and padding mask are finite, and added; there are no positions, so both sides can be padded."""
    torch.manual_seed(0)
    return {"target": AdditiveMaskLM()}


class GuardedDecoder(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(nn.MultiheadAttention(dim, 2, batch_first=True) for _ in range(2))
        self.proj = nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.emb(tokens)
        b, t, _ = x.shape
        hide = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1).expand(b, t, t)
        if key_padding_mask is not None:
            own = torch.eye(t, dtype=torch.bool, device=x.device)
            hide = (hide | key_padding_mask.bool()[:, None, :]) & ~own  # a query always sees itself
        hide = hide.repeat_interleave(2, dim=0)
        for layer in self.layers:
            x = x + layer(x, x, x, attn_mask=hide, need_weights=False)[0]
        return self.proj(x)


@case(
    leaks=False,
    after="a common mistake, done right: nn.MultiheadAttention with True for masked, merged with padding",
    prove=lambda: max(
        sweep(boolean_mask_with_own_position),
        padding(boolean_mask_with_own_position, lambda m, x, mask: m(x, key_padding_mask=mask == 0)),
    ),
)
def boolean_mask_with_own_position() -> dict[str, Any]:
    """Masks merged per row and head; queries in the padding see themselves, so that nothing is NaN."""
    torch.manual_seed(0)
    return {"target": GuardedDecoder()}


class KeyMajorAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        scores = torch.einsum("bihd,bjhd->bjih", q, k) / q.size(-1) ** 0.5
        seen = torch.ones(x.size(1), x.size(1), device=x.device).triu().bool()  # rows are keys
        weights = scores.masked_fill(~seen[None, :, :, None], -torch.inf).softmax(dim=1)
        return torch.einsum("bjih,bjhd->bihd", weights, v).flatten(2)


@case(
    leaks=False,
    after="a common mistake, done right: triu and softmax over dim 1, in a layout with keys before queries",
    prove=lambda: sweep(keys_before_queries),
)
def keys_before_queries() -> dict[str, Any]:
    """An upper triangle and a softmax over axis 1, which are right because axis 1 holds the keys."""
    torch.manual_seed(0)
    return {"target": TinyLM(KeyMajorAttention(16, 4))}


class DilatedAttention(nn.Module):
    def __init__(self, dim: int, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.norm, self.qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        padded = F.pad(self.norm(x), (0, 0, 0, -t % self.rate))
        strided = padded.view(b, -1, self.rate, d).transpose(1, 2)  # b rate t/rate d
        q, k, v = self.qkv(strided).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).reshape(b, -1, d)[:, :t]


@case(
    leaks=False,
    after="a common mistake, done right: dilated attention by reshaping, order kept within each residue",
    prove=lambda: sweep(dilated_by_reshape),
)
def dilated_by_reshape() -> dict[str, Any]:
    """Attention with strides 1, 2 and 4; zeros fill up the end, where no position looks."""
    torch.manual_seed(0)
    layers = (DilatedAttention(16, rate) for rate in (1, 2, 4))
    return {"target": nn.Sequential(nn.Embedding(VOCAB, 16), *layers, nn.Linear(16, VOCAB))}
