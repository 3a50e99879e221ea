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

V = 53
D = 26
H = 2  # vocabulary, width, heads: a head is 13 wide
FEATURES = 7  # width of what is given as numbers instead of tokens


def ids(batch: int = 2, time: int = 11) -> Tensor:
    """Random tokens, (B, T)."""
    return torch.randint(V, (batch, time), generator=torch.Generator().manual_seed(19))


def numbers(batch: int = 2, time: int = 11) -> Tensor:
    """Random features, (B, T, FEATURES)."""
    return torch.randn(batch, time, FEATURES, generator=torch.Generator().manual_seed(23))


# -- what may be seen, and where a token stands
# ------------------------------------------------------------------------


def triangle(x: Tensor) -> Tensor:
    """(T, T), True on and below the diagonal."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


def apart(time: int, x: Tensor) -> Tensor:
    """(T, T): how far key k lies behind query q; below zero in the future."""
    place = torch.arange(time, device=x.device)
    return place[:, None] - place


def real(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B, T), True where a token is real."""
    return torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()


def counted(keep: Tensor) -> Tensor:
    """Positions counted from the first real token; pads stand at 0."""
    return (keep.long().cumsum(1) - 1).clamp(min=0)


def restarted(segments: Tensor) -> Tensor:
    """Positions that begin again at 0 where a new text begins."""
    place = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    fresh = torch.ones_like(segments, dtype=torch.bool)
    fresh[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return place - torch.where(fresh, place, 0).cummax(1).values


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary: (B, H, T, d), positions (B, T) or (T,); an odd last number is left as it is."""
    half = x.shape[-1] // 2
    speeds = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[..., None] * speeds
    angles = angles[:, None] if positions.dim() == 2 else angles
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


# -- the frame: embedding, blocks, head
# --------------------------------------------------------------------------------


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


class Language(nn.Module):
    """A language model of any mixers, with learned positions where a number of them is given."""

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


class Masked(Language):
    """A language model that is told which tokens are real, and counts positions from them."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        keep = real(input_ids, attention_mask)
        return self.body(input_ids, counted(keep), keep)


class Placed(Language):
    """A language model that takes positions from the caller."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        keep = real(input_ids, attention_mask)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.body(input_ids, position_ids, keep)


class Turning(Placed):
    """The same, with positions that turn queries and keys."""

    def body(self, tokens: Tensor, positions: Tensor, *how: Any) -> Tensor:
        return super().body(tokens, positions, *how, positions)


class Blanked(Language):
    """A language model that is told which tokens are pads."""

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        keep = real(tokens, None if key_padding_mask is None else ~key_padding_mask.bool())
        return self.body(tokens, counted(keep), keep)


class Measured(Language):
    """A language model that is told how long each text is; pads follow it."""

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        keep = real(tokens, None if lengths is None else place < lengths.to(tokens.device)[:, None])
        return self.body(tokens, place, keep)


class Packed(Language):
    """A language model that reads several texts in one row, each as if alone."""

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        segments = torch.ones_like(input_ids) if segment_ids is None else segment_ids
        places = restarted(segments)
        return self.body(input_ids, places, segments, places)


class Documents(Packed):
    """The same under another name, with a mask of real tokens beside it."""

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, doc_ids: Tensor | None = None
    ) -> Tensor:
        keep = real(tokens, attention_mask)
        documents = keep.long() if doc_ids is None else torch.where(keep, doc_ids, 0)
        return super().forward(tokens, documents)


class Sequenced(Packed):
    """The same under the name that state-space models use."""

    def forward(self, input_ids: Tensor, seq_idx: Tensor | None = None) -> Tensor:
        return super().forward(input_ids, seq_idx)


# -- attention
# -------------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Queries, keys and values for some heads, and the way back."""

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


class Infinite(Heads):
    """Softmax over scores with -inf in the future."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = self.scores(q, k).masked_fill(~triangle(x), float("-inf"))
        return self.join(scores.softmax(-1) @ v)


class Lowest(Heads):
    """Adds the lowest number of the kind to the future."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        future = (~triangle(x)).to(x.dtype) * torch.finfo(x.dtype).min
        return self.join((self.scores(q, k) + future).softmax(-1) @ v)


class Large(Heads):
    """Fills the future with -1e9: enough, as norms keep scores small."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join(F.softmax(self.scores(q, k).masked_fill(~triangle(x), -1e9), dim=-1) @ v)


class Fused(Heads):
    """The fused kernel with its own triangle."""

    def forward(self, x: Tensor) -> Tensor:
        return self.join(F.scaled_dot_product_attention(*self.split(x), is_causal=True))


class FusedMask(Heads):
    """The fused kernel with a boolean mask."""

    def forward(self, x: Tensor) -> Tensor:
        return self.join(F.scaled_dot_product_attention(*self.split(x), attn_mask=triangle(x)))


class Either(Heads):
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


class Grouped(nn.Module):
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
        weights = scores.masked_fill(~triangle(x), float("-inf")).softmax(-1)
        return self.out(torch.einsum("bghts,bsgd->btghd", weights, v).flatten(2))


class Builtin(nn.Module):
    """nn.MultiheadAttention in either layout, with or without weights."""

    def __init__(self, batch_first: bool, need_weights: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.need_weights = need_weights
        self.attn = nn.MultiheadAttention(D, H, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.batch_first else x.transpose(0, 1)
        y = self.attn(y, y, y, attn_mask=~triangle(x), need_weights=self.need_weights)[0]
        return y if self.batch_first else y.transpose(0, 1)


class BuiltinPadded(nn.Module):
    """nn.MultiheadAttention with pads hidden; who would see nothing sees itself, and is a pad."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        seen = triangle(x) & keep[:, None] | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        return self.attn(x, x, x, attn_mask=~seen.repeat_interleave(H, 0), need_weights=False)[0]


class Seen(Heads):
    """Attention by any rule over the places of query and key."""

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        return self.join(
            F.scaled_dot_product_attention(*self.split(x), attn_mask=self.rule(place[:, None], place))
        )


class Near(Heads):
    """A sliding window, turned by rotary positions."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        place = torch.arange(x.shape[1], device=x.device)
        far = apart(x.shape[1], x)
        scores = self.scores(turned(q, place), turned(k, place))
        return self.join(scores.masked_fill((far < 0) | (far >= self.window), float("-inf")).softmax(-1) @ v)


class Chunks(Heads):
    """A window in chunks: each chunk looks at itself and at the one before; the end is filled up and cut off
    again.
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


class Sloped(Heads):
    """ALiBi: the farther, the less; pads hidden where they are told, and zeros where nothing is seen."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, device=x.device)
        bias = (-slopes[:, None, None] * apart(x.shape[1], x)).to(x.dtype)
        seen = triangle(x)[None, None] if keep is None else (triangle(x) & keep[:, None])[:, None]
        scores = (self.scores(q, k) + bias).masked_fill(~seen, float("-inf"))
        scores = torch.where(seen.any(-1, keepdim=True), scores, 0.0)
        return self.join(scores.softmax(-1).masked_fill(~seen, 0.0) @ v)


class Bucketed(Heads):
    """T5's bias: one number for each bucket of distances and head, and no scale."""

    def __init__(self, buckets: int = 7, farthest: int = 17, both: bool = False) -> None:
        super().__init__()
        self.buckets = buckets
        self.farthest = farthest
        self.both = both
        self.bias = nn.Embedding(buckets * (2 if both else 1), H)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        far, near = apart(x.shape[1], x), self.buckets // 2
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
        seen = torch.ones_like(triangle(x)) if self.both else triangle(x)
        seen = seen if keep is None else (seen & keep[:, None])[:, None]
        return self.join(scores.masked_fill(~seen, torch.finfo(x.dtype).min).softmax(-1) @ v)


class Turned(Heads):
    """Rotary positions, by place in the row where none are given: only distances count, so pads on the left
    move nothing.
    """

    def forward(self, x: Tensor, keep: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        place = torch.arange(x.shape[1], device=x.device) if places is None else places
        seen = triangle(x) if keep is None else (triangle(x) & keep[:, None])[:, None]
        return self.join(
            F.scaled_dot_product_attention(turned(q, place), turned(k, place), v, attn_mask=seen)
        )


class Padded(Heads):
    """Causal among real tokens; zeros, not NaN, where nothing is seen."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        seen = (triangle(x) & keep[:, None])[:, None]
        scores = self.scores(q, k).masked_fill(~seen, torch.finfo(x.dtype).min)
        return self.join((scores.softmax(-1) * seen.any(-1, keepdim=True)) @ v)


class Among(Heads):
    """Causal inside each text of a packed row, with rotary positions that begin again."""

    def forward(self, x: Tensor, segments: Tensor, places: Tensor) -> Tensor:
        q, k, v = self.split(x)
        seen = triangle(x) & (segments[:, :, None] == segments[:, None])
        return self.join(
            F.scaled_dot_product_attention(turned(q, places), turned(k, places), v, attn_mask=seen[:, None])
        )


class Sunk(Heads):
    """Softmax with one more in the sum: who sees nothing takes nothing."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        seen = triangle(x) if keep is None else (triangle(x) & keep[:, None])[:, None]
        scores = self.scores(q, k).masked_fill(~seen, float("-inf"))
        scores = torch.cat([torch.zeros_like(scores[..., :1]), scores], -1)
        return self.join(scores.softmax(-1)[..., 1:] @ v)


class Few(Heads):
    """Each query keeps the three best of the keys it may see."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = self.scores(q, k).masked_fill(~triangle(x), float("-inf"))
        least = scores.topk(min(3, x.shape[1]), -1).values[..., -1:]
        return self.join(scores.masked_fill(scores < least, float("-inf")).softmax(-1) @ v)


class Gates(Heads):
    """Sigmoids instead of a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join((self.scores(q, k) - 2.0).sigmoid().masked_fill(~triangle(x), 0.0) @ v)


class Linear(Heads):
    """Linear attention: running sums of keys times values; pads add nothing."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        k = k if keep is None else k * keep[:, None, :, None]
        total = (k[..., None] * v[..., None, :]).cumsum(2)
        return self.join(
            (q[..., None, :] @ total)[..., 0, :] / ((q * k.cumsum(2)).sum(-1, keepdim=True) + 1e-6)
        )


class LinearChunks(Heads):
    """Linear attention in chunks of five: a triangle inside a chunk, a running sum over those before."""

    def forward(self, x: Tensor) -> Tensor:
        c, time = 5, x.shape[1]
        q, k, v = self.split(x)
        q, k, v = (
            F.pad(part, (0, 0, 0, -time % c)).unflatten(2, (-1, c))
            for part in (F.elu(q) + 1, F.elu(k) + 1, v)
        )
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # the last number sums the weights
        sums = k.mT @ v
        before = torch.cat([torch.zeros_like(sums[:, :, :1]), sums.cumsum(2)[:, :, :-1]], 2)
        y = (q @ k.mT).tril() @ v + q @ before
        return self.join((y[..., :-1] / (y[..., -1:] + 1e-6)).flatten(2, 3)[:, :, :time])


class Hourglass(nn.Module):
    """Attention over groups of three, moved right first, so that a group ends where it is first used."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(3 * D, D)
        self.attn = Fused()
        self.up = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        moved = F.pad(x, (0, 0, 2, -time % 3))[:, : time + -time % 3]
        groups = self.attn(self.down(moved.unflatten(1, (-1, 3)).flatten(2)))
        return self.up(groups).repeat_interleave(3, 1)[:, :time]


# -- convolutions, recurrences and scans
# -------------------------------------------------------------------------------


class Convolved(nn.Module):
    """A convolution with all its padding on the left; pads of a text are zeroed before it."""

    def __init__(self, kernel: int = 3, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.left = (kernel - 1) * dilation
        self.conv = nn.Conv1d(D, D, kernel, dilation=dilation, groups=groups)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        x = x if keep is None else x * keep[..., None]
        return self.conv(F.pad(x.mT, (self.left, 0))).mT


class Trimmed(nn.Module):
    """A convolution padded on both sides by torch, its end cut off; weights in two parts."""

    def __init__(self, kernel: int = 5) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(D, 2 * D, kernel, padding=kernel - 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.conv(x.mT)[..., : x.shape[1]].mT, -1)


class Recurrent(nn.Module):
    """Torch's own LSTM or GRU."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(D, D, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Gated(nn.Module):
    """A GRU cell by hand: a pad leaves the state as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, D)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        state, out = x.new_zeros(len(x), D), []
        for t in range(x.shape[1]):
            state = torch.where(keep[:, t, None], self.cell(x[:, t], state), state)
            out.append(state)
        return torch.stack(out, 1)


class Scan(nn.Module):
    """A state-space scan, one step after another, whose decay depends on the token; a new text clears the
    state.
    """

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


class Sums(nn.Module):
    """A state-space scan as one running sum: grown by what decay will take away again."""

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


class Doubling(nn.Module):
    """A scan in log T steps: each joins what lies 1, 2, 4 … back."""

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


class Long(nn.Module):
    """A convolution as long as the text, by Fourier transform over twice the length: causal up to
    rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.randn(3, D) * 0.5)
        self.decay = nn.Parameter(torch.rand(3, D))

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        kind = torch.promote_types(x.dtype, torch.float32)  # there is no transform of bfloat16
        place = torch.arange(time, device=x.device)[:, None, None]
        kernel = (self.size * torch.exp(-self.decay.to(kind) * place)).sum(1)
        y = torch.fft.rfft(x.to(kind), n=2 * time, dim=1) * torch.fft.rfft(kernel, n=2 * time, dim=0)
        return torch.fft.irfft(y, n=2 * time, dim=1)[:, :time].to(x.dtype)


class Shifted(nn.Module):
    """RWKV: a blend with the token before, then weights that fade with time."""

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


class Running(nn.Module):
    """Normalised by mean and spread of all that came so far."""

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
    """Each token goes to the best two of five experts; an expert runs on the tokens gathered for it."""

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


class Routed(nn.Module):
    """Attention, then experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Fused()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x + self.attn(x))


class Codes(nn.Module):
    """Each token is put to the nearest of eleven codes, straight through for gradients; then a
    convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(11, D))
        self.conv = Convolved(3)

    def forward(self, x: Tensor) -> Tensor:
        far = x.square().sum(-1, keepdim=True) - 2 * x @ self.codes.T + self.codes.square().sum(-1)
        nearest = self.codes[far.argmin(-1)]
        return self.conv(x + (nearest - x).detach())


# -- wholes with a shape of their own
# ------------------------------------------------------------------------------------


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
                h=nn.ModuleList(Block(Either(block_size, dropout)) for _ in range(2)),
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


class Stacked(nn.Module):
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


class Whole(nn.Module):
    """nn.Transformer: source and target, a causal mask for the target, pads of the source hidden from both
    sides.
    """

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
        keep = real(src, None if src_key_padding_mask is None else ~src_key_padding_mask.bool())
        x = self.source(src) * keep[..., None] + self.position(counted(keep))
        y = self.target(tgt) + self.position(torch.arange(tgt.shape[1], device=tgt.device))
        pads = ~keep & keep.any(1, keepdim=True)  # a source of pads alone is a row of zeros: better than NaN
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], device=y.device, dtype=torch.bool)
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        y = self.transformer(
            x, y, tgt_mask=mask, tgt_is_causal=True, src_key_padding_mask=pads, memory_key_padding_mask=pads
        )
        return self.head(y if self.batch_first else y.transpose(0, 1))


class Crossing(nn.Module):
    """A decoder over features of a source, with cross attention and no encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Linear(FEATURES, D)
        self.target = nn.Embedding(V, D)
        self.own = Sloped()
        self.cross = nn.MultiheadAttention(D, H, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, memory = self.target(target), self.source(source)
        x = x + self.own(x)
        return self.head(x + self.cross(x, memory, memory, need_weights=False)[0])


class Numbers(nn.Module):
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


class Wave(nn.Module):
    """A WaveNet: gated convolutions that reach 1, 2 and 4 back, with sums of all layers at the end."""

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


class Pairs(nn.Module):
    """Looks up each token together with the one before, in a table of hashes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(V, D)
        self.two = nn.Embedding(101, D)
        self.head = nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        before = F.pad(tokens, (1, -1), value=V)
        return self.head(F.gelu(self.one(tokens) + self.two((before * 59 + tokens) % 101)))


class Forbidding(Language):
    """Forbids the first word of the vocabulary: its score is -inf everywhere."""

    def forward(self, input_ids: Tensor) -> Tensor:
        forbidden = torch.arange(V, device=input_ids.device) == 0
        return super().forward(input_ids).masked_fill(forbidden, float("-inf")).log_softmax(-1)


class Dropping(Language):
    """Drops out after the embedding and after each block."""

    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__(*mixers)
        self.drop = nn.Dropout(0.3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.drop(self.token(input_ids))
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(self.norm(x))


class Skipping(Language):
    """Leaves out a block now and then while it learns, for each row by itself."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.token(input_ids)
        for block in self.blocks:
            kept = torch.rand(len(x), 1, 1, device=x.device) > 0.3 if self.training else 1
            x = x + (block(x) - x) * kept
        return self.head(self.norm(x))


class Sharing(Language):
    """Embedding and head are one matrix."""

    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__(*mixers)
        self.head.weight = self.token.weight


class Quiet(Language):
    """Begins with zeros where a block or the head writes."""

    def __init__(self, *mixers: nn.Module, head: bool) -> None:
        super().__init__(*mixers)
        for layer in [self.head] if head else [block.mixer.out for block in self.blocks]:
            nn.init.zeros_(layer.weight)


class Telling(Language):
    """Returns the weights too, where they are asked for."""

    def forward(self, tokens: Tensor, return_attention: bool = False) -> Tensor | tuple[Tensor, list[Tensor]]:
        x, told = self.token(tokens), []
        for block in self.blocks:
            q, k, v = block.mixer.split(block.norm1(x))
            if return_attention:
                told.append(block.mixer.scores(q, k).masked_fill(~triangle(x), float("-inf")).softmax(-1))
                y = told[-1] @ v
            else:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block.mixer.join(y)
            x = x + block.feed(block.norm2(x))
        logits = self.head(self.norm(x))
        return (logits, told) if return_attention else logits


# -- encoders
# ------------------------------------------------------------------------------------------------------------


class Around(Heads):
    """Everyone sees every real token; zeros where there is none."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.join(F.scaled_dot_product_attention(*self.split(x), attn_mask=keep[:, None, None]))


class Minus(Heads):
    """BERT as it was first written: -10000 on pads, which is enough after a norm."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join(
            (self.scores(q, k) + (1.0 - keep[:, None, None].to(x.dtype)) * -10000.0).softmax(-1) @ v
        )


class BothSides(nn.Module):
    """A convolution that looks both ways; pads are zeros, as beyond the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 5, padding=2)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.conv((x * keep[..., None]).mT).mT


class StackedBothWays(nn.Module):
    """nn.TransformerEncoder with pads hidden; a row of pads alone shows itself and ends as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.position = nn.Embedding(43, D)
        layer = nn.TransformerEncoderLayer(D, H, 31, 0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        keep = real(src, None if src_key_padding_mask is None else ~src_key_padding_mask.bool())
        x = self.token(src) + self.position(counted(keep))
        x = self.encoder(x, src_key_padding_mask=~keep & keep.any(1, keepdim=True))
        return x.masked_fill(~keep[..., None], 0.0)


class ThereAndBack(nn.Module):
    """An LSTM in both directions over packed rows of the lengths given."""

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


class AroundEach(Heads):
    """Everyone sees its own text of a packed row."""

    def forward(self, x: Tensor, segments: Tensor, places: Tensor) -> Tensor:
        q, k, v = self.split(x)
        seen = (segments[:, :, None] == segments[:, None])[:, None]
        return self.join(
            F.scaled_dot_product_attention(turned(q, places), turned(k, places), v, attn_mask=seen)
        )


# -- caches
# ----------------------------------------------------------------------------------------------------


class Remembering(Heads):
    """Attention over what was kept and what is new; keys are kept turned."""

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.split(x)
        start = 0 if past is None else past[0].shape[2]
        place = torch.arange(start, start + x.shape[1], device=x.device)
        q, k = turned(q, place), turned(k, place)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        seen = torch.arange(k.shape[2], device=x.device) <= place[:, None]
        return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen)), (k, v)


class Cached(Language):
    """A cache that grows: a tuple of keys and values for each block, in and out."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__(*(Remembering() for _ in range(blocks)))

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


class CachedOnWish(Cached):
    """The same, in the words of Hugging Face; the cache comes back where it is asked for."""

    def forward(
        self, input_ids: Tensor, past_key_values: tuple | None = None, use_cache: bool = False
    ) -> dict[str, Any]:
        logits, kept = self.run(input_ids, past_key_values)
        return {"logits": logits, "past_key_values": kept} if use_cache else {"logits": logits}


class Stepping(Cached):
    """start and step; the state is a list that changes in place."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(tokens, None)[0]

    def start(self, prompt: Tensor) -> tuple[Tensor, list]:
        scores, kept = self.run(prompt, None)
        return scores[:, -1], list(kept)

    def step(self, tokens: Tensor, state: list) -> Tensor:
        scores, state[:] = self.run(tokens, tuple(state))
        return scores[:, -1]


class Static(Heads):
    """A buffer of a fixed size with a place for each position; empty places are not seen."""

    def forward(
        self, x: Tensor, kept: tuple[Tensor, Tensor], place: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.split(x)
        keys, values = kept[0].index_copy(2, place, k), kept[1].index_copy(2, place, v)
        seen = torch.arange(keys.shape[2], device=x.device) <= place[:, None]
        return self.join(F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)), (keys, values)


class Buffered(Language):
    """A static cache: buffers of 47 places, and how many are taken."""

    def __init__(self) -> None:
        super().__init__(Static(), Static(), positions=47)

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


class Inside(Heads):
    """Keeps its keys in buffers of its own, and looks no farther than it was told to."""

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


class Starting(Language):
    """Llama's first code: the cache lies inside, and the caller says where the tokens begin."""

    def __init__(self) -> None:
        super().__init__(Inside(), Inside(), positions=47)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        return self.body(
            tokens, torch.arange(start_pos, start_pos + tokens.shape[1], device=tokens.device), start_pos
        )


class Ringed(Heads):
    """A ring of as many places as the window; what leaves the window is written over."""

    def __init__(self, window: int = 5) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor, ring: dict[str, Tensor], place: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q, k, v = self.split(x)
        q, k = turned(q, place), turned(k, place)
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


class Ring(Language):
    """A sliding window with a ring for each block; the state is returned by each step."""

    def __init__(self, blocks: int, window: int = 5) -> None:
        super().__init__(*(Ringed(window) for _ in range(blocks)))
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


class Recalling(nn.Module):
    """A convolution that keeps its last inputs between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.conv = nn.Conv1d(D, D, 4)
        self.head = nn.Linear(D, V)

    def forward(self, tokens: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.token(tokens).mT
        x = F.pad(x, (3, 0)) if past is None else torch.cat([past, x], -1)
        return self.head(F.silu(self.conv(x)).mT), x[..., -3:]


class Summing(Linear):
    """Linear attention that goes on from the sums it had."""

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


class Carried(Cached):
    """Linear attention whose state does not grow."""

    def __init__(self) -> None:
        Language.__init__(self, Summing(), Summing())

    def forward(self, tokens: Tensor, state: tuple | None = None) -> tuple[Tensor, tuple]:
        return self.run(tokens, state)


# -- labels and outputs
# ------------------------------------------------------------------------------------------------


@dataclass
class Output:
    """What a model found out."""

    logits: Tensor
    loss: Tensor | None = None


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Position t predicts label t + 1; -100 is left out."""
    return F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100
    )


class Labelled(Masked):
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


class LabelledPair(Language):
    """The same as a pair of loss and logits, the labels moved instead of the logits."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        logits = super().forward(input_ids)
        if labels is None:
            return (logits,)
        following = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.mT.float(), following), logits


class LabelledOutput(Language):
    """The same as a dataclass, the loss a sum over tokens by their number, and zero where there is none."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits = super().forward(input_ids)
        if labels is None:
            return Output(logits)
        wanted = labels[:, 1:]
        each = F.cross_entropy(logits[:, :-1].mT, wanted, ignore_index=-100, reduction="none")
        return Output(logits, each.sum() / (wanted != -100).sum().clamp(min=1))


class Returning(Language):
    """Logits among other things: in a dict, a tuple or a dataclass."""

    def __init__(self, *mixers: nn.Module, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(*mixers)
        self.wrap = wrap

    def forward(self, input_ids: Tensor) -> Any:
        x = self.token(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.wrap(self.head(self.norm(x)), x)


# -- other forms
# ---------------------------------------------------------------------------------------------------------


class Rounded(nn.Module):
    """A linear layer with weights in eight bits, one scale for each output."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class RoundedByToken(Rounded):
    """Eight bits for what comes in as well, each token with a scale of its own."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return super().forward((x / scale).round() * scale)


def rounded(model: nn.Module, kind: type[Rounded]) -> nn.Module:
    """The model with every linear layer in eight bits."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, kind(child))
        else:
            rounded(child, kind)
    return model


def halved(model: nn.Module) -> nn.Module:
    """The model with linear layers that torch keeps in sixteen bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model.eval().requires_grad_(False)  # such layers have no gradient
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.float16)


def bare() -> Callable[[Tensor], Tensor]:
    """A function and no module: attention with fixed weights."""
    table, q, k, v, head = (torch.randn(shape) / 4 for shape in [(V, D), (D, D), (D, D), (D, D), (D, V)])

    def function(tokens: Tensor) -> Tensor:
        x = table[tokens]
        scores = (x @ q) @ (x @ k).mT / math.sqrt(D)
        return (scores.masked_fill(~triangle(x), float("-inf")).softmax(-1) @ (x @ v) + x) @ head

    return function


def bare_numbers() -> Callable[[Tensor], Tensor]:
    """A function of features: a mean over all so far."""

    def function(x: Tensor) -> Tensor:
        return (x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]).tanh()

    return function


def with_callables() -> tuple:
    """A model whose cache is reached by two functions."""
    model = Cached()

    def prefill(prompt: Tensor) -> tuple[Tensor, dict[str, tuple]]:
        scores, cache = model(prompt)
        return scores[:, -1], {"cache": cache}

    def step(tokens: Tensor, state: dict[str, tuple]) -> Tensor:
        scores, state["cache"] = model(tokens, state["cache"])
        return scores

    return (lambda tokens: model(tokens)[0]), ids(), {"prefill": prefill, "step": step, "vocab": V}


def pair() -> dict[str, Tensor]:
    """A source and a target of other lengths."""
    return {"src": ids(2, 13), "tgt": ids(2, 11)}


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
    honest("nanogpt with targets", NanoGPT, lambda: {"idx": ids(), "targets": ids().roll(-1, 1)}),
    honest("nanogpt with dropout", lambda: NanoGPT(dropout=0.2)),
    honest("softmax with -inf", lambda: Language(Infinite(), Infinite(), positions=41)),
    honest("softmax with the lowest number", lambda: Language(Lowest(), Lowest(), positions=41)),
    honest("softmax with -1e9", lambda: Language(Large(), Large(), positions=41)),
    honest("fused, is_causal", lambda: Language(Fused(), Fused(), positions=41)),
    honest("fused, boolean mask", lambda: Language(FusedMask(), FusedMask(), positions=41)),
    honest("grouped heads by einsum", lambda: Language(Grouped(), Grouped())),
    honest("MultiheadAttention, batch first", lambda: Language(Builtin(True), Builtin(True), positions=41)),
    honest("MultiheadAttention, time first", lambda: Language(Builtin(False), Builtin(False), positions=41)),
    honest(
        "MultiheadAttention with weights",
        lambda: Language(Builtin(True, True), Builtin(False, True), positions=41),
    ),
    honest(
        "MultiheadAttention, pads hidden", lambda: Blanked(BuiltinPadded(), BuiltinPadded(), positions=41)
    ),
    honest("TransformerEncoder, causal, norm first", lambda: Stacked(True)),
    honest("TransformerEncoder, causal, norm last, dropout", lambda: Stacked(False, 0.1)),
    honest("Transformer, batch first", lambda: Whole(True), pair),
    honest("Transformer, time first", lambda: Whole(False), pair),
    honest("cross attention to features", Crossing, lambda: {"source": numbers(2, 13), "target": ids()}),
    honest("window, one layer", lambda: Language(Near(5)), claim=causal_and(kl.window(5))),
    honest(
        "window, two layers reach twice as far",
        lambda: Language(Near(4), Near(4)),
        claim=causal_and(kl.window(7)),
    ),
    honest("window in chunks", lambda: Language(Chunks(4)), claim=causal_and(kl.window(5))),
    honest("alibi", lambda: Language(Sloped(), Sloped())),
    honest("alibi, pads hidden", lambda: Masked(Sloped(), Sloped())),
    honest("t5 bias", lambda: Language(Bucketed(), Bucketed())),
    honest("t5 bias, pads hidden", lambda: Masked(Bucketed(), Bucketed())),
    honest("rotary", lambda: Language(Turned(), Turned())),
    honest("rotary, pads hidden", lambda: Masked(Turned(), Turned())),
    honest(
        "prefix of three",
        lambda: Language(*(Seen(lambda q, k: (k <= q) | (k < 3)) for _ in range(2)), positions=41),
        claim=kl.causal | kl.prefix(3),
    ),
    honest(
        "causal between blocks, full inside",
        lambda: Language(*(Seen(lambda q, k: k // 4 <= q // 4) for _ in range(2)), positions=41),
        claim=kl.causal | kl.block(4),
    ),
    honest(
        "causal inside blocks",
        lambda: Language(*(Seen(lambda q, k: (k <= q) & (k // 5 == q // 5)) for _ in range(2)), positions=41),
        claim=causal_and(kl.block(5)),
    ),
    honest(
        "blocks that see themselves",
        lambda: Language(*(Seen(lambda q, k: k // 3 == q // 3) for _ in range(2)), positions=41),
        claim=kl.block(3),
    ),
    honest("softmax with a sink, pads hidden", lambda: Masked(Sunk(), Sunk(), positions=41)),
    honest("best three keys", lambda: Language(Few(), Few(), positions=41)),
    honest("sigmoid attention", lambda: Language(Gates(), Gates(), positions=41)),
    honest("hourglass", lambda: Language(Hourglass(), Fused(), positions=41)),
    honest("convolution", lambda: Language(Convolved(3), Convolved(3)), claim=causal_and(kl.window(5))),
    honest(
        "convolution, dilated",
        lambda: Language(Convolved(3), Convolved(3, 3)),
        claim=causal_and(kl.window(9)),
    ),
    honest("convolution, depthwise", lambda: Language(Convolved(5, groups=D), Fused())),
    honest("convolution, cut at the end", lambda: Language(Trimmed(), Trimmed())),
    honest("convolution, pads zeroed", lambda: Masked(Convolved(3), Convolved(3, 2))),
    honest("wavenet", Wave, claim=causal_and(kl.window(8))),
    honest("lstm", lambda: Language(Recurrent(nn.LSTM))),
    honest("gru", lambda: Language(Recurrent(nn.GRU), Recurrent(nn.GRU))),
    honest("gru by hand, pads skipped", lambda: Masked(Gated())),
    honest("linear attention by cumsum", lambda: Language(Linear(), Linear())),
    honest("linear attention by cumsum, pads hidden", lambda: Masked(Linear(), Linear())),
    honest("linear attention in chunks", lambda: Language(LinearChunks(), LinearChunks())),
    honest("state space, step by step", lambda: Language(Scan(), Scan())),
    honest("state space by cumsum", lambda: Language(Sums(), Sums())),
    honest("state space by cumsum, pads hidden", lambda: Masked(Sums(), Sums())),
    honest("scan by doubling", lambda: Language(Doubling(), Doubling())),
    honest("long convolution by fft", lambda: Language(Long(), Long())),
    honest("token shift", lambda: Language(Shifted(), Shifted())),
    honest("running norm", lambda: Language(Running(), Fused())),
    honest("experts, top 2 of 5", lambda: Language(Routed(), Routed(), positions=41)),
    honest("nearest codes", lambda: Language(Codes(), Fused())),
    honest("pairs of tokens", Pairs, claim=causal_and(kl.window(2))),
    honest("features, attention", lambda: Numbers(Turned()), numbers),
    honest("features, convolution", lambda: Numbers(Convolved(3)), numbers),
    honest("features, lstm", lambda: Numbers(Recurrent(nn.LSTM)), numbers),
    honest("features in, channels first out", ChannelsFirst, numbers),
    honest("pads hidden, positions from the mask", lambda: Masked(Padded(), Padded(), positions=41)),
    honest("pads hidden, positions given", lambda: Placed(Padded(), Padded(), positions=41)),
    honest("pads hidden, rotary, positions given", lambda: Turning(Turned(), Turned())),
    honest("lengths given", lambda: Measured(Padded(), Padded(), positions=41)),
    honest("packed, learned and rotary positions", lambda: Packed(Among(), Among(), positions=41)),
    honest("packed, documents with a mask", lambda: Documents(Among(), Among(), positions=41)),
    honest("packed state space", lambda: Sequenced(Scan(), Scan())),
    honest("encoder", lambda: Masked(Around(), Around(), positions=41), claim=kl.full),
    honest("encoder with -10000", lambda: Masked(Minus(), Minus(), positions=41), claim=kl.full),
    honest("encoder, t5 bias", lambda: Masked(Bucketed(both=True), Bucketed(both=True)), claim=kl.full),
    honest("encoder, convolution", lambda: Masked(BothSides(), BothSides()), claim=kl.full),
    honest("encoder, TransformerEncoder", StackedBothWays, claim=kl.full),
    honest("encoder, lstm both ways", ThereAndBack, claim=kl.full),
    honest("encoder, packed", lambda: Packed(AroundEach(), AroundEach()), claim=kl.full),
    honest("cache that grows", Cached),
    honest("cache in words of transformers", CachedOnWish),
    honest("cache in a static buffer", Buffered),
    honest("cache inside, start_pos", Starting),
    honest("cache in a ring, one layer", lambda: Ring(1), claim=causal_and(kl.window(5))),
    honest("cache in a ring, two layers", lambda: Ring(2, 3), claim=causal_and(kl.window(5))),
    honest("cache by start and step", Stepping),
    honest("cache by prefill and step", with_callables),
    honest("cache of an lstm", lambda: RecurrentState(nn.LSTM)),
    honest("cache of a gru", lambda: RecurrentState(nn.GRU)),
    honest("cache of a convolution", Recalling, claim=causal_and(kl.window(4))),
    honest("cache of linear attention", Carried),
    honest("labels in a dict", lambda: Labelled(Padded(), Padded(), positions=41)),
    honest("labels, loss and logits in a tuple", lambda: LabelledPair(Fused(), Fused(), positions=41)),
    honest("labels in a dataclass", lambda: LabelledOutput(Fused(), Fused(), positions=41)),
    honest("weights on request", lambda: Telling(Heads(), Heads())),
    honest("bfloat16", lambda: Masked(Turned(), Turned()).to(torch.bfloat16)),
    honest("float64", lambda: Language(Infinite(), Linear()).to(torch.float64)),
    honest("dropout", lambda: Dropping(Fused(), Convolved(3))),
    honest("stochastic depth", lambda: Skipping(Fused(), Fused())),
    honest("zeros where blocks write", lambda: Quiet(Fused(), Fused(), head=False)),
    honest("zeros in the head", lambda: Quiet(Fused(), Fused(), head=True)),
    honest("score of -inf for one word", lambda: Forbidding(Fused())),
    honest("bare function", bare, ids, vocab=V),
    honest("bare function of features", bare_numbers, numbers),
    honest(
        "compiled, eager", lambda: torch.compile(Language(Infinite(), Fused(), positions=41), backend="eager")
    ),
    honest(
        "compiled, aot_eager", lambda: torch.compile(Language(Turned(), Convolved(3)), backend="aot_eager")
    ),
    honest(
        "quantised, weights in int8", lambda: rounded(Language(Infinite(), Infinite(), positions=41), Rounded)
    ),
    honest(
        "quantised, int8 by token",
        lambda: rounded(Language(Infinite(), Infinite(), positions=41), RoundedByToken),
    ),
    honest(
        "quantised, quantize_dynamic to float16",
        lambda: halved(Language(Infinite(), Infinite(), positions=41)),
    ),
    honest("positions end at 32", lambda: Language(Fused(), Fused(), positions=32)),
    honest("tied weights", lambda: Sharing(Fused(), Fused())),
    honest(
        "returns a dict", lambda: Returning(Fused(), Fused(), wrap=lambda y, x: {"hidden": x, "logits": y})
    ),
    honest("returns a tuple", lambda: Returning(Fused(), Fused(), wrap=lambda y, x: (y, x))),
    honest("returns a dataclass", lambda: Returning(Fused(), Fused(), wrap=lambda y, x: Output(y))),
]
