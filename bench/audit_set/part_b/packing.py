"""Packing: several texts in one row, kept apart by segment ids, positions or boundaries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..case import case
from .layers import Block, FeedForward, RMSNorm, merge, rotate, split, tril
from .proofs import VOCAB, distance, future, logits_of, next_token, packing, ready, relative, restarts, tokens


class DocumentLM(nn.Module):
    """A language model over packed documents."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, vocab)

    def document_mask(self, doc_ids: Tensor) -> Tensor:
        return doc_ids[:, :, None] >= doc_ids[:, None, :]

    def forward(self, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        time = tokens.shape[1]
        if doc_ids is None:
            doc_ids = torch.zeros_like(tokens)
        mask = (tril(time) & self.document_mask(doc_ids))[:, None]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask, positions=torch.arange(time))
        return self.head(self.norm(x))


@case(
    leaks=True,
    kinds=("packing",),
    modules=("", *(f"layers.{i}{part}" for i in (0, 1) for part in ("", ".attn"))),
    after="a common mistake: document ids compared with >= where == is meant",
    prove=lambda: packing(ready(documents_not_before)),
)
def documents_not_before() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": DocumentLM()}


class BoundaryLM(DocumentLM):
    """Documents are numbered by counting boundaries."""

    def document_mask(self, doc_ids: Tensor) -> Tensor:
        boundary = doc_ids[:, 1:] != doc_ids[:, :-1]
        number = F.pad(boundary.long(), (2, 0)).cumsum(-1)[:, : doc_ids.shape[1]]
        return number[:, :, None] == number[:, None, :]


@case(
    leaks=True,
    kinds=("packing",),
    modules=("", *(f"layers.{i}{part}" for i in (0, 1) for part in ("", ".attn"))),
    after="a common mistake: the boundary is off by one, and first tokens are given to the text before",
    prove=lambda: packing(ready(boundary_one_late)),
)
def boundary_one_late() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": BoundaryLM()}


class GatedScan(nn.Module):
    """A state space layer with decay that depends on the input."""

    def __init__(self, dim: int, state: int = 4) -> None:
        super().__init__()
        self.in_proj, self.dt = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.B, self.C = nn.Linear(dim, state), nn.Linear(dim, state)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, dim=-1)
        decay, b, c = torch.sigmoid(self.dt(u)), self.B(u), self.C(u)
        h, ys = x.new_zeros(x.shape[0], x.shape[2], b.shape[-1]), []
        for t in range(x.shape[1]):
            h = decay[:, t, :, None] * h + u[:, t, :, None] * b[:, t, None, :]
            ys.append((h * c[:, t, None, :]).sum(-1))
        return self.out_proj(torch.stack(ys, dim=1) * F.silu(z))


class HybridLM(nn.Module):
    """State space layers and attention in turn."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.mixer, self.attention = GatedScan(dim), Block(dim)
        self.norm, self.lm_head = RMSNorm(dim), nn.Linear(dim, vocab_size)

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None) -> SimpleNamespace:
        mask = tril(input_ids.shape[1])[None, None]
        if segment_ids is not None:
            mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        x = self.embed_tokens(input_ids)
        x = x + self.mixer(self.norm(x))
        x = self.attention(x, mask)
        return SimpleNamespace(logits=self.lm_head(x))


@case(
    leaks=True,
    kinds=("packing",),
    modules=("mixer", ""),
    after="after state-spaces/mamba #478 (attention keeps packed texts apart, the state does not)",
    prove=lambda: packing(ready(hybrid_state)),
)
def hybrid_state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": HybridLM()}


class ResettingMixer(nn.Module):
    """A short causal convolution, then a scan whose decay is zero at the start of a text."""

    def __init__(self, dim: int, taps: int = 4) -> None:
        super().__init__()
        self.taps = taps
        self.conv = nn.Conv1d(dim, dim, taps, groups=dim)
        self.gate, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def short_conv(self, x: Tensor, seq_idx: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, (self.taps - 1, 0))).mT

    def forward(self, x: Tensor, seq_idx: Tensor) -> Tensor:
        starts = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
        u = F.silu(self.short_conv(x, seq_idx))
        decay = torch.sigmoid(self.gate(u)).masked_fill(starts[..., None], 0.0)
        state, states = torch.zeros_like(u[:, 0]), []
        for a, v in zip(decay.unbind(1), u.unbind(1), strict=True):
            state = a * state + (1 - a) * v
            states.append(state)
        return self.out(torch.stack(states, dim=1))


class TapByTapMixer(ResettingMixer):
    """The same with a convolution that adds one tap after another, each only inside its text."""

    def short_conv(self, x: Tensor, seq_idx: Tensor) -> Tensor:
        taps = self.conv.weight[:, 0]
        y = x * taps[:, -1] + self.conv.bias
        for back in range(1, min(self.taps, x.shape[1])):
            same = (seq_idx[:, back:] == seq_idx[:, :-back])[..., None]
            y = y + F.pad(x[:, :-back] * same * taps[:, -1 - back], (0, 0, back, 0))
        return y


class RecurrentLM(nn.Module):
    """A recurrent language model over packed texts."""

    def __init__(self, mixer: type[ResettingMixer], vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mixers = nn.ModuleList(mixer(dim) for _ in range(2))
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        seq_idx = torch.zeros_like(tokens) if segment_ids is None else segment_ids
        x = self.embed(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x), seq_idx)
        return self.head(x)


@case(
    leaks=True,
    kinds=("packing",),
    modules=tuple(f"mixers.{i}{part}" for i in (0, 1) for part in ("", ".conv")),
    after="after PrimeIntellect-ai/prime-rl #3001 (a short convolution crosses the boundary)",
    prove=lambda: packing(ready(scan_resets_conv_does_not)),
)
def scan_resets_conv_does_not() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RecurrentLM(ResettingMixer)}


class PositionPackedLM(nn.Module):
    """A decoder that finds the texts of a row by their positions."""

    def __init__(self, vocab_size: int = 50, hidden: int = 16) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(vocab_size, hidden), nn.Embedding(64, hidden)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(2))
        self.lm_head = nn.Linear(hidden, vocab_size)

    def sequence_index(self, position_ids: Tensor) -> Tensor:
        return F.pad(position_ids.diff(dim=-1) < 0, (1, 0)).cumsum(-1)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        index = self.sequence_index(position_ids)
        mask = (tril(input_ids.shape[1]) & (index[:, :, None] == index[:, None, :]))[:, None]
        hidden = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return {"logits": self.lm_head(hidden)}


@case(
    leaks=True,
    kinds=("packing",),
    modules=("", *(f"layers.{i}{part}" for i in (0, 1) for part in ("", ".attn"))),
    after="a common mistake: a new text starts where positions fall; one of a single token does not fall",
    prove=lambda: packing(lambda text, ids: ready(positions_that_fall)(text, restarts(ids))),
)
def positions_that_fall() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": PositionPackedLM()}


class PretrainLM(DocumentLM):
    """Packed pretraining: attention stays inside a text; the loss is over the row."""

    def document_mask(self, doc_ids: Tensor) -> Tensor:
        return doc_ids[:, :, None] == doc_ids[:, None, :]

    def next_labels(self, labels: Tensor, segment_ids: Tensor | None) -> Tensor:
        return labels[:, 1:]

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> SimpleNamespace:
        logits, loss = super().forward(input_ids, segment_ids), None
        if labels is not None:
            goals = self.next_labels(labels, segment_ids)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), goals.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


class PretrainInsideLM(PretrainLM):
    """The same, with a loss that asks no text for the first token of the next."""

    def next_labels(self, labels: Tensor, segment_ids: Tensor | None) -> Tensor:
        shifted = labels[:, 1:]
        if segment_ids is None:
            return shifted
        return shifted.masked_fill(segment_ids[:, 1:] != segment_ids[:, :-1], -100)


def loss_over_the_boundary(build: Any) -> float:
    """The packed loss against the mean over the texts alone, weighted by their tokens."""
    model, lengths = ready(build), (4, 2, 6)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    text = tokens(1, sum(lengths), 11)
    total = 0.0
    for segment, length in enumerate(lengths):
        single = text[:, ids[0] == segment]
        total += next_token(model(single).logits, single).item() * (length - 1)
    return relative(model(text, ids, text).loss, total / (sum(lengths) - len(lengths)))


@case(
    leaks=True,
    kinds=("packing", "labels"),
    modules=("", "head"),
    after="a common mistake: the last token of a text is trained to predict the first of its neighbour",
    prove=lambda: loss_over_the_boundary(loss_of_the_row),
)
def loss_of_the_row() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": PretrainLM()}


def prove_inside() -> float:
    """The loss, the mask, the future, and the plain loss of one text."""
    model, text = ready(loss_inside_texts), tokens(2, 8, 12)
    plain = relative(model(text, labels=text).loss, next_token(model(text).logits, text))
    return max(loss_over_the_boundary(loss_inside_texts), packing(model), future(model), plain)


@case(
    leaks=False,
    after="labels at the first token of a packed text are set to -100 inside the model",
    prove=prove_inside,
)
def loss_inside_texts() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": PretrainInsideLM()}


@case(
    leaks=False,
    after="a scan whose decay is zero at a start, a convolution that multiplies taps over a boundary by zero",
    prove=lambda: max(packing(ready(scan_and_conv_restart)), future(ready(scan_and_conv_restart))),
)
def scan_and_conv_restart() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RecurrentLM(TapByTapMixer)}


class ZeroStartsLM(PositionPackedLM):
    """A text starts at every position zero, as in the unpadded attention of transformers."""

    def sequence_index(self, position_ids: Tensor) -> Tensor:
        return (position_ids == 0).cumsum(-1)


@case(
    leaks=False,
    after="positions are the only separation: a text starts wherever they are zero",
    prove=lambda: max(
        packing(lambda text, ids: ready(positions_that_are_zero)(text, restarts(ids))),
        future(ready(positions_that_are_zero)),
    ),
)
def positions_that_are_zero() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ZeroStartsLM()}


class VarlenAttention(nn.Module):
    """Attention over a flat row of tokens, one text after another between cumulative lengths."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.wqkv, self.wo = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            q, k, v = (split(y, self.heads) for y in self.wqkv(x[None, start:end]).chunk(3, dim=-1))
            positions = torch.arange(end - start)
            q, k = rotate(q, positions), rotate(k, positions)
            out[start:end] = merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))[0]
        return self.wo(out)


class VarlenLM(nn.Module):
    """The whole batch as one flat row, cut where the row or the segment changes."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.attn = nn.Embedding(vocab, dim), VarlenAttention(dim)
        self.mlp, self.unembed = FeedForward(dim, 32), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        batch, time = tokens.shape
        cut = torch.zeros(batch, time, dtype=torch.bool)
        cut[:, 0] = True
        if segment_ids is not None:
            cut[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
        cu_seqlens = F.pad(cut.flatten().nonzero()[:, 0], (0, 1), value=batch * time)
        x = self.embed(tokens).flatten(0, 1)
        x = x + self.attn(x, cu_seqlens)
        return self.unembed(x + self.mlp(x)).unflatten(0, (batch, time))


@case(
    leaks=False,
    after="variable-length attention from cumulative lengths: rows and texts share one flat row",
    prove=lambda: max(packing(ready(flat_varlen)), future(ready(flat_varlen))),
)
def flat_varlen() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": VarlenLM()}


class FloatRotaryBlock(nn.Module):
    """Rotary angles in float32 whatever the model's precision, positions over the whole row."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        positions = torch.arange(x.shape[1], dtype=torch.float32)
        q, k = (rotate(y.float(), positions).to(x.dtype) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(merge(y))


class RowPositionsLM(nn.Module):
    """Positions do not restart in a packed text; only the mask keeps texts apart."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, dim)
        self.h = nn.ModuleList(FloatRotaryBlock(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        mask = tril(input_ids.shape[1])
        if segment_ids is not None:
            mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x, mask)
        return self.head(x)


def prove_row_positions() -> float:
    """Neighbours replaced, bit for bit; alone, the rotation in float32 rounds by less than a millionth."""
    model = ready(positions_of_the_row)
    text, ids = tokens(1, 12, 13), torch.tensor([[0] * 5 + [1] * 7])
    with torch.no_grad():
        rounding = distance(logits_of(model(text, ids))[:, 5:], logits_of(model(text[:, 5:])))
    if rounding > 1e-5 or model.head.out_features != VOCAB:
        return rounding
    return max(packing(model, alone=False), future(model))


@case(
    leaks=False,
    after="rotary positions that do not restart: relative, so only float32 rounding of the angles differs",
    prove=prove_row_positions,
)
def positions_of_the_row() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RowPositionsLM()}
