"""Honest models in plain torch, written as users write them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import keepleft as kl
from audit.honest.case import Honest

V = 53  # vocabulary size
D = 26  # width
H = 2  # heads, each 13 wide
FEATURES = 7  # width of inputs that are features instead of tokens


def random_tokens(batch: int = 2, time: int = 11) -> Tensor:
    """Random tokens, (B, T)."""
    return torch.randint(V, (batch, time), generator=torch.Generator().manual_seed(19))


def random_features(batch: int = 2, time: int = 11) -> Tensor:
    """Random features, (B, T, FEATURES)."""
    return torch.randn(batch, time, FEATURES, generator=torch.Generator().manual_seed(23))


# -- masks and positions -----------------------------------------------------------------------


def causal_mask(x: Tensor) -> Tensor:
    """(T, T), True on and below the diagonal."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


def distances(time: int, x: Tensor) -> Tensor:
    """(T, T): how far key k is behind query q, negative in the future."""
    place = torch.arange(time, device=x.device)
    return place[:, None] - place


def real_tokens(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B, T), True where a token is real."""
    return torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()


def positions_from_mask(keep: Tensor) -> Tensor:
    """Positions counted from the first real token; padding is at 0."""
    return (keep.long().cumsum(1) - 1).clamp(min=0)


def positions_from_segments(segments: Tensor) -> Tensor:
    """Positions that restart at 0 with each segment."""
    place = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    fresh = torch.ones_like(segments, dtype=torch.bool)
    fresh[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return place - torch.where(fresh, place, 0).cummax(1).values


def apply_rotary(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x (B, H, T, d) at positions (B, T) or (T,); an odd last column stays as it is."""
    half = x.shape[-1] // 2
    speeds = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[..., None] * speeds
    angles = angles[:, None] if positions.dim() == 2 else angles
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


# -- language models: embedding, blocks, head --------------------------------------------------


class Block(nn.Module):
    """A mixer over time, then a feed-forward for each token."""

    def __init__(self, mixer: nn.Module, width: int = D) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.mixer = mixer
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 31), nn.GELU(), nn.Linear(31, width))

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.mixer(self.norm1(x), *how)
        return x + self.feed(self.norm2(x))


class LanguageModel(nn.Module):
    """A language model with one block per mixer, and so many learned positions, if any."""

    def __init__(self, *mixers: nn.Module, positions: int = 0) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.position = nn.Embedding(positions, D) if positions else None
        self.blocks = nn.ModuleList(Block(mixer) for mixer in mixers)
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.token(tokens)
        return x if self.position is None else x + self.position(positions)

    def body(self, tokens: Tensor, positions: Tensor, *how: Any) -> Tensor:
        x = self.embed(tokens, positions)
        for block in self.blocks:
            x = block(x, *how)
        return self.head(self.norm(x))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.body(input_ids, torch.arange(input_ids.shape[1], device=input_ids.device))


class WithAttentionMask(LanguageModel):
    """Takes attention_mask, and counts positions by it."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        keep = real_tokens(input_ids, attention_mask)
        return self.body(input_ids, positions_from_mask(keep), keep)


class WithPositionIds(LanguageModel):
    """Takes position_ids."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        keep = real_tokens(input_ids, attention_mask)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.body(input_ids, position_ids, keep)


class WithRotaryPositionIds(WithPositionIds):
    """The same with rotary positions."""

    def body(self, tokens: Tensor, positions: Tensor, *how: Any) -> Tensor:
        return super().body(tokens, positions, *how, positions)


class WithPaddingMask(LanguageModel):
    """Takes key_padding_mask."""

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        keep = real_tokens(tokens, None if key_padding_mask is None else ~key_padding_mask.bool())
        return self.body(tokens, positions_from_mask(keep), keep)


class WithLengths(LanguageModel):
    """Takes lengths; padding is on the right."""

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        keep = real_tokens(tokens, None if lengths is None else place < lengths.to(tokens.device)[:, None])
        return self.body(tokens, place, keep)


class WithSegmentIds(LanguageModel):
    """Takes segment ids of packed sequences, and keeps them apart."""

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        segments = torch.ones_like(input_ids) if segment_ids is None else segment_ids
        places = positions_from_segments(segments)
        return self.body(input_ids, places, segments, places)


class WithDocumentIds(WithSegmentIds):
    """The same under another name, with a mask of real tokens beside it."""

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, doc_ids: Tensor | None = None
    ) -> Tensor:
        keep = real_tokens(tokens, attention_mask)
        documents = keep.long() if doc_ids is None else torch.where(keep, doc_ids, 0)
        return super().forward(tokens, documents)


class WithSeqIdx(WithSegmentIds):
    """The same under the name that state-space models use."""

    def forward(self, input_ids: Tensor, seq_idx: Tensor | None = None) -> Tensor:
        return super().forward(input_ids, seq_idx)


# -- attention ---------------------------------------------------------------------------------


class MultiHead(nn.Module):
    """The projections of multi-head attention: queries, keys, values and output."""

    def __init__(self, heads: int = H) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def split(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(q.shape[-1])

    def join(self, x: Tensor) -> Tensor:
        return self.out(x.transpose(1, 2).flatten(2))


class MinusInfinityMask(MultiHead):
    """Softmax over scores with -inf in the future."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = self.scores(q, k).masked_fill(~causal_mask(x), float("-inf"))
        return self.join(scores.softmax(-1) @ v)


class FiniteMinMask(MultiHead):
    """Adds the lowest number of the dtype to future scores."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        future = (~causal_mask(x)).to(x.dtype) * torch.finfo(x.dtype).min
        return self.join((self.scores(q, k) + future).softmax(-1) @ v)


class MinusBillionMask(MultiHead):
    """Fills future scores with -1e9: enough, since norms keep scores small."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join(F.softmax(self.scores(q, k).masked_fill(~causal_mask(x), -1e9), dim=-1) @ v)


class FusedCausal(MultiHead):
    """The fused kernel with its own triangle."""

    def forward(self, x: Tensor) -> Tensor:
        return self.join(F.scaled_dot_product_attention(*self.split(x), is_causal=True))


class FusedBooleanMask(MultiHead):
    """The fused kernel with a boolean mask."""

    def forward(self, x: Tensor) -> Tensor:
        return self.join(F.scaled_dot_product_attention(*self.split(x), attn_mask=causal_mask(x)))


class FlashOrManual(MultiHead):
    """nanoGPT's: the fused kernel, or a triangle kept in a buffer, by a flag."""

    def __init__(self, block_size: int = 41, dropout: float = 0.0) -> None:
        super().__init__()
        self.flash = True
        self.dropout = dropout
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.register_buffer(
            "bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        time = x.shape[1]
        if self.flash:
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
            )
        else:
            scores = self.scores(q, k).masked_fill(self.bias[:, :, :time, :time] == 0, float("-inf"))
            y = self.attn_dropout(scores.softmax(-1)) @ v
        return self.resid_dropout(self.join(y))


class GroupedQuery(nn.Module):
    """Several query heads share one key head; written with einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, 6 * 5)
        self.kv = nn.Linear(D, 2 * 2 * 5)
        self.out = nn.Linear(6 * 5, D)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 3, 5))
        k, v = self.kv(x).unflatten(-1, (2, 2, 5)).unbind(3)
        scores = torch.einsum("btghd,bsgd->bghts", q, k) / 5**0.5
        weights = scores.masked_fill(~causal_mask(x), float("-inf")).softmax(-1)
        return self.out(torch.einsum("bghts,bsgd->btghd", weights, v).flatten(2))


class TorchMultihead(nn.Module):
    """nn.MultiheadAttention in either layout, with or without weights."""

    def __init__(self, batch_first: bool, need_weights: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.need_weights = need_weights
        self.attn = nn.MultiheadAttention(D, H, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.batch_first else x.transpose(0, 1)
        y = self.attn(y, y, y, attn_mask=~causal_mask(x), need_weights=self.need_weights)[0]
        return y if self.batch_first else y.transpose(0, 1)


class TorchMultiheadPadded(nn.Module):
    """nn.MultiheadAttention with padding hidden; a query that could attend to nothing, which is padding,
    attends to itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        seen = causal_mask(x) & keep[:, None] | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        return self.attn(x, x, x, attn_mask=~seen.repeat_interleave(H, 0), need_weights=False)[0]


class PredicateMask(MultiHead):
    """Attention with any predicate over the positions of query and key."""

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        return self.join(
            F.scaled_dot_product_attention(*self.split(x), attn_mask=self.rule(place[:, None], place))
        )


class SlidingWindow(MultiHead):
    """A sliding window with rotary positions."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        place = torch.arange(x.shape[1], device=x.device)
        far = distances(x.shape[1], x)
        scores = self.scores(apply_rotary(q, place), apply_rotary(k, place))
        return self.join(scores.masked_fill((far < 0) | (far >= self.window), float("-inf")).softmax(-1) @ v)


class ChunkedWindow(MultiHead):
    """A sliding window in chunks: each chunk attends to itself and the one before; the last is padded and cut
    off again.
    """

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, x: Tensor) -> Tensor:
        c, time = self.chunk, x.shape[1]
        # (B, H, N, c, d)
        q, k, v = (F.pad(part, (0, 0, 0, -time % c)).unflatten(2, (-1, c)) for part in self.split(x))
        k, v = (torch.cat([F.pad(part, (0, 0, 0, 0, 1, 0))[:, :, :-1], part], 3) for part in (k, v))
        far = torch.arange(c, device=x.device)[:, None] + c - torch.arange(2 * c, device=x.device)
        seen = ((far >= 0) & (far <= c)).expand(q.shape[2], c, 2 * c).clone()
        seen[0, :, :c] = False
        y = self.scores(q, k).masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return self.join(y.flatten(2, 3)[:, :, :time])


class ALiBi(MultiHead):
    """ALiBi; padding is hidden where a mask is given, and a query that attends to nothing gives zeros."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, device=x.device)
        bias = (-slopes[:, None, None] * distances(x.shape[1], x)).to(x.dtype)
        seen = causal_mask(x)[None, None] if keep is None else (causal_mask(x) & keep[:, None])[:, None]
        scores = (self.scores(q, k) + bias).masked_fill(~seen, float("-inf"))
        scores = torch.where(seen.any(-1, keepdim=True), scores, 0.0)
        return self.join(scores.softmax(-1).masked_fill(~seen, 0.0) @ v)


class T5Bias(MultiHead):
    """T5's relative bias: a number for each bucket of distances and head, and unscaled scores."""

    def __init__(self, buckets: int = 7, farthest: int = 17, both: bool = False) -> None:
        super().__init__()
        self.buckets = buckets
        self.farthest = farthest
        self.both = both
        self.bias = nn.Embedding(buckets * (2 if both else 1), H)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        far, near = distances(x.shape[1], x), self.buckets // 2
        steps = far.abs() if self.both else far.clamp(min=0)
        grown = (
            near
            + (
                torch.log(steps.clamp(min=1) / near) / math.log(self.farthest / near) * (self.buckets - near)
            ).long()
        )
        bucket = torch.where(steps < near, steps, grown.clamp(max=self.buckets - 1))
        bucket = bucket + self.buckets * (far < 0) if self.both else bucket
        scores = q @ k.mT * 0.3 + self.bias(bucket).permute(2, 0, 1)
        seen = torch.ones_like(causal_mask(x)) if self.both else causal_mask(x)
        seen = seen if keep is None else (seen & keep[:, None])[:, None]
        return self.join(scores.masked_fill(~seen, torch.finfo(x.dtype).min).softmax(-1) @ v)


class RotaryAttention(MultiHead):
    """Rotary attention, at positions in the row where none are given: only distances matter, so padding on
    the left changes nothing.
    """

    def forward(self, x: Tensor, keep: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        place = torch.arange(x.shape[1], device=x.device) if places is None else places
        seen = causal_mask(x) if keep is None else (causal_mask(x) & keep[:, None])[:, None]
        return self.join(
            F.scaled_dot_product_attention(apply_rotary(q, place), apply_rotary(k, place), v, attn_mask=seen)
        )


class PaddingMasked(MultiHead):
    """Causal over real tokens; a query that attends to nothing gives zeros, not NaN."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        seen = (causal_mask(x) & keep[:, None])[:, None]
        scores = self.scores(q, k).masked_fill(~seen, torch.finfo(x.dtype).min)
        return self.join((scores.softmax(-1) * seen.any(-1, keepdim=True)) @ v)


class SegmentAttention(MultiHead):
    """Causal inside each segment, with rotary positions that restart."""

    def forward(self, x: Tensor, segments: Tensor, places: Tensor) -> Tensor:
        q, k, v = self.split(x)
        seen = causal_mask(x) & (segments[:, :, None] == segments[:, None])
        return self.join(
            F.scaled_dot_product_attention(
                apply_rotary(q, places), apply_rotary(k, places), v, attn_mask=seen[:, None]
            )
        )


class SinkSoftmax(MultiHead):
    """Softmax with an additional one in the denominator: a query that attends to nothing gives zeros."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        seen = causal_mask(x) if keep is None else (causal_mask(x) & keep[:, None])[:, None]
        scores = self.scores(q, k).masked_fill(~seen, float("-inf"))
        scores = torch.cat([torch.zeros_like(scores[..., :1]), scores], -1)
        return self.join(scores.softmax(-1)[..., 1:] @ v)


class TopKAttention(MultiHead):
    """Each query attends to the three best of its visible keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = self.scores(q, k).masked_fill(~causal_mask(x), float("-inf"))
        least = scores.topk(min(3, x.shape[1]), -1).values[..., -1:]
        return self.join(scores.masked_fill(scores < least, float("-inf")).softmax(-1) @ v)


class SigmoidAttention(MultiHead):
    """Sigmoids instead of a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join((self.scores(q, k) - 2.0).sigmoid().masked_fill(~causal_mask(x), 0.0) @ v)


class LinearAttention(MultiHead):
    """Linear attention: running sums of keys times values; padding adds nothing."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        k = k if keep is None else k * keep[:, None, :, None]
        total = (k[..., None] * v[..., None, :]).cumsum(2)
        return self.join(
            (q[..., None, :] @ total)[..., 0, :] / ((q * k.cumsum(2)).sum(-1, keepdim=True) + 1e-6)
        )


class ChunkedLinearAttention(MultiHead):
    """Linear attention in chunks of five: a causal mask inside a chunk, a running sum over those before."""

    def forward(self, x: Tensor) -> Tensor:
        c, time = 5, x.shape[1]
        q, k, v = self.split(x)
        q, k, v = (
            F.pad(part, (0, 0, 0, -time % c)).unflatten(2, (-1, c))
            for part in (F.elu(q) + 1, F.elu(k) + 1, v)
        )
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # the last column sums the weights
        sums = k.mT @ v
        before = torch.cat([torch.zeros_like(sums[:, :, :1]), sums.cumsum(2)[:, :, :-1]], 2)
        y = (q @ k.mT).tril() @ v + q @ before
        return self.join((y[..., :-1] / (y[..., -1:] + 1e-6)).flatten(2, 3)[:, :, :time])


class Hourglass(nn.Module):
    """Attention over groups of three, shifted right first, so that a group is complete where it is first
    used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(3 * D, D)
        self.attn = FusedCausal()
        self.up = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        moved = F.pad(x, (0, 0, 2, -time % 3))[:, : time + -time % 3]
        groups = self.attn(self.down(moved.unflatten(1, (-1, 3)).flatten(2)))
        return self.up(groups).repeat_interleave(3, 1)[:, :time]


# -- convolutions, recurrences and scans -------------------------------------------------------


class CausalConv(nn.Module):
    """A convolution padded on the left only; padding tokens are zeroed before it."""

    def __init__(self, kernel: int = 3, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.left = (kernel - 1) * dilation
        self.conv = nn.Conv1d(D, D, kernel, dilation=dilation, groups=groups)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        x = x if keep is None else x * keep[..., None]
        return self.conv(F.pad(x.mT, (self.left, 0))).mT


class TrimmedConv(nn.Module):
    """A convolution that torch pads on both sides, with its end cut off; weight normalisation."""

    def __init__(self, kernel: int = 5) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(D, 2 * D, kernel, padding=kernel - 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.conv(x.mT)[..., : x.shape[1]].mT, -1)


class TorchRecurrent(nn.Module):
    """Torch's own LSTM or GRU."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(D, D, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class ManualGRU(nn.Module):
    """A GRU cell by hand: padding leaves the state as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, D)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        state, out = x.new_zeros(len(x), D), []
        for t in range(x.shape[1]):
            state = torch.where(keep[:, t, None], self.cell(x[:, t], state), state)
            out.append(state)
        return torch.stack(out, 1)


class StateSpaceScan(nn.Module):
    """A sequential state-space scan whose decay depends on the token; a new segment resets the state."""

    def __init__(self, states: int = 3) -> None:
        super().__init__()
        self.rate = nn.Linear(D, D)
        self.into = nn.Linear(D, states)
        self.outof = nn.Linear(D, states)
        self.decay = nn.Parameter(torch.rand(D, states) + 0.1)

    def forward(self, x: Tensor, segments: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        rate = F.softplus(self.rate(x))
        keep = torch.exp(-rate[..., None] * self.decay)
        keep = keep if places is None else keep.masked_fill((places == 0)[..., None, None], 0.0)
        new = (rate * x)[..., None] * self.into(x)[:, :, None]
        state, out = torch.zeros_like(new[:, 0]), []
        for t in range(x.shape[1]):
            state = keep[:, t] * state + new[:, t]
            out.append((state * self.outof(x[:, t])[:, None]).sum(-1))
        return torch.stack(out, 1)


class CumsumScan(nn.Module):
    """A state-space scan as one cumulative sum, of inputs divided by the decay so far."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(D, D)
        self.out = nn.Linear(D, D)
        self.decay = nn.Parameter(torch.rand(D) * 0.2 + 0.05)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        new = self.into(x)
        new = new if keep is None else new * keep[..., None]
        grown = torch.arange(x.shape[1], device=x.device)[:, None] * self.decay.float()
        return self.out((new * grown.exp()).cumsum(1).mul((-grown).exp()).to(x.dtype))


class DoublingScan(nn.Module):
    """A parallel scan in log T steps, which combine positions 1, 2, 4 … apart."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, D)
        self.into = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        keep = self.gate(x).sigmoid()
        state = self.into(x)
        back = 1
        while back < x.shape[1]:
            state = state + keep * F.pad(state, (0, 0, back, 0))[:, : x.shape[1]]
            keep = keep * F.pad(keep, (0, 0, back, 0))[:, : x.shape[1]]
            back *= 2
        return state


class FFTConv(nn.Module):
    """A convolution as long as the sequence, by FFT over twice the length: causal up to rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.randn(3, D) * 0.5)
        self.decay = nn.Parameter(torch.rand(3, D))

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        kind = torch.promote_types(x.dtype, torch.float32)  # there is no FFT in bfloat16
        place = torch.arange(time, device=x.device)[:, None, None]
        kernel = (self.size * torch.exp(-self.decay.to(kind) * place)).sum(1)
        y = torch.fft.rfft(x.to(kind), n=2 * time, dim=1) * torch.fft.rfft(kernel, n=2 * time, dim=0)
        return torch.fft.irfft(y, n=2 * time, dim=1)[:, :time].to(x.dtype)


class RWKVMixer(nn.Module):
    """RWKV: token shift, then weights that decay with time."""

    def __init__(self) -> None:
        super().__init__()
        self.blend = nn.Parameter(torch.rand(3, D))
        self.k = nn.Linear(D, D)
        self.v = nn.Linear(D, D)
        self.r = nn.Linear(D, D)
        self.fade = nn.Parameter(torch.rand(D) + 0.1)
        self.bonus = nn.Parameter(torch.randn(D) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        k, v, r = (
            part(x * b + before * (1 - b))
            for part, b in zip((self.k, self.v, self.r), self.blend, strict=True)
        )
        above = torch.zeros_like(v[:, 0])
        below = torch.zeros_like(v[:, 0])
        most = torch.full_like(k[:, 0], -1e30)
        out = []
        for t in range(x.shape[1]):
            peak = torch.maximum(most, k[:, t] + self.bonus)
            old, new = torch.exp(most - peak), torch.exp(k[:, t] + self.bonus - peak)
            out.append((old * above + new * v[:, t]) / (old * below + new))
            peak = torch.maximum(most - self.fade, k[:, t])
            old, new = torch.exp(most - self.fade - peak), torch.exp(k[:, t] - peak)
            above = old * above + new * v[:, t]
            below = old * below + new
            most = peak
        return r.sigmoid() * torch.stack(out, 1)


class RunningNorm(nn.Module):
    """Normalises by the mean and deviation of the positions so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None] * D
        mean = x.sum(-1, keepdim=True).cumsum(1) / count
        square = x.square().sum(-1, keepdim=True).cumsum(1) / count
        return ((x - mean) / (square - mean.square()).clamp(min=0).add(1e-3).sqrt()).to(x.dtype)


class Experts(nn.Module):
    """Top-2 routing over five experts; an expert runs on the tokens gathered for it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 5, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 17), nn.SiLU(), nn.Linear(17, D)) for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        share, chosen = self.router(flat).softmax(-1).topk(2, -1)
        share = share / share.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * share[rows, place, None])
        return out.view_as(x)


class MoEBlock(nn.Module):
    """Attention, then experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = FusedCausal()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x + self.attn(x))


class VectorQuantizer(nn.Module):
    """Each vector is quantised to the nearest of eleven codes, with a straight-through gradient, before a
    convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(11, D))
        self.conv = CausalConv(3)

    def forward(self, x: Tensor) -> Tensor:
        far = x.square().sum(-1, keepdim=True) - 2 * x @ self.codes.T + self.codes.square().sum(-1)
        nearest = self.codes[far.argmin(-1)]
        return self.conv(x + (nearest - x).detach())


# -- other architectures -----------------------------------------------------------------------


class NanoGPT(nn.Module):
    """nanoGPT: with targets logits and loss; without, the logits of the last position only.

    Head and embedding are one.
    """

    def __init__(self, block_size: int = 41, dropout: float = 0.0) -> None:
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(V, D),
                wpe=nn.Embedding(block_size, D),
                drop=nn.Dropout(dropout),
                h=nn.ModuleList(Block(FlashOrManual(block_size, dropout)) for _ in range(2)),
                ln_f=nn.LayerNorm(D),
            )
        )
        self.lm_head = nn.Linear(D, V, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        time = idx.shape[1]
        assert self.block_size >= time, f"{time} tokens, but the block size is {self.block_size}"
        x = self.transformer.drop(
            self.transformer.wte(idx) + self.transformer.wpe(torch.arange(time, device=idx.device))
        )
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, V), targets.reshape(-1), ignore_index=-1)


class TorchEncoderLM(nn.Module):
    """nn.TransformerEncoder with a causal mask."""

    def __init__(self, norm_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.position = nn.Embedding(43, D)
        layer = nn.TransformerEncoderLayer(D, H, 31, dropout, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class TorchTransformer(nn.Module):
    """nn.Transformer: a causal mask for the target, the source's padding hidden in encoder and decoder."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.source = nn.Embedding(V, D)
        self.target = nn.Embedding(V, D)
        self.position = nn.Embedding(43, D)
        layer = nn.TransformerEncoderLayer(D, H, 31, 0.0, batch_first=batch_first)
        encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=False)
        self.transformer = nn.Transformer(
            D, H, 2, 2, 31, 0.0, custom_encoder=encoder, batch_first=batch_first
        )
        self.head = nn.Linear(D, V)

    def forward(self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        keep = real_tokens(src, None if src_key_padding_mask is None else ~src_key_padding_mask.bool())
        x = self.source(src) * keep[..., None] + self.position(positions_from_mask(keep))
        y = self.target(tgt) + self.position(torch.arange(tgt.shape[1], device=tgt.device))
        pads = ~keep & keep.any(1, keepdim=True)  # a source of padding alone is kept: better than NaN
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], device=y.device, dtype=torch.bool)
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        y = self.transformer(
            x, y, tgt_mask=mask, tgt_is_causal=True, src_key_padding_mask=pads, memory_key_padding_mask=pads
        )
        return self.head(y if self.batch_first else y.transpose(0, 1))


class CrossAttentionDecoder(nn.Module):
    """A decoder with cross-attention to source features, without an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Linear(FEATURES, D)
        self.target = nn.Embedding(V, D)
        self.own = ALiBi()
        self.cross = nn.MultiheadAttention(D, H, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, memory = self.target(target), self.source(source)
        x = x + self.own(x)
        return self.head(x + self.cross(x, memory, memory, need_weights=False)[0])


class FeatureModel(nn.Module):
    """Features in, features out: a forecast of the next values."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, D)
        self.block = Block(mixer)
        self.out = nn.Linear(D, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.into(x)))


class ChannelsFirst(nn.Module):
    """Features (B, T, FEATURES) in, channels first (B, 17, T) out."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(FEATURES, 17, 3), nn.Conv1d(17, 17, 3, dilation=3)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        for conv in self.convs:
            x = F.relu(conv(F.pad(x, (2 * conv.dilation[0], 0))))
        return x


class WaveNet(nn.Module):
    """A WaveNet: gated convolutions with dilations 1, 2 and 4, and skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.gates = nn.ModuleList(nn.Conv1d(D, 2 * D, 2, dilation=2**n) for n in range(3))
        self.back = nn.ModuleList(nn.Conv1d(D, D, 1) for _ in range(3))
        self.head = nn.Conv1d(D, V, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.token(x).mT, 0
        for gate, back in zip(self.gates, self.back, strict=True):
            a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
            y = a.tanh() * b.sigmoid()
            x, total = x + back(y), total + y
        return self.head(total.relu()).mT


class BigramHash(nn.Module):
    """Embeds each token together with the previous one, by hash."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(V, D)
        self.two = nn.Embedding(101, D)
        self.head = nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        before = F.pad(tokens, (1, -1), value=V)
        return self.head(F.gelu(self.one(tokens) + self.two((before * 59 + tokens) % 101)))


class BannedToken(LanguageModel):
    """Bans the first token of the vocabulary: its logit is -inf everywhere."""

    def forward(self, input_ids: Tensor) -> Tensor:
        forbidden = torch.arange(V, device=input_ids.device) == 0
        return super().forward(input_ids).masked_fill(forbidden, float("-inf")).log_softmax(-1)


class WithDropout(LanguageModel):
    """Dropout after the embedding and after each block."""

    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__(*mixers)
        self.drop = nn.Dropout(0.3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.drop(self.token(input_ids))
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(self.norm(x))


class StochasticDepth(LanguageModel):
    """Skips blocks at random in training, for each row independently."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.token(input_ids)
        for block in self.blocks:
            kept = torch.rand(len(x), 1, 1, device=x.device) > 0.3 if self.training else 1
            x = x + (block(x) - x) * kept
        return self.head(self.norm(x))


class TiedWeights(LanguageModel):
    """Embedding and head share their weights."""

    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__(*mixers)
        self.head.weight = self.token.weight


class ZeroInit(LanguageModel):
    """Output projections of blocks, or the head, initialised to zero."""

    def __init__(self, *mixers: nn.Module, head: bool) -> None:
        super().__init__(*mixers)
        for layer in [self.head] if head else [block.mixer.out for block in self.blocks]:
            nn.init.zeros_(layer.weight)


class ReturnsWeights(LanguageModel):
    """Returns attention weights too, on request."""

    def forward(self, tokens: Tensor, return_attention: bool = False) -> Tensor | tuple[Tensor, list[Tensor]]:
        x, told = self.token(tokens), []
        for block in self.blocks:
            q, k, v = block.mixer.split(block.norm1(x))
            if return_attention:
                told.append(block.mixer.scores(q, k).masked_fill(~causal_mask(x), float("-inf")).softmax(-1))
                y = told[-1] @ v
            else:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block.mixer.join(y)
            x = x + block.feed(block.norm2(x))
        logits = self.head(self.norm(x))
        return (logits, told) if return_attention else logits


# -- encoders ----------------------------------------------------------------------------------


class BidirectionalAttention(MultiHead):
    """Bidirectional over real tokens; zeros where there are none."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.join(F.scaled_dot_product_attention(*self.split(x), attn_mask=keep[:, None, None]))


class BertAttention(MultiHead):
    """BERT as first published: -10000 on padded keys, which is enough after a norm."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join(
            (self.scores(q, k) + (1.0 - keep[:, None, None].to(x.dtype)) * -10000.0).softmax(-1) @ v
        )


class SymmetricConv(nn.Module):
    """A symmetric convolution; padding tokens are zeros, as beyond the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 5, padding=2)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.conv((x * keep[..., None]).mT).mT


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with padding hidden; a row of padding alone attends to itself and gives zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.position = nn.Embedding(43, D)
        layer = nn.TransformerEncoderLayer(D, H, 31, 0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        keep = real_tokens(src, None if src_key_padding_mask is None else ~src_key_padding_mask.bool())
        x = self.token(src) + self.position(positions_from_mask(keep))
        x = self.encoder(x, src_key_padding_mask=~keep & keep.any(1, keepdim=True))
        return x.masked_fill(~keep[..., None], 0.0)


class BidirectionalLSTM(nn.Module):
    """A bidirectional LSTM over packed sequences of the given lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.rnn = nn.LSTM(D, 11, batch_first=True, bidirectional=True)
        self.head = nn.Linear(22, 17)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.token(tokens)
        if lengths is None:
            return self.head(self.rnn(x)[0])
        lengths = lengths.cpu().clamp(min=1)
        y = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
        return self.head(pad_packed_sequence(y, batch_first=True, total_length=tokens.shape[1])[0])


class BidirectionalSegments(MultiHead):
    """Bidirectional inside each segment of a packed row."""

    def forward(self, x: Tensor, segments: Tensor, places: Tensor) -> Tensor:
        q, k, v = self.split(x)
        seen = (segments[:, :, None] == segments[:, None])[:, None]
        return self.join(
            F.scaled_dot_product_attention(
                apply_rotary(q, places), apply_rotary(k, places), v, attn_mask=seen
            )
        )


# -- caches ------------------------------------------------------------------------------------


class CachedAttention(MultiHead):
    """Attention over cached and new keys; keys are cached after rotation."""

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.split(x)
        start = 0 if past is None else past[0].shape[2]
        place = torch.arange(start, start + x.shape[1], device=x.device)
        q, k = apply_rotary(q, place), apply_rotary(k, place)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        seen = torch.arange(k.shape[2], device=x.device) <= place[:, None]
        return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen)), (k, v)


class GrowingCacheLM(LanguageModel):
    """A growing cache: a tuple of keys and values for each block, in and out."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__(*(CachedAttention() for _ in range(blocks)))

    def run(self, tokens: Tensor, cache: tuple | None) -> tuple[Tensor, tuple]:
        x, kept = self.token(tokens), []
        for number, block in enumerate(self.blocks):
            y, new = block.mixer(block.norm1(x), None if cache is None else cache[number])
            x = x + y
            x = x + block.feed(block.norm2(x))
            kept.append(new)
        return self.head(self.norm(x)), tuple(kept)

    def forward(self, x: Tensor, cache: tuple | None = None) -> tuple[Tensor, tuple]:
        return self.run(x, cache)


class UseCacheLM(GrowingCacheLM):
    """The same with Hugging Face's argument names; the cache is returned with use_cache."""

    def forward(
        self, input_ids: Tensor, past_key_values: tuple | None = None, use_cache: bool = False
    ) -> dict[str, Any]:
        logits, kept = self.run(input_ids, past_key_values)
        return {"logits": logits, "past_key_values": kept} if use_cache else {"logits": logits}


class StartStepLM(GrowingCacheLM):
    """start and step; the state is a list that changes in place."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(tokens, None)[0]

    def start(self, prompt: Tensor) -> tuple[Tensor, list]:
        scores, kept = self.run(prompt, None)
        return scores[:, -1], list(kept)

    def step(self, tokens: Tensor, state: list) -> Tensor:
        scores, state[:] = self.run(tokens, tuple(state))
        return scores[:, -1]


class StaticCacheAttention(MultiHead):
    """Attention with a static cache: a slot for each position; empty slots are hidden."""

    def forward(
        self, x: Tensor, kept: tuple[Tensor, Tensor], place: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.split(x)
        keys, values = kept[0].index_copy(2, place, k), kept[1].index_copy(2, place, v)
        seen = torch.arange(keys.shape[2], device=x.device) <= place[:, None]
        return self.join(F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)), (keys, values)


class StaticCacheLM(LanguageModel):
    """A static cache: buffers of 47 slots, and how many are filled."""

    def __init__(self) -> None:
        super().__init__(StaticCacheAttention(), StaticCacheAttention(), positions=47)

    def forward(
        self, tokens: Tensor, kv_cache: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        weight = self.token.weight
        if kv_cache is None:
            empty = weight.new_zeros(len(tokens), H, 47, D // H)
            kv_cache = {"taken": 0, "layers": [(empty, empty) for _ in self.blocks]}
        taken, kept = kv_cache["taken"], []
        place = torch.arange(taken, taken + tokens.shape[1], device=tokens.device)
        x = self.embed(tokens, place)
        for block, layer in zip(self.blocks, kv_cache["layers"], strict=True):
            y, new = block.mixer(block.norm1(x), layer, place)
            x = x + y
            x = x + block.feed(block.norm2(x))
            kept.append(new)
        return self.head(self.norm(x)), {"taken": taken + tokens.shape[1], "layers": kept}


class InternalCacheAttention(MultiHead):
    """Keeps its keys in buffers of its own, and reads them up to the current position only."""

    def __init__(self, rows: int = 7, places: int = 47) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(rows, H, places, D // H), persistent=False)
        self.register_buffer("values", torch.zeros(rows, H, places, D // H), persistent=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        q, k, v = self.split(x)
        rows, end = len(x), start + x.shape[1]
        k = torch.cat([self.keys[:rows, :, :start], k], 2)
        v = torch.cat([self.values[:rows, :, :start], v], 2)
        with torch.no_grad():
            self.keys[:rows, :, :end], self.values[:rows, :, :end] = k, v
        seen = torch.ones(x.shape[1], end, dtype=torch.bool, device=x.device).tril(start)
        return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))


class StartPosLM(LanguageModel):
    """As in Llama's first code: an internal cache, and start_pos."""

    def __init__(self) -> None:
        super().__init__(InternalCacheAttention(), InternalCacheAttention(), positions=47)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        return self.body(
            tokens, torch.arange(start_pos, start_pos + tokens.shape[1], device=tokens.device), start_pos
        )


class RingCacheAttention(MultiHead):
    """A ring buffer as long as the window; keys that leave the window are overwritten."""

    def __init__(self, window: int = 5) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor, ring: dict[str, Tensor], place: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q, k, v = self.split(x)
        q, k = apply_rotary(q, place), apply_rotary(k, place)
        keys, values = torch.cat([ring["keys"], k], 2), torch.cat([ring["values"], v], 2)
        places = torch.cat([ring["places"], place])
        far = place[:, None] - places
        seen = (places >= 0) & (far >= 0) & (far < self.window)
        k = k[:, :, -self.window :]
        v = v[:, :, -self.window :]
        place = place[-self.window :]
        slots = place % self.window
        ring = {
            "keys": ring["keys"].index_copy(2, slots, k),
            "values": ring["values"].index_copy(2, slots, v),
            "places": ring["places"].index_copy(0, slots, place),
        }
        return self.join(F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)), ring


class RingCacheLM(LanguageModel):
    """A sliding window with a ring cache for each block; each step returns the state."""

    def __init__(self, blocks: int, window: int = 5) -> None:
        super().__init__(*(RingCacheAttention(window) for _ in range(blocks)))
        self.window = window

    def run(self, tokens: Tensor, state: tuple[int, list] | None = None) -> tuple[Tensor, tuple[int, list]]:
        x, kept = self.token(tokens), []
        if state is None:
            empty = x.new_zeros(len(x), H, self.window, D // H)
            nowhere = torch.full((self.window,), -1, device=x.device)
            state = 0, [{"keys": empty, "values": empty, "places": nowhere} for _ in self.blocks]
        read, rings = state
        place = torch.arange(read, read + tokens.shape[1], device=x.device)
        for block, ring in zip(self.blocks, rings, strict=True):
            y, new = block.mixer(block.norm1(x), ring, place)
            x = x + y
            x = x + block.feed(block.norm2(x))
            kept.append(new)
        return self.head(self.norm(x)), (read + tokens.shape[1], kept)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(tokens)[0]

    def start(self, prompt: Tensor) -> tuple[Tensor, tuple[int, list]]:
        scores, state = self.run(prompt)
        return scores[:, -1], state

    def step(self, tokens: Tensor, state: tuple[int, list]) -> tuple[Tensor, tuple[int, list]]:
        return self.run(tokens, state)


class RecurrentState(nn.Module):
    """An LSTM or GRU with torch's own state, layers first and rows second."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.rnn = kind(D, 17, 2, batch_first=True)
        self.head = nn.Linear(17, V)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(self.token(x), state)
        return self.head(y), state


class CachedConv(nn.Module):
    """A convolution whose state is its last inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.conv = nn.Conv1d(D, D, 4)
        self.head = nn.Linear(D, V)

    def forward(self, tokens: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.token(tokens).mT
        x = F.pad(x, (3, 0)) if past is None else torch.cat([past, x], -1)
        return self.head(F.silu(self.conv(x)).mT), x[..., -3:]


class StatefulLinearAttention(LinearAttention):
    """Linear attention that continues from its running sums."""

    def forward(
        self, x: Tensor, sums: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.split(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        both, keys = (k[..., None] * v[..., None, :]).cumsum(2), k.cumsum(2)
        if sums is not None:
            both, keys = both + sums[0], keys + sums[1]
        y = (q[..., None, :] @ both)[..., 0, :] / (q * keys).sum(-1, keepdim=True)
        return self.join(y), (both[:, :, -1:], keys[:, :, -1:])


class LinearAttentionStateLM(GrowingCacheLM):
    """Linear attention whose state does not grow."""

    def __init__(self) -> None:
        LanguageModel.__init__(self, StatefulLinearAttention(), StatefulLinearAttention())

    def forward(self, tokens: Tensor, state: tuple | None = None) -> tuple[Tensor, tuple]:
        return self.run(tokens, state)


# -- labels and outputs ------------------------------------------------------------------------


@dataclass
class ModelOutput:
    """The output of a model."""

    logits: Tensor
    loss: Tensor | None = None


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Position t predicts label t + 1; -100 is ignored."""
    return F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100
    )


class LabelsInDict(WithAttentionMask):
    """Hugging Face's convention, as a dict."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = super().forward(input_ids, attention_mask)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": next_token_loss(logits, labels), "logits": logits}
        )


class LabelsInTuple(LanguageModel):
    """The same as a tuple (loss, logits), with the labels shifted instead of the logits."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        logits = super().forward(input_ids)
        if labels is None:
            return (logits,)
        following = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.mT.float(), following), logits


class LabelsInDataclass(LanguageModel):
    """The same as a dataclass; the summed loss divided by the number of labels, zero where there are none."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> ModelOutput:
        logits = super().forward(input_ids)
        if labels is None:
            return ModelOutput(logits)
        wanted = labels[:, 1:]
        each = F.cross_entropy(logits[:, :-1].mT, wanted, ignore_index=-100, reduction="none")
        return ModelOutput(logits, each.sum() / (wanted != -100).sum().clamp(min=1))


class WrappedOutput(LanguageModel):
    """Logits among other outputs: in a dict, a tuple or a dataclass."""

    def __init__(self, *mixers: nn.Module, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(*mixers)
        self.wrap = wrap

    def forward(self, input_ids: Tensor) -> Any:
        x = self.token(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.wrap(self.head(self.norm(x)), x)


# -- other forms -------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale per output channel."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class Int8PerTokenLinear(Int8Linear):
    """The inputs in int8 too, with a scale for each token."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return super().forward((x / scale).round() * scale)


def quantize_linears(model: nn.Module, kind: type[Int8Linear]) -> nn.Module:
    """The model with every linear layer in int8."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, kind(child))
        else:
            quantize_linears(child, kind)
    return model


def half_precision_linears(model: nn.Module) -> nn.Module:
    """The model with linear layers that torch quantises dynamically to float16."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model.eval().requires_grad_(False)  # these layers have no gradient
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.float16)


def attention_function() -> Callable[[Tensor], Tensor]:
    """Attention with fixed weights, as a function instead of a module."""
    table, q, k, v, head = (torch.randn(shape) / 4 for shape in [(V, D), (D, D), (D, D), (D, D), (D, V)])

    def function(tokens: Tensor) -> Tensor:
        x = table[tokens]
        scores = (x @ q) @ (x @ k).mT / math.sqrt(D)
        return (scores.masked_fill(~causal_mask(x), float("-inf")).softmax(-1) @ (x @ v) + x) @ head

    return function


def mean_function() -> Callable[[Tensor], Tensor]:
    """A function of features: the mean of the positions so far."""

    def function(x: Tensor) -> Tensor:
        return (x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]).tanh()

    return function


def with_callables() -> tuple:
    """A model whose cache is used through prefill= and step=."""
    model = GrowingCacheLM()

    def prefill(prompt: Tensor) -> tuple[Tensor, dict[str, tuple]]:
        scores, cache = model(prompt)
        return scores[:, -1], {"cache": cache}

    def step(tokens: Tensor, state: dict[str, tuple]) -> Tensor:
        scores, state["cache"] = model(tokens, state["cache"])
        return scores

    return (lambda tokens: model(tokens)[0]), random_tokens(), {"prefill": prefill, "step": step, "vocab": V}


def source_and_target() -> dict[str, Tensor]:
    """A source and a target of different lengths."""
    return {"src": random_tokens(2, 13), "tgt": random_tokens(2, 11)}


def honest(
    name: str,
    make: Callable[[], Any],
    example: Callable[[], Any] | None = None,
    claim: Any = None,
    **options: Any,
) -> Honest:
    """A case with seeded weights; make() returns a target, or all that build() should."""

    def build() -> tuple:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(29)
            made = make()
        return made if isinstance(made, tuple) else (made, None if example is None else example())

    return Honest(name, build, claim, options)


def causal_and(mask: kl.Mask) -> kl.Mask:
    return kl.causal & mask


HONEST = [
    honest("nanogpt", NanoGPT),
    honest(
        "nanogpt with targets",
        NanoGPT,
        lambda: {"idx": random_tokens(), "targets": random_tokens().roll(-1, 1)},
    ),
    honest("nanogpt with dropout", lambda: NanoGPT(dropout=0.2)),
    honest(
        "softmax with -inf", lambda: LanguageModel(MinusInfinityMask(), MinusInfinityMask(), positions=41)
    ),
    honest(
        "softmax with the lowest number",
        lambda: LanguageModel(FiniteMinMask(), FiniteMinMask(), positions=41),
    ),
    honest("softmax with -1e9", lambda: LanguageModel(MinusBillionMask(), MinusBillionMask(), positions=41)),
    honest("fused, is_causal", lambda: LanguageModel(FusedCausal(), FusedCausal(), positions=41)),
    honest(
        "fused, boolean mask", lambda: LanguageModel(FusedBooleanMask(), FusedBooleanMask(), positions=41)
    ),
    honest("grouped heads by einsum", lambda: LanguageModel(GroupedQuery(), GroupedQuery())),
    honest(
        "MultiheadAttention, batch first",
        lambda: LanguageModel(TorchMultihead(True), TorchMultihead(True), positions=41),
    ),
    honest(
        "MultiheadAttention, time first",
        lambda: LanguageModel(TorchMultihead(False), TorchMultihead(False), positions=41),
    ),
    honest(
        "MultiheadAttention with weights",
        lambda: LanguageModel(TorchMultihead(True, True), TorchMultihead(False, True), positions=41),
    ),
    honest(
        "MultiheadAttention, pads hidden",
        lambda: WithPaddingMask(TorchMultiheadPadded(), TorchMultiheadPadded(), positions=41),
    ),
    honest("TransformerEncoder, causal, norm first", lambda: TorchEncoderLM(True)),
    honest("TransformerEncoder, causal, norm last, dropout", lambda: TorchEncoderLM(False, 0.1)),
    honest("Transformer, batch first", lambda: TorchTransformer(True), source_and_target),
    honest("Transformer, time first", lambda: TorchTransformer(False), source_and_target),
    honest(
        "cross attention to features",
        CrossAttentionDecoder,
        lambda: {"source": random_features(2, 13), "target": random_tokens()},
    ),
    honest("window, one layer", lambda: LanguageModel(SlidingWindow(5)), claim=causal_and(kl.window(5))),
    honest(
        "window, two layers reach twice as far",
        lambda: LanguageModel(SlidingWindow(4), SlidingWindow(4)),
        claim=causal_and(kl.window(7)),
    ),
    honest("window in chunks", lambda: LanguageModel(ChunkedWindow(4)), claim=causal_and(kl.window(5))),
    honest("alibi", lambda: LanguageModel(ALiBi(), ALiBi())),
    honest("alibi, pads hidden", lambda: WithAttentionMask(ALiBi(), ALiBi())),
    honest("t5 bias", lambda: LanguageModel(T5Bias(), T5Bias())),
    honest("t5 bias, pads hidden", lambda: WithAttentionMask(T5Bias(), T5Bias())),
    honest("rotary", lambda: LanguageModel(RotaryAttention(), RotaryAttention())),
    honest("rotary, pads hidden", lambda: WithAttentionMask(RotaryAttention(), RotaryAttention())),
    honest(
        "prefix of three",
        lambda: LanguageModel(
            *(PredicateMask(lambda q, k: (k <= q) | (k < 3)) for _ in range(2)), positions=41
        ),
        claim=kl.causal | kl.prefix(3),
    ),
    honest(
        "causal between blocks, full inside",
        lambda: LanguageModel(
            *(PredicateMask(lambda q, k: k // 4 <= q // 4) for _ in range(2)), positions=41
        ),
        claim=kl.causal | kl.block(4),
    ),
    honest(
        "causal inside blocks",
        lambda: LanguageModel(
            *(PredicateMask(lambda q, k: (k <= q) & (k // 5 == q // 5)) for _ in range(2)), positions=41
        ),
        claim=causal_and(kl.block(5)),
    ),
    honest(
        "blocks that see themselves",
        lambda: LanguageModel(
            *(PredicateMask(lambda q, k: k // 3 == q // 3) for _ in range(2)), positions=41
        ),
        claim=kl.block(3),
    ),
    honest(
        "softmax with a sink, pads hidden",
        lambda: WithAttentionMask(SinkSoftmax(), SinkSoftmax(), positions=41),
    ),
    honest("best three keys", lambda: LanguageModel(TopKAttention(), TopKAttention(), positions=41)),
    honest("sigmoid attention", lambda: LanguageModel(SigmoidAttention(), SigmoidAttention(), positions=41)),
    honest("hourglass", lambda: LanguageModel(Hourglass(), FusedCausal(), positions=41)),
    honest(
        "convolution", lambda: LanguageModel(CausalConv(3), CausalConv(3)), claim=causal_and(kl.window(5))
    ),
    honest(
        "convolution, dilated",
        lambda: LanguageModel(CausalConv(3), CausalConv(3, 3)),
        claim=causal_and(kl.window(9)),
    ),
    honest("convolution, depthwise", lambda: LanguageModel(CausalConv(5, groups=D), FusedCausal())),
    honest("convolution, cut at the end", lambda: LanguageModel(TrimmedConv(), TrimmedConv())),
    honest("convolution, pads zeroed", lambda: WithAttentionMask(CausalConv(3), CausalConv(3, 2))),
    honest("wavenet", WaveNet, claim=causal_and(kl.window(8))),
    honest("lstm", lambda: LanguageModel(TorchRecurrent(nn.LSTM))),
    honest("gru", lambda: LanguageModel(TorchRecurrent(nn.GRU), TorchRecurrent(nn.GRU))),
    honest("gru by hand, pads skipped", lambda: WithAttentionMask(ManualGRU())),
    honest("linear attention by cumsum", lambda: LanguageModel(LinearAttention(), LinearAttention())),
    honest(
        "linear attention by cumsum, pads hidden",
        lambda: WithAttentionMask(LinearAttention(), LinearAttention()),
    ),
    honest(
        "linear attention in chunks",
        lambda: LanguageModel(ChunkedLinearAttention(), ChunkedLinearAttention()),
    ),
    honest("state space, step by step", lambda: LanguageModel(StateSpaceScan(), StateSpaceScan())),
    honest("state space by cumsum", lambda: LanguageModel(CumsumScan(), CumsumScan())),
    honest("state space by cumsum, pads hidden", lambda: WithAttentionMask(CumsumScan(), CumsumScan())),
    honest("scan by doubling", lambda: LanguageModel(DoublingScan(), DoublingScan())),
    honest("long convolution by fft", lambda: LanguageModel(FFTConv(), FFTConv())),
    honest("token shift", lambda: LanguageModel(RWKVMixer(), RWKVMixer())),
    honest("running norm", lambda: LanguageModel(RunningNorm(), FusedCausal())),
    honest("experts, top 2 of 5", lambda: LanguageModel(MoEBlock(), MoEBlock(), positions=41)),
    honest("nearest codes", lambda: LanguageModel(VectorQuantizer(), FusedCausal())),
    honest("pairs of tokens", BigramHash, claim=causal_and(kl.window(2))),
    honest("features, attention", lambda: FeatureModel(RotaryAttention()), random_features),
    honest("features, convolution", lambda: FeatureModel(CausalConv(3)), random_features),
    honest("features, lstm", lambda: FeatureModel(TorchRecurrent(nn.LSTM)), random_features),
    honest("features in, channels first out", ChannelsFirst, random_features),
    honest(
        "pads hidden, positions from the mask",
        lambda: WithAttentionMask(PaddingMasked(), PaddingMasked(), positions=41),
    ),
    honest(
        "pads hidden, positions given",
        lambda: WithPositionIds(PaddingMasked(), PaddingMasked(), positions=41),
    ),
    honest(
        "pads hidden, rotary, positions given",
        lambda: WithRotaryPositionIds(RotaryAttention(), RotaryAttention()),
    ),
    honest("lengths given", lambda: WithLengths(PaddingMasked(), PaddingMasked(), positions=41)),
    honest(
        "packed, learned and rotary positions",
        lambda: WithSegmentIds(SegmentAttention(), SegmentAttention(), positions=41),
    ),
    honest(
        "packed, documents with a mask",
        lambda: WithDocumentIds(SegmentAttention(), SegmentAttention(), positions=41),
    ),
    honest("packed state space", lambda: WithSeqIdx(StateSpaceScan(), StateSpaceScan())),
    honest(
        "encoder",
        lambda: WithAttentionMask(BidirectionalAttention(), BidirectionalAttention(), positions=41),
        claim=kl.full,
    ),
    honest(
        "encoder with -10000",
        lambda: WithAttentionMask(BertAttention(), BertAttention(), positions=41),
        claim=kl.full,
    ),
    honest(
        "encoder, t5 bias", lambda: WithAttentionMask(T5Bias(both=True), T5Bias(both=True)), claim=kl.full
    ),
    honest(
        "encoder, convolution", lambda: WithAttentionMask(SymmetricConv(), SymmetricConv()), claim=kl.full
    ),
    honest("encoder, TransformerEncoder", TorchEncoder, claim=kl.full),
    honest("encoder, lstm both ways", BidirectionalLSTM, claim=kl.full),
    honest(
        "encoder, packed",
        lambda: WithSegmentIds(BidirectionalSegments(), BidirectionalSegments()),
        claim=kl.full,
    ),
    honest("cache that grows", GrowingCacheLM),
    honest("cache in words of transformers", UseCacheLM),
    honest("cache in a static buffer", StaticCacheLM),
    honest("cache inside, start_pos", StartPosLM),
    honest("cache in a ring, one layer", lambda: RingCacheLM(1), claim=causal_and(kl.window(5))),
    honest("cache in a ring, two layers", lambda: RingCacheLM(2, 3), claim=causal_and(kl.window(5))),
    honest("cache by start and step", StartStepLM),
    honest("cache by prefill and step", with_callables),
    honest("cache of an lstm", lambda: RecurrentState(nn.LSTM)),
    honest("cache of a gru", lambda: RecurrentState(nn.GRU)),
    honest("cache of a convolution", CachedConv, claim=causal_and(kl.window(4))),
    honest("cache of linear attention", LinearAttentionStateLM),
    honest("labels in a dict", lambda: LabelsInDict(PaddingMasked(), PaddingMasked(), positions=41)),
    honest(
        "labels, loss and logits in a tuple",
        lambda: LabelsInTuple(FusedCausal(), FusedCausal(), positions=41),
    ),
    honest("labels in a dataclass", lambda: LabelsInDataclass(FusedCausal(), FusedCausal(), positions=41)),
    honest("weights on request", lambda: ReturnsWeights(MultiHead(), MultiHead())),
    honest("bfloat16", lambda: WithAttentionMask(RotaryAttention(), RotaryAttention()).to(torch.bfloat16)),
    honest("float64", lambda: LanguageModel(MinusInfinityMask(), LinearAttention()).to(torch.float64)),
    honest("dropout", lambda: WithDropout(FusedCausal(), CausalConv(3))),
    honest("stochastic depth", lambda: StochasticDepth(FusedCausal(), FusedCausal())),
    honest("zeros where blocks write", lambda: ZeroInit(FusedCausal(), FusedCausal(), head=False)),
    honest("zeros in the head", lambda: ZeroInit(FusedCausal(), FusedCausal(), head=True)),
    honest("score of -inf for one word", lambda: BannedToken(FusedCausal())),
    honest("bare function", attention_function, random_tokens, vocab=V),
    honest("bare function of features", mean_function, random_features),
    honest(
        "compiled, eager",
        lambda: torch.compile(
            LanguageModel(MinusInfinityMask(), FusedCausal(), positions=41), backend="eager"
        ),
    ),
    honest(
        "compiled, aot_eager",
        lambda: torch.compile(LanguageModel(RotaryAttention(), CausalConv(3)), backend="aot_eager"),
    ),
    honest(
        "quantised, weights in int8",
        lambda: quantize_linears(
            LanguageModel(MinusInfinityMask(), MinusInfinityMask(), positions=41), Int8Linear
        ),
    ),
    honest(
        "quantised, int8 by token",
        lambda: quantize_linears(
            LanguageModel(MinusInfinityMask(), MinusInfinityMask(), positions=41), Int8PerTokenLinear
        ),
    ),
    honest(
        "quantised, quantize_dynamic to float16",
        lambda: half_precision_linears(LanguageModel(MinusInfinityMask(), MinusInfinityMask(), positions=41)),
    ),
    honest("positions end at 32", lambda: LanguageModel(FusedCausal(), FusedCausal(), positions=32)),
    honest("tied weights", lambda: TiedWeights(FusedCausal(), FusedCausal())),
    honest(
        "returns a dict",
        lambda: WrappedOutput(FusedCausal(), FusedCausal(), wrap=lambda y, x: {"hidden": x, "logits": y}),
    ),
    honest("returns a tuple", lambda: WrappedOutput(FusedCausal(), FusedCausal(), wrap=lambda y, x: (y, x))),
    honest(
        "returns a dataclass",
        lambda: WrappedOutput(FusedCausal(), FusedCausal(), wrap=lambda y, x: ModelOutput(y)),
    ),
]
