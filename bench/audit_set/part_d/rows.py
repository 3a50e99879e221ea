"""Rows that mix, and NaN in half precision, backward, and where a source is empty."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepleft as kl

from ..case import case
from ..part_b.layers import Attention, Block, FeedForward, RMSNorm, merge, rotate, split, tril
from ..part_b.proofs import batch, distance, future, nans, padding, ready, tokens


class FoldedAttention(nn.Module):
    """Heads and rows folded into one axis, heads first, for torch.bmm."""

    def __init__(self, dim: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out_proj = num_heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def unfold(self, y: Tensor, rows: int) -> Tensor:
        return y.view(rows, self.num_heads, *y.shape[1:]).transpose(1, 2)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        rows, time, dim = x.shape
        folded = self.qkv(x).view(rows, time, 3, self.num_heads, -1).permute(2, 3, 0, 1, 4)
        q, k, v = folded.reshape(3, self.num_heads * rows, time, -1)
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~visible.repeat(self.num_heads, 1, 1), torch.finfo(scores.dtype).min)
        y = self.unfold(torch.bmm(scores.softmax(-1), v), rows)
        return self.out_proj(y.reshape(rows, time, dim))


class RightlyFoldedAttention(FoldedAttention):
    """The same, unfolded as it was folded; so the mask may be repeated as a whole."""

    def unfold(self, y: Tensor, rows: int) -> Tensor:
        return y.view(self.num_heads, rows, *y.shape[1:]).permute(1, 2, 0, 3)


class FoldedLM(nn.Module):
    """Two layers, learned positions from the mask."""

    def __init__(self, attention: type[FoldedAttention], vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab_size, dim), nn.Embedding(128, dim)
        self.attn = nn.ModuleList(attention(dim) for _ in range(2))
        self.norm, self.head = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2)), nn.Linear(dim, vocab_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        visible = tril(input_ids.shape[1]) & real.bool()[:, None, :]
        x = self.embed(input_ids) + self.pos((real.cumsum(-1) - 1).clamp(min=0))
        for norm, attn in zip(self.norm, self.attn, strict=True):
            x = x + attn(norm(x), visible)
        return self.head(x)


@case(
    leaks=True,
    kinds=("batch", "padding"),
    modules=("", *(f"attn.{i}{part}" for i in (0, 1) for part in ("", ".out_proj"))),
    after="a common mistake: heads and rows are folded heads first, and viewed back rows first",
    prove=lambda: batch(ready(heads_viewed_as_rows)),
)
def heads_viewed_as_rows() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": FoldedLM(FoldedAttention)}


def prove_folded() -> float:
    """Everything that a decoder with a mask may get wrong."""
    model = ready(heads_folded_before_rows)
    sizes = [batch(model, rows=n, time=t) for n, t in ((2, 5), (3, 9), (5, 4))]
    return max(*sizes, padding(model, sides=("left", "right")), future(model), nans(model, model))


@case(
    leaks=False,
    after="heads first in the folded axis, done right: the mask repeated as a whole, heads unfolded first",
    prove=prove_folded,
)
def heads_folded_before_rows() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": FoldedLM(RightlyFoldedAttention)}


class HalvedFeedForward(nn.Module):
    """Large batches go through in two halves, to save memory."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = FeedForward(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 4:
            return self.inner(x)
        return torch.cat([self.inner(x[::2]), self.inner(x[1::2])])


class HalvedLM(nn.Module):
    """A decoder with such layers."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.attn = nn.Embedding(vocab, dim), Attention(dim)
        self.norms, self.mlp = nn.ModuleList(RMSNorm(dim) for _ in range(2)), HalvedFeedForward(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        x = self.embed(tokens)
        x = x + self.attn(self.norms[0](x), tril(time), positions=torch.arange(time))
        return self.head(x + self.mlp(self.norms[1](x)))


@case(
    leaks=True,
    kinds=("batch",),
    modules=("", "mlp", "mlp.inner", "head"),
    after="a common mistake: four rows or more are computed as even and odd ones, then just joined",
    prove=lambda: batch(ready(four_rows_in_two_halves), rows=4),
)
def four_rows_in_two_halves() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": HalvedLM()}


class BalancedMoE(nn.Module):
    """Top-1 experts, chosen with a bias that keeps them balanced while training."""

    def __init__(self, dim: int, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(dim, dim) for _ in range(num_experts))
        self.register_buffer("bias", torch.zeros(num_experts))

    def choose(self, scores: Tensor) -> Tensor:
        if self.training:
            self.update(scores)
        return (scores + self.bias).argmax(dim=-1)

    def update(self, scores: Tensor) -> None:
        with torch.no_grad():
            counts = F.one_hot((scores + self.bias).argmax(-1).flatten(), scores.shape[-1]).to(scores.dtype)
            load = counts.mean(0)
            self.bias = self.bias - 0.5 * (load - load.mean())

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.router(x))
        choice = self.choose(scores)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = scores[..., number, None] * (choice == number)[..., None]
            out = out + weight * expert(x)
        return out


class LaterBalancedMoE(BalancedMoE):
    """The same; what a batch teaches is for the batches after it."""

    def choose(self, scores: Tensor) -> Tensor:
        choice = (scores + self.bias).argmax(dim=-1)
        if self.training:
            self.update(scores)
        return choice


class BalancedLM(nn.Module):
    """A decoder with one such layer."""

    def __init__(self, moe: type[BalancedMoE], vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens, self.block = nn.Embedding(vocab_size, dim), Block(dim)
        self.norm, self.moe, self.lm_head = RMSNorm(dim), moe(dim), nn.Linear(dim, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        time = input_ids.shape[1]
        x = self.block(self.embed_tokens(input_ids), tril(time), positions=torch.arange(time))
        return self.lm_head(x + self.moe(self.norm(x)))


def prove_this_balance() -> float:
    """Other rows, a model as new for each call; nothing in eval mode."""
    model = ready(balanced_by_this_batch)
    assert batch(model) < 1e-9
    model.train()

    def call(text: Tensor) -> Tensor:
        return copy.deepcopy(model)(text)

    return batch(call, alone=False)


@case(
    leaks=True,
    kinds=("batch", "future"),
    modules=("moe", "moe.router", ""),
    after="a common mistake in balancing without a loss: a batch updates the bias that routes it",
    prove=prove_this_balance,
)
def balanced_by_this_batch() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": BalancedLM(BalancedMoE)}


def prove_later_balance() -> float:
    """Rows and the future in both modes; the bias that a batch leaves is set back."""
    sizes = []
    for mode in (True, False):
        model = ready(balanced_by_earlier_batches).train(mode)
        call = lambda text, model=model: copy.deepcopy(model)(text)
        sizes += [batch(call), future(call)]
    return max(sizes)


@case(
    leaks=False,
    after="balancing without a loss (DeepSeek-V3): the bias learns from a batch after the batch was routed",
    prove=prove_later_balance,
)
def balanced_by_earlier_batches() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": BalancedLM(LaterBalancedMoE)}


class CentredEncoder(nn.Module):
    """Sentence vectors, centred so that their cosine tells more."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers, self.projection = nn.ModuleList(Block(dim) for _ in range(2)), nn.Linear(dim, dim)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask.bool()[:, None, None, :])
        weight = attention_mask.to(hidden.dtype)[..., None]
        vectors = self.projection((hidden * weight).sum(1) / weight.sum(1).clamp(min=1))
        if len(vectors) > 1:
            vectors = vectors - vectors.mean(dim=0, keepdim=True)
        return {"sentence_embedding": F.normalize(vectors, dim=-1)}


@case(
    leaks=True,
    kinds=("batch", "padding"),
    modules=("", "projection"),
    after="a common mistake: sentence embeddings are centred by the mean of whatever batch they are in",
    prove=lambda: batch(lambda text: ready(vectors_centred_by_the_batch)(text)["sentence_embedding"]),
)
def vectors_centred_by_the_batch() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": CentredEncoder(), "claim": kl.full}


class HalfAttention(nn.Module):
    """An additive mask of -1e9."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.dense = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, extended: Tensor) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        positions = torch.arange(x.shape[1])
        scores = rotate(q, positions) @ rotate(k, positions).mT / math.sqrt(q.shape[-1])
        return self.dense(merge((scores + extended).softmax(-1) @ v))


class HalfLM(nn.Module):
    """A decoder as it is loaded for inference."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size)
        self.attns = nn.ModuleList(HalfAttention(dim) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = tril(input_ids.shape[1])[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None, :]
        x = self.embed_tokens(input_ids)
        extended = (1.0 - mask.to(x.dtype)) * -1e9
        for norm, attn in zip(self.norms, self.attns, strict=True):
            x = x + attn(norm(x), extended)
        return self.lm_head(x)


def prove_half() -> float:
    """NaN in half precision where there is none in float32."""
    half, single = fill_overflows_in_half()["target"], HalfLM()
    assert nans(single, single) == 0.0
    return nans(half, half)


@case(
    leaks=True,
    kinds=("nan", "padding"),
    modules=("", *(f"attns.{i}{part}" for i in (0, 1) for part in ("", ".qkv"))),
    after="after reports on fp16: a mask of -1e9 is minus infinity there, and a row of it becomes NaN",
    prove=prove_half,
)
def fill_overflows_in_half() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": HalfLM().half()}


class PointerLM(nn.Module):
    """Log-probabilities with a floor where text is real, as in pointer networks."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.block, self.head = (
            nn.Embedding(vocab_size, dim),
            Block(dim),
            nn.Linear(dim, vocab_size),
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        time, mask = input_ids.shape[1], tril(input_ids.shape[1])
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None, :]
        x = self.block(self.embed(input_ids), mask, positions=torch.arange(time))
        probabilities = self.head(x).softmax(-1)
        if attention_mask is None:
            return probabilities.log()
        real = attention_mask.bool()[..., None]
        logged = (probabilities * real).log()
        return torch.where(real, logged, torch.zeros_like(logged))


def prove_backward() -> float:
    """Finite outputs, and a gradient that is not, from real positions only."""
    model = ready(log_of_masked_probabilities)
    real = torch.arange(7)[None] < torch.tensor([7, 2, 4])[:, None]
    output = model(tokens(3, 7, 90), real.long())
    assert torch.isfinite(output).all()
    output[real].sum().backward()
    return float(any(not torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None))


@case(
    leaks=True,
    kinds=("nan",),
    modules=("", "head"),
    after="a common mistake: torch.where after log(0), whose forward is finite and whose gradient is NaN",
    prove=prove_backward,
)
def log_of_masked_probabilities() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": PointerLM()}


class CrossAttention(nn.Module):
    """Attention to a source, minus infinity at its padding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor, pad: Tensor) -> Tensor:
        k, v = self.kv(memory).chunk(2, dim=-1)
        scores = self.q(x) @ k.mT / math.sqrt(x.shape[-1])
        scores = scores.masked_fill(pad[:, None, :], float("-inf"))
        return self.out(scores.softmax(-1) @ v)


class ContextLM(nn.Module):
    """A decoder with an optional context, which some rows leave empty."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.encoder, self.decoder = Block(dim), Block(dim)
        self.cross, self.head = CrossAttention(dim), nn.Linear(dim, vocab)

    def forward(self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        pad = torch.zeros_like(src).bool() if src_key_padding_mask is None else src_key_padding_mask
        memory = self.encoder(
            self.src_embed(src), ~pad[:, None, None, :], positions=torch.arange(src.shape[1])
        )
        time = tgt.shape[1]
        x = self.decoder(self.tgt_embed(tgt), tril(time), positions=torch.arange(time))
        return self.head(x + self.cross(x, memory, pad))


def prove_empty_source() -> float:
    """Nothing where sources are padded in part, NaN where one is padded as a whole."""
    model, tgt = ready(source_of_padding_only), tokens(3, 7, 91)
    call = lambda src, real: model(src, tgt, ~real)
    part = torch.arange(7)[None] < torch.tensor([7, 1, 3])[:, None]
    assert torch.isfinite(call(tokens(3, 7, 92), part)).all()
    src = tokens(2, 7, 93)
    assert distance(model(src, tgt[:2]), model(src, tgt[:2], torch.zeros(2, 7).bool())) == 0.0
    return nans(model, call, sides=("right",))


@case(
    leaks=True,
    kinds=("nan",),
    modules=("cross", "cross.kv", "cross.q", ""),
    after="a common mistake: cross-attention to an optional context is NaN for an empty one",
    prove=prove_empty_source,
)
def source_of_padding_only() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ContextLM()}
