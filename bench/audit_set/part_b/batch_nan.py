"""Rows of a batch that influence each other, and NaN from queries that see nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import keepleft as kl

from ..case import case
from .layers import Attention, Block, FeedForward, RMSNorm, merge, rotate, split, tril
from .proofs import batch, future, nans, padding, ready


class CapacityMoE(nn.Module):
    """Top-1 experts that take so many tokens of the batch and drop the rest."""

    def __init__(self, dim: int, num_experts: int = 4, capacity_factor: float = 1.0) -> None:
        super().__init__()
        self.capacity_factor, self.router = capacity_factor, nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(FeedForward(dim, dim) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, choice = self.router(flat).softmax(-1).max(dim=-1)
        capacity = math.ceil(self.capacity_factor * len(flat) / len(self.experts))
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            index = (choice == number).nonzero()[:capacity, 0]
            out = out.index_add(0, index, expert(flat[index]) * weight[index, None])
        return out.view_as(x)


class DroplessMoE(CapacityMoE):
    """Top-2 experts that take all their tokens, sorted by expert."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, choices = self.router(flat).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = choices.flatten().argsort(stable=True)
        counts = choices.flatten().bincount(minlength=len(self.experts)).tolist()
        parts = flat.repeat_interleave(2, dim=0)[order].split(counts)
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        done = done[order.argsort()].view(len(flat), 2, -1)
        return (done * weights[..., None]).sum(1).view_as(x)


class MixtureLM(nn.Module):
    """A decoder with a mixture of experts."""

    def __init__(self, moe: type[CapacityMoE], vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens, self.block, self.norm = nn.Embedding(vocab_size, dim), Block(dim), RMSNorm(dim)
        self.moe, self.lm_head = moe(dim), nn.Linear(dim, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.block(self.embed_tokens(input_ids), tril(input_ids.shape[1]))
        return self.lm_head(x + self.moe(self.norm(x)))


@case(
    leaks=True,
    kinds=("batch", "future"),
    modules=("moe", ""),
    after="a common mistake: the capacity of experts counts the tokens of all rows (Switch Transformers)",
    prove=lambda: batch(ready(expert_capacity)),
)
def expert_capacity() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": MixtureLM(CapacityMoE)}


@case(
    leaks=False,
    after="dropless top-2 experts over the flattened batch: only the shapes of the products change",
    prove=lambda: max(batch(ready(experts_without_limit)), future(ready(experts_without_limit))),
)
def experts_without_limit() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": MixtureLM(DroplessMoE)}


class SortedRNN(nn.Module):
    """A left-to-right GRU over rows sorted by length, as packing once required."""

    def __init__(self, ntoken: int = 50, ninp: int = 16) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(ntoken, ninp), nn.GRU(ninp, ninp, batch_first=True)
        self.decoder = nn.Linear(ninp, ntoken)

    def restore(self, out: Tensor, order: Tensor) -> Tensor:
        return out[order]

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            lengths = torch.full((len(tokens),), tokens.shape[1])
        order = lengths.argsort(descending=True, stable=True)
        packed = pack_padded_sequence(
            self.encoder(tokens[order]), lengths[order].clamp(min=1).cpu(), batch_first=True
        )
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.decoder(self.restore(out, order))


class RestoredRNN(SortedRNN):
    """The same."""

    def restore(self, out: Tensor, order: Tensor) -> Tensor:
        return torch.empty_like(out).index_copy(0, order, out)


@case(
    leaks=True,
    kinds=("batch", "padding"),
    modules=("", "rnn", "decoder"),
    after="a common mistake: rows sorted by length are put back with the order, not with its inverse",
    prove=lambda: padding(lambda text, real: ready(rows_put_back_by_order)(text, real.sum(1))),
)
def rows_put_back_by_order() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": SortedRNN()}


def prove_restored() -> float:
    """Padding, the future, and other rows."""
    model = ready(rows_put_back)
    return max(padding(lambda text, real: model(text, real.sum(1))), future(model), batch(model))


@case(leaks=False, after="rows sorted by length and put back where they came from", prove=prove_restored)
def rows_put_back() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RestoredRNN()}


class QuantLinear(nn.Linear):
    """A linear layer whose input is rounded to a few levels, scaled by its largest value."""

    def scale(self, x: Tensor) -> Tensor:
        return x.abs().max() / 7

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x.detach()).clamp(min=1e-8)
        rounded = (x / scale).round().clamp(-7, 7) * scale
        return F.linear(x + (rounded - x).detach(), self.weight, self.bias)


class TokenQuantLinear(QuantLinear):
    """The same with a scale for each token."""

    def scale(self, x: Tensor) -> Tensor:
        return x.abs().amax(dim=-1, keepdim=True) / 7


class QuantLM(nn.Module):
    """A decoder trained with rounded activations."""

    def __init__(self, linear: type[QuantLinear], vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, dim), nn.LayerNorm(dim)
        self.qkv, self.proj, self.fc, self.head = (linear(dim, n) for n in (3 * dim, dim, dim, vocab))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (split(y, 2) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        positions = torch.arange(tokens.shape[1])
        y = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, is_causal=True)
        x = x + self.proj(merge(y))
        return self.head(x + torch.tanh(self.fc(self.norm(x))))


@case(
    leaks=True,
    kinds=("batch", "future"),
    modules=("", "qkv", "proj", "fc", "head"),
    after="a common mistake: activations are quantized by the largest value of the whole batch",
    prove=lambda: batch(ready(scale_of_the_batch)),
)
def scale_of_the_batch() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": QuantLM(QuantLinear)}


@case(
    leaks=False,
    after="activations quantized with one scale for each token",
    prove=lambda: max(batch(ready(scale_of_the_token)), future(ready(scale_of_the_token))),
)
def scale_of_the_token() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": QuantLM(TokenQuantLinear)}


class GuardedAttention(nn.Module):
    """Attention that gives zero where a query sees nothing."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.zeros_like(scores).masked_fill(~mask, float("-inf"))
        return torch.where(mask.any(-1, keepdim=True), (scores + hidden).softmax(-1), 0.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        positions = torch.arange(x.shape[1])
        scores = rotate(q, positions) @ rotate(k, positions).mT / math.sqrt(q.shape[-1])
        return self.out(merge(self.weigh(scores, mask) @ v))


class FilledAttention(GuardedAttention):
    """The same; scores are filled, so that nothing flows back through hidden ones."""

    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.where(mask.any(-1, keepdim=True), weights, 0.0)


class OnlineAttention(GuardedAttention):
    """Keys in blocks of four, with a running maximum and a running sum."""

    def shift(self, highest: Tensor) -> Tensor:
        return highest

    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        scores = scores.masked_fill(~mask, float("-inf"))
        highest = torch.full_like(scores[..., :1], float("-inf"))
        total, parts = torch.zeros_like(highest), []
        for block in scores.split(4, dim=-1):
            new = torch.maximum(highest, block.amax(-1, keepdim=True)).detach()
            shrink, part = torch.exp(highest - self.shift(new)), torch.exp(block - self.shift(new))
            parts = [old * shrink for old in parts] + [part]
            total, highest = total * shrink + part.sum(-1, keepdim=True), new
        return torch.cat(parts, dim=-1) / total.clamp(min=torch.finfo(total.dtype).tiny)


class ShiftedOnlineAttention(OnlineAttention):
    """The same; a maximum of minus infinity counts as zero."""

    def shift(self, highest: Tensor) -> Tensor:
        return highest.masked_fill(highest == float("-inf"), 0.0)


class LeftPaddedLM(nn.Module):
    """A decoder for prompts with padding on either side."""

    def __init__(self, attention: type[GuardedAttention], vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.attns = nn.ModuleList(attention(dim) for _ in range(2))
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(2))
        self.mlp, self.lm_head = FeedForward(dim, 32), nn.Linear(dim, vocab_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = tril(input_ids.shape[1]).expand(len(input_ids), 1, -1, -1)
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None, :]
        x = self.embed_tokens(input_ids)
        for norm, attn in zip(self.norms, self.attns, strict=True):
            x = x + attn(norm(x), mask)
        return self.lm_head(x + self.mlp(x))


ATTENTIONS = ("", "attns.0", "attns.1")


@case(
    leaks=True,
    kinds=("nan",),
    modules=(*ATTENTIONS, "attns.0.qkv", "attns.1.qkv"),
    after="after pytorch/pytorch #41508 (zeros put in after the softmax: the gradient is NaN)",
    prove=lambda: nans(model := ready(zeros_after_the_softmax), model),
)
def zeros_after_the_softmax() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": LeftPaddedLM(GuardedAttention)}


@case(
    leaks=True,
    kinds=("nan", "padding"),
    modules=ATTENTIONS,
    after="after tracel-ai/burn #4697 (a block of padding first: minus infinity minus minus infinity)",
    prove=lambda: nans(model := ready(online_softmax), model),
)
def online_softmax() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": LeftPaddedLM(OnlineAttention)}


def prove_left_padded(build: Any) -> float:
    """Both sides, NaN forward and backward, the future, other rows."""
    model = ready(build)
    sizes = padding(model, sides=("left", "right")), future(model), batch(model), nans(model, model)
    return max(sizes)


@case(
    leaks=False,
    after="looks like pytorch/pytorch #41508, but the gradient of masked_fill stops the NaN",
    prove=lambda: prove_left_padded(zeros_after_filled_scores),
)
def zeros_after_filled_scores() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": LeftPaddedLM(FilledAttention)}


@case(
    leaks=False,
    after="an online softmax in blocks whose maximum of minus infinity is taken as zero",
    prove=lambda: prove_left_padded(online_softmax_shifted),
)
def online_softmax_shifted() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": LeftPaddedLM(ShiftedOnlineAttention)}


class ContextTagger(nn.Module):
    """An encoder that adds the mean of the sentence to each word."""

    def __init__(self, n_words: int = 50, n_labels: int = 7, dim: int = 16) -> None:
        super().__init__()
        self.emb, self.attn = nn.Embedding(n_words, dim), Attention(dim)
        self.norm, self.classifier = nn.LayerNorm(dim), nn.Linear(2 * dim, n_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        x = self.emb(input_ids)
        x = self.norm(x + self.attn(x, attention_mask.bool()[:, None, None, :]))
        weight = attention_mask.to(x.dtype).unsqueeze(-1)
        mean = (x * weight).sum(dim=1) / weight.sum(dim=1)
        return self.classifier(torch.cat([x, mean[:, None].expand_as(x)], dim=-1))


@case(
    leaks=True,
    kinds=("nan",),
    modules=("", "classifier"),
    after="a common mistake: a masked mean divides by a count of zero where a row is all padding",
    prove=lambda: nans(model := ready(mean_of_nothing), model, sides=("right",)),
)
def mean_of_nothing() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ContextTagger(), "claim": kl.full}
