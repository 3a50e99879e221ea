"""Later tokens move earlier outputs: masks that are missing or wrong, and everything over time that is no
attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import keepleft as kl
from audit.planted.case import Planted, seeded
from audit.planted.parts import (
    HEADS,
    VOCAB,
    WIDTH,
    Attention,
    LanguageModel,
    MaskedAttention,
    apply_rotary,
    causal_mask,
    masked_softmax,
    random_tokens,
    sinusoidal_positions,
)


class Unmasked(Attention):
    """No mask at all."""

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Inverted(Attention):
    """A mask where True means hide, given to a kernel where True means attend."""

    def mix(self, q, k, v):
        hidden = torch.triu(torch.ones(q.shape[2], q.shape[2], device=q.device)).bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)


class OffByOne(Attention):
    """The triangle starts one diagonal too late."""

    def mix(self, q, k, v):
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(diagonal=2)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


class Transposed(Attention):
    """Scores are (keys, queries), the mask is (queries, keys)."""

    def mix(self, q, k, v):
        scores = torch.einsum("bhkd,bhqd->bhkq", k, q) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~causal_mask(q.shape[2], q.device), float("-inf")).softmax(-1)
        return torch.einsum("bhkq,bhkd->bhqd", weights, v)


class Multiplied(Attention):
    """Scores are multiplied by the triangle: a hidden score of zero is a score like any other."""

    def mix(self, q, k, v):
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        return (scores * causal_mask(q.shape[2], q.device)).softmax(-1) @ v


class AfterSoftmax(Attention):
    """The mask comes after the softmax: the denominator contains the hidden keys."""

    def mix(self, q, k, v):
        weights = ((q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])).softmax(-1)
        return (weights * causal_mask(q.shape[2], q.device)) @ v


class WrongAxis(Attention):
    """Softmax over the queries: the sum of a column contains later ones."""

    def mix(self, q, k, v):
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        return scores.masked_fill(~causal_mask(q.shape[2], q.device), float("-inf")).softmax(-2) @ v


class MinusTwenty(Attention):
    """Hidden scores get -20, which unscaled scores exceed."""

    def mix(self, q, k, v):
        scores = 4 * (q @ k.transpose(-2, -1))
        return (scores - 20.0 * (~causal_mask(q.shape[2], q.device)).to(q.dtype)).softmax(-1) @ v


class MinusTenThousand(nn.Module):
    """Hidden scores get -1e4, which large features exceed."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        scores = scores + torch.full(scores.shape[-2:], -1e4, device=x.device, dtype=x.dtype).triu(1)
        return x + scores.softmax(-1) @ self.v(x)


class Forecast(nn.Module):
    """Features in, features out, through one layer after another."""

    def __init__(self, *layers: nn.Module, width: int = 5) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.layers = nn.ModuleList(layers)
        self.leave = nn.Linear(width, width)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


class OneHeadUnmasked(Attention):
    """The last head has no mask."""

    def mix(self, q, k, v):
        seen = causal_mask(q.shape[2], q.device).expand(self.heads, -1, -1).clone()
        seen[-1] = True
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class UnmaskedInEval(Attention):
    """Causal in training, unmasked in eval mode."""

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.training)


class UnmaskedInTraining(Attention):
    """Causal in eval mode, unmasked in training."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def mix(self, q, k, v):
        if not self.training:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop((q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)) @ v


class MaskedForBatchOfOne(Attention):
    """Masked for a batch of one only."""

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=len(q) == 1)


class HalfPrecision(Attention):
    """The path for half precision forgot is_causal."""

    def mix(self, q, k, v):
        if q.dtype == torch.float32 or q.dtype == torch.float64:
            return (
                masked_softmax(
                    q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), causal_mask(q.shape[2], q.device)
                )
                @ v
            )
        return F.scaled_dot_product_attention(q, k, v)


class TimestampAttention(nn.Module):
    """Attends to timestamps that are not later; in bfloat16 neighbouring frames have the same timestamp."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        time = 1 + 0.005 * torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        seen = time[:, None] >= time[None, :]
        return x + F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=seen)


class Chunked(Attention):
    """Sequences longer than a chunk are split into chunks, which are unmasked inside."""

    def __init__(self, chunk: int = 16) -> None:
        super().__init__()
        self.chunk = chunk

    def mix(self, q, k, v):
        length = q.shape[2]
        if length <= self.chunk:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        parts = [part.split(self.chunk, dim=2) for part in (q, k, v)]
        return torch.cat([F.scaled_dot_product_attention(*some) for some in zip(*parts, strict=True)], 2)


class ShortBuffer(Attention):
    """A mask buffer for 13 tokens; everything beyond it is visible."""

    def __init__(self, size: int = 13) -> None:
        super().__init__()
        self.register_buffer("hidden", ~causal_mask(size))

    def mix(self, q, k, v):
        length = q.shape[2]
        more = max(0, length - len(self.hidden))
        hidden = F.pad(self.hidden, (0, more, 0, more), value=False)[:length, :length]
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


class BlockCausal(Attention):
    """Causal between blocks of three, unmasked inside a block."""

    block = 3

    def mix(self, q, k, v):
        at = torch.arange(q.shape[2], device=q.device) // self.block
        return F.scaled_dot_product_attention(q, k, v, attn_mask=at[:, None] >= at[None, :])


class ChunkMeans(Attention):
    """A chunk attends to the means of earlier chunks, and from the third chunk on to its own mean too."""

    def __init__(self, chunk: int = 5) -> None:
        super().__init__()
        self.chunk = chunk

    def mix(self, q, k, v):
        length, size = q.shape[2], self.chunk
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        chunks = -(-length // size)
        means = torch.stack([v[:, :, n * size : (n + 1) * size].mean(2) for n in range(chunks)], 2)
        at = torch.arange(length, device=q.device) // size
        n = torch.arange(chunks, device=q.device)
        seen = (n[None, :] < at[:, None]) | ((n[None, :] == at[:, None]) & (at[:, None] >= 2))
        return y + seen.to(v.dtype) @ means


class BothSides(Attention):
    """A window around the query instead of before it."""

    window = 4

    def mix(self, q, k, v):
        at = torch.arange(q.shape[2], device=q.device)
        near = (at[:, None] - at[None, :]).abs() < self.window
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


class PrefixTooLong(Attention):
    """A prefix of five is visible to all positions, but the mask makes it six."""

    def mix(self, q, k, v):
        at = torch.arange(q.shape[2], device=q.device)
        seen = (at[None, :] <= at[:, None]) | (at[None, :] <= 5)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class RelativeBias(Attention):
    """A relative position bias and no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(17, HEADS)

    def mix(self, q, k, v):
        at = torch.arange(q.shape[2], device=q.device)
        bias = self.bias((at[None, :] - at[:, None]).clamp(-8, 8) + 8).permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


class WrongView(nn.Module):
    """Heads split by view() where a transpose is needed: head 1 of token 0 is the middle of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (part(x).view(rows, HEADS, length, width // HEADS) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class ZeroOut(Unmasked):
    """No mask, and an output projection that starts at zero and hides it."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)


class Gated(nn.Module):
    """Adds the mean of all tokens through a gate that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.attn(x) + self.gate * x.mean(1, keepdim=True)


class TinyMean(nn.Module):
    """Adds a millionth of the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x):
        return self.attn(x) + 1e-6 * x.mean(1, keepdim=True)


class DetachedMean(nn.Module):
    """Subtracts the mean of all tokens, detached, so that gradients do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x):
        return self.attn(x - x.mean(1, keepdim=True).detach())


class TimeNorm(nn.Module):
    """LayerNorm along time instead of along the features."""

    def forward(self, x):
        x = x.transpose(1, 2)
        return F.layer_norm(x, x.shape[-1:]).transpose(1, 2)


class NormedInTime(LanguageModel):
    """The second block has the wrong norm."""

    def __init__(self) -> None:
        super().__init__(Attention(), Attention())
        self.blocks[1].norm2 = TimeNorm()


class ConvLayer(nn.Module):
    """A causal convolution over (B, D, T) with a norm, a gate and a bypass."""

    def __init__(self, width: int, norm: nn.Module | None = None, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3)
        self.norm = norm or nn.Identity()
        self.gate = gate or nn.Identity()

    def forward(self, x):
        return x + self.gate(torch.relu(self.norm(self.conv(F.pad(x, (2, 0))))))


class ConvNet(nn.Module):
    """Tokens to logits through layers over (B, D, T)."""

    def __init__(self, *layers: nn.Module, width: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Conv1d(width, VOCAB, 1)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens).transpose(1, 2))).transpose(1, 2)


class SqueezeExcite(nn.Module):
    """Channels are weighted by their mean over all time steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.squeeze = nn.Conv1d(width, 3, 1)
        self.excite = nn.Conv1d(3, width, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean(-1, keepdim=True)))))


class Symmetric(nn.Module):
    """padding=1 on a kernel of three: one step ahead."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return x + torch.relu(self.conv(x))


class Chomped(nn.Module):
    """A dilated convolution padded on both sides, where one column too few is cut off on the left of the
    answer.
    """

    def __init__(self, width: int, dilation: int = 3) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(width, width, 3, padding=self.pad, dilation=dilation)

    def forward(self, x):
        return x + torch.relu(self.conv(x)[..., 1 : 1 + x.shape[-1]])


class Circular(nn.Module):
    """Circular padding: the first tokens see the last ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3)

    def forward(self, x):
        around = torch.arange(-2, x.shape[-1], device=x.device) % x.shape[-1]
        return x + torch.relu(self.conv(x[..., around]))


class MaxPooled(nn.Module):
    """Max pooling over three neighbours, one of them later."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool1d(3, stride=1, padding=1)

    def forward(self, x):
        return x + self.pool(x)


class Hourglass(nn.Module):
    """Pairs are averaged and upsampled without a shift: the first of a pair reads the second."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x):
        length = x.shape[1]
        pairs = F.pad(x, (0, 0, 0, length % 2)).unflatten(1, (-1, 2)).mean(2)
        return self.inner(pairs).repeat_interleave(2, dim=1)[:, :length]


class BidirectionalRNN(nn.Module):
    """A bidirectional recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 11)
        self.first = nn.GRU(11, 14, batch_first=True)
        self.second = nn.GRU(14, 7, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, VOCAB)

    def forward(self, tokens):
        x, _ = self.first(self.embed(tokens))
        x, _ = self.second(x)
        return {"logits": self.head(x)}


class ReversedCumsum(nn.Module):
    """A running sum from the wrong end."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.value(x).flip(1).cumsum(1).flip(1) / 10


class Fourier(nn.Module):
    """Mixes by a Fourier transform over time."""

    def forward(self, x):
        return torch.fft.fft2(x.float(), dim=(1, 2)).real.to(x.dtype) / 10


class LinearAttention(nn.Module):
    """Linear attention whose denominator sums over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        q = F.elu(self.q(x)) + 1
        k = F.elu(self.k(x)) + 1
        v = self.v(x)
        state = torch.einsum("btd,bte->btde", k, v).cumsum(1)
        return torch.einsum("btd,btde->bte", q, state) / torch.einsum("btd,bd->bt", q, k.sum(1))[..., None]


class Scan(nn.Module):
    """A state-space scan, from the left or from the right."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.reverse = reverse
        self.decay = nn.Parameter(torch.randn(WIDTH))
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        steps = self.enter(x).unbind(1)
        state, states = torch.zeros_like(steps[0]), []
        for step in reversed(steps) if self.reverse else steps:
            state = torch.sigmoid(self.decay) * state + step
            states.append(state)
        return self.leave(torch.stack(states[::-1] if self.reverse else states, 1))


class ExpertChoice(nn.Module):
    """Expert-choice routing over the whole row: a hard choice, which gradients do not show."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(experts)])

    def forward(self, x):
        scores = self.router(x)
        kept = max(1, x.shape[1] // 3)
        y = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            chosen = torch.zeros_like(scores[..., n]).scatter(1, scores[..., n].topk(kept, 1).indices, 1.0)
            y = y + chosen[..., None] * expert(x)
        return y


class Capacity(nn.Module):
    """Routing in order of position, with a capacity that depends on the length of the sequence."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(experts)])

    def forward(self, x):
        first = F.one_hot(self.router(x).argmax(-1), len(self.experts))
        served = first * (first.cumsum(1) <= math.ceil(0.75 * x.shape[1] / len(self.experts)))
        return sum(served[..., n, None].to(x.dtype) * expert(x) for n, expert in enumerate(self.experts))


class GlobalArgmax(nn.Module):
    """Adds the token with the largest score of the whole sequence to every position."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.score = nn.Linear(WIDTH, 1)
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, x):
        best = self.score(x).squeeze(-1).argmax(1)
        loud = self.table(x.detach().argmax(-1).gather(1, best[:, None]))
        return self.attn(x) + loud


class RankTransform(nn.Module):
    """Features are replaced by their rank among all time steps."""

    def forward(self, x):
        return x.argsort(1).argsort(1).to(x.dtype) / 7


class WindowNormalization(nn.Module):
    """Normalises a series by its overall mean and deviation, as forecasting models do."""

    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()


class CausalRNN(nn.Module):
    """An honest recurrent layer for features."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.rnn = nn.GRU(width, width, batch_first=True)

    def forward(self, x):
        return x + self.rnn(x)[0]


class FixedNorm(nn.Module):
    """LayerNorm over time and features together, for one length only."""

    def __init__(self, length: int = 11) -> None:
        super().__init__()
        self.body = LanguageModel(Attention(), Attention())
        self.body.norm = nn.LayerNorm((length, WIDTH))

    def forward(self, tokens):
        return self.body(tokens)


class Pooled(LanguageModel):
    """The mean over the whole sequence is added before the head."""

    def forward(self, tokens):
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + x.mean(dim=1, keepdim=True))


class RelativePositions(nn.Module):
    """Positions scaled to 0 … 1: a longer sequence changes them all."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(1, WIDTH)

    def forward(self, tokens):
        at = torch.arange(tokens.shape[1], device=tokens.device, dtype=self.lift.weight.dtype)
        return self.lift((at / tokens.shape[1])[None, :, None])


class LengthScaledPositions(LanguageModel):
    """Positions come from a module that knows the total length."""

    def __init__(self) -> None:
        super().__init__(Attention())
        self.pos = RelativePositions()

    def embedded(self, tokens):
        return self.embed(tokens) + self.pos(tokens)


class DynamicRotary(Attention):
    """Rotary positions whose base grows with the length beyond 16."""

    max_length = 16

    def mix(self, q, k, v):
        length = q.shape[2]
        at = torch.arange(length, device=q.device) * (self.max_length / max(self.max_length, length))
        return F.scaled_dot_product_attention(apply_rotary(q, at), apply_rotary(k, at), v, is_causal=True)


class Jitter(LanguageModel):
    """Noise seeded by the sum of all tokens of a row."""

    def embedded(self, tokens):
        x = super().embedded(tokens)
        noise = [
            torch.randn(WIDTH, generator=torch.Generator().manual_seed(int(row.sum()))) for row in tokens
        ]
        return x + 0.1 * torch.stack(noise).to(x)[:, None]


class Shift(nn.Module):
    """The token shift of RWKV in the wrong direction."""

    def __init__(self) -> None:
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, -1, 1))
        self.mix = nn.Parameter(torch.rand(WIDTH))
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.value(x * self.mix + self.time_shift(x) * (1 - self.mix))


class Rolled(nn.Module):
    """A token shift by roll(): the first token gets the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.value(torch.cat([x, torch.roll(x, 1, dims=1)], -1))


class SummaryToken(nn.Module):
    """A leading summary token reads the whole sequence, and the next layer reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.summary = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers = nn.ModuleList([MaskedAttention(), MaskedAttention()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = torch.cat([self.summary.expand(len(tokens), -1, -1), self.embed(tokens)], 1)
        seen = causal_mask(x.shape[1], x.device)
        seen[0] = True
        for layer in self.layers:
            x = x + layer(x, seen)
        return self.head(x)[:, 1:]


class Backfill(LanguageModel):
    """Missing tokens (id 3) are filled with the next token that is not missing."""

    def embedded(self, tokens):
        filled = tokens.clone()
        for t in range(tokens.shape[1] - 2, -1, -1):
            filled[:, t] = torch.where(filled[:, t] == 3, filled[:, t + 1], filled[:, t])
        return super().embedded(filled)


@dataclass
class Config:
    """The configuration of a small GPT."""

    block_size: int = 64
    vocab_size: int = 29
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 10
    dropout: float = 0.1


class SelfAttention(nn.Module):
    """nanoGPT's attention, with the bug on the fast path, on the slow path or on both."""

    def __init__(self, config: Config, fast: bool, slow: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.attn_dropout = nn.Dropout(config.dropout)
        self.flash = True
        self.fast_is_causal = fast
        self.slow_is_causal = slow
        self.register_buffer("bias", torch.tril(torch.ones(config.block_size, config.block_size))[None, None])

    def forward(self, x):
        B, T, C = x.shape  # noqa: N806
        q, k, v = (
            part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2)
        )
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.fast_is_causal)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            if self.slow_is_causal:
                att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class GPTBlock(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, config: Config, attn: nn.Module) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = attn
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 17), nn.GELU(), nn.Linear(17, config.n_embd), nn.Dropout(0.1)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT: (logits, loss); without targets only the last position's logits."""

    def __init__(self, config: Config, *paths: tuple[bool, bool]) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([GPTBlock(config, SelfAttention(config, *path)) for path in paths]),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        t = idx.size(1)
        assert t <= self.config.block_size, f"Cannot forward sequence of length {t}"
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(t, device=idx.device))
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


class FirstLayerOnly(nn.Module):
    """The mask is given to the first layer only."""

    def __init__(self, layers: int = 3, width: int = 10) -> None:
        super().__init__()
        self.tok = nn.Embedding(29, width)
        self.attns = nn.ModuleList([nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(layers)])
        self.head = nn.Linear(width, 29)

    def forward(self, x):
        x = self.tok(x) + sinusoidal_positions(torch.arange(x.shape[1], device=x.device), 10).to(
            self.head.weight.dtype
        )
        mask = ~causal_mask(x.shape[1], x.device)
        for attn, norm in zip(self.attns, self.norms, strict=True):
            x = norm(x + attn(x, x, x, attn_mask=mask, need_weights=False)[0])
            mask = None
        return self.head(x)


class Stacked(nn.Module):
    """torch's own encoder as a language model, without a mask."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, width)
        layer = nn.TransformerEncoderLayer(width, 2, 17, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 29)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))


class NoTargetMask(nn.Module):
    """torch's own Transformer, called without tgt_mask."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.source = nn.Embedding(19, width)
        self.target = nn.Embedding(29, width)
        self.transformer = nn.Transformer(width, 2, 2, 2, 17, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 29)

    def forward(self, src, tgt):
        return self.head(self.transformer(self.source(src), self.target(tgt)))


class DecoderLayer(nn.Module):
    """Self-attention, then cross-attention, by a flag to the target instead of the source."""

    def __init__(self, width: int, itself: bool) -> None:
        super().__init__()
        self.itself = itself
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x, memory):
        x = x + self.attn(x, x, x, attn_mask=~causal_mask(x.shape[1], x.device), need_weights=False)[0]
        read = x if self.itself else memory
        return x + self.cross(x, read, read, need_weights=False)[0]


class CrossAttentionToTarget(nn.Module):
    """In the last layer cross-attention reads the target."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.source_embed = nn.Embedding(19, width)
        self.target_embed = nn.Embedding(29, width)
        self.encoder = nn.Linear(width, width)
        self.decoder = nn.ModuleList([DecoderLayer(width, False), DecoderLayer(width, True)])
        self.head = nn.Linear(width, 29)

    def forward(self, source, target):
        memory, x = self.encoder(self.source_embed(source)), self.target_embed(target)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


@dataclass
class ModelOutput:
    """The output of a Hugging Face model."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    attentions: tuple | None = None


class MaskedModel(nn.Module):
    """Hugging Face's signature; how the two masks meet is up to the class below.

    No positions: any padding is right.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([MaskedAttention(), MaskedAttention()])
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def seen(self, x, attention_mask):
        raise NotImplementedError

    def forward(self, input_ids, attention_mask=None):
        x = self.embed_tokens(input_ids)
        seen = self.seen(x, attention_mask)
        for layer in self.layers:
            x = x + layer(x, seen)
        return ModelOutput(logits=self.lm_head(x))


class MaskReplacesTriangle(MaskedModel):
    """An attention_mask replaces the causal mask."""

    def seen(self, x, attention_mask):
        if attention_mask is None:
            return causal_mask(x.shape[1], x.device)
        return attention_mask.bool()[:, None, None, :]


class TriangleOnlyWithMask(MaskedModel):
    """There is a causal mask only where an attention_mask is given."""

    def seen(self, x, attention_mask):
        if attention_mask is None:
            return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return attention_mask.bool()[:, None, None, :] & causal_mask(x.shape[1], x.device)


class WeightsPathAttention(Attention):
    """Two paths, a fused one and one that returns attention weights; one of them is unmasked."""

    def __init__(self, honest: bool) -> None:
        super().__init__()
        self.honest = honest  # is the path that returns weights masked?

    def forward(self, x, show=False):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if show:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = (
                masked_softmax(scores, causal_mask(length, x.device)) if self.honest else scores.softmax(-1)
            )
            y = weights @ v
        else:
            weights, y = None, F.scaled_dot_product_attention(q, k, v, is_causal=not self.honest)
        return self.out(y.transpose(1, 2).reshape(rows, length, width)), weights


class ReturnsWeights(nn.Module):
    """Returns attention weights on request, which one layer computes on another path."""

    def __init__(self, argument_honest: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first = Attention()
        self.second = WeightsPathAttention(argument_honest)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, output_attentions=False):
        x = self.embed(input_ids)
        x = x + self.first(x)
        y, weights = self.second(x, output_attentions)
        return ModelOutput(logits=self.head(x + y), attentions=(weights,) if output_attentions else None)


def smoothing_function():
    """A function, not a module, that smooths over both neighbours."""
    weight = torch.randn(5, 5) / 3

    def smooth(x):
        x = x @ weight.to(x)
        return (F.pad(x, (0, 0, 1, 0))[:, :-1] + x + F.pad(x, (0, 0, 0, 1))[:, 1:]) / 3

    return smooth


def random_features(rows: int = 2, length: int = 11, width: int = 5, size: float = 1.0):
    """Features (rows, length, width)."""
    return lambda: size * torch.randn(rows, length, width)


def seq2seq(source: str, target: str):
    """An example with a source and a target, under these argument names."""
    return lambda: {source: random_tokens(2, 7, 19), target: random_tokens(2, 11, 29)}


def language(name, module, *mixers, model=LanguageModel, **fields):
    return Planted(name, seeded(lambda: model(*[mixer() for mixer in mixers])), "future", module, **fields)


def convolved(name, module, *layers):
    return Planted(name, seeded(lambda: ConvNet(*[layer() for layer in layers])), "future", module)


def forecast(name, module, *layers, size=1.0):
    return Planted(
        name,
        seeded(lambda: Forecast(*[layer() for layer in layers]), random_features(size=size)),
        "future",
        module,
    )


def conv():
    return ConvLayer(13)


PLANTED = [
    language("mask missing in the second layer", "blocks.1.mixer", Attention, Unmasked, Attention),
    language("mask inverted", "blocks.0.mixer", Inverted, Inverted),
    language("mask off by one", "blocks.2.mixer", Attention, Attention, OffByOne),
    language("scores transposed, mask not", "blocks.0.mixer", Transposed, Attention),
    language("mask multiplied", "blocks.1.mixer", Attention, Multiplied),
    language("mask after softmax", "blocks.0.mixer", AfterSoftmax),
    language("softmax over queries", "blocks.1.mixer", Attention, WrongAxis),
    language("mask of minus twenty", "blocks.0.mixer", MinusTwenty, Attention),
    forecast("mask of minus ten thousand", "layers.0", MinusTenThousand, CausalRNN, size=10.0),
    language("one head unmasked", "blocks.1.mixer", Attention, OneHeadUnmasked, Attention),
    language("mask only in training", "blocks.0.mixer", UnmaskedInEval, Attention),
    language("mask only in eval", "blocks.1.mixer", Attention, UnmaskedInTraining),
    language("mask only for one row", "blocks.1.mixer", Attention, MaskedForBatchOfOne, also=("batch",)),
    language("half precision path unmasked", "blocks.1.mixer", Attention, HalfPrecision),
    forecast("times that bfloat16 cannot tell apart", "layers.1", CausalRNN, TimestampAttention),
    language("open chunks beyond 16", "blocks.0.mixer", Chunked, Attention),
    language("mask buffer shorter than the text", "blocks.1.mixer", Attention, ShortBuffer),
    language("block-causal", "blocks.2.mixer", Attention, Attention, BlockCausal),
    language("own chunk's summary from the third chunk on", "blocks.0.mixer", ChunkMeans, Attention),
    language("window on both sides", "blocks.1.mixer", Attention, BothSides),
    language(
        "prefix one too long", "blocks.1.mixer", Attention, PrefixTooLong, claim=kl.causal | kl.prefix(5)
    ),
    language("relative bias without a mask", "blocks.0.mixer", RelativeBias, Attention),
    language("heads cut by view", "blocks.1.mixer", Attention, WrongView),
    language("hidden by a zero projection", "blocks.1.mixer", Attention, ZeroOut),
    language("hidden by a zero gate", "blocks.0.mixer", Gated, Attention),
    language("a millionth of the mean", "blocks.1.mixer", Attention, TinyMean),
    language("a detached mean", "blocks.1.mixer", Attention, DetachedMean),
    language("layer norm over time", "blocks.1.norm2", model=NormedInTime),
    convolved(
        "instance norm", "layers.1.norm", conv, lambda: ConvLayer(13, norm=nn.InstanceNorm1d(13)), conv
    ),
    convolved(
        "group norm over channels and time",
        "layers.0.norm",
        lambda: ConvLayer(13, norm=nn.GroupNorm(1, 13)),
        conv,
    ),
    Planted("layer norm over time and width", seeded(FixedNorm, random_tokens), "future", "body.norm"),
    language("mean of the text added", "", Attention, model=Pooled),
    convolved(
        "squeeze and excite", "layers.2.gate", conv, conv, lambda: ConvLayer(13, gate=SqueezeExcite(13))
    ),
    convolved("symmetric padding", "layers.1.conv", conv, lambda: Symmetric(13), conv),
    convolved("dilated convolution cut off by one", "layers.2", conv, conv, lambda: Chomped(13)),
    convolved("circular padding", "layers.0", lambda: Circular(13), conv),
    convolved("max pooling over both neighbours", "layers.1.pool", conv, MaxPooled),
    language("pairs pooled without a shift", "blocks.1.mixer", Attention, Hourglass),
    Planted("bidirectional GRU", seeded(BidirectionalRNN), "future", "second"),
    language("running sum from the right", "blocks.0.mixer", ReversedCumsum, Attention),
    language("Fourier mixing", "blocks.1.mixer", Attention, Fourier),
    language("linear attention over the total", "blocks.1.mixer", Attention, LinearAttention),
    language(
        "every other scan reversed",
        "blocks.1.mixer",
        lambda: Scan(False),
        lambda: Scan(True),
        lambda: Scan(False),
    ),
    language("experts choose tokens", "blocks.1.mixer", Attention, ExpertChoice),
    language("capacity by the length", "blocks.1.mixer", Attention, Capacity),
    language("argmax over time", "blocks.1.mixer", Attention, GlobalArgmax),
    forecast("ranks among all times", "layers.1", CausalRNN, RankTransform),
    forecast("series normalised by all of itself", "layers.0", WindowNormalization, CausalRNN),
    language("positions scaled by the length", "pos", model=LengthScaledPositions),
    language("rotary stretched by the length", "blocks.0.mixer", DynamicRotary, Attention),
    language("noise seeded by all tokens", "", Attention, model=Jitter),
    language("token shift the wrong way", "blocks.1.mixer.time_shift", Attention, Shift),
    language("token shift by roll", "blocks.0.mixer", Rolled, Attention),
    Planted("summary token read by all", seeded(SummaryToken), "future", None),
    language("missing tokens filled from the right", "", Attention, Attention, model=Backfill),
    Planted(
        "nanoGPT without is_causal",
        seeded(lambda: GPT(Config(), (False, False), (False, False))),
        "future",
        "transformer.h.0.attn",
    ),
    Planted(
        "nanoGPT with a slow path unmasked",
        seeded(lambda: GPT(Config(), (True, True), (True, False))),
        "future",
        "transformer.h.1.attn",
    ),
    Planted("mask for the first layer only", seeded(FirstLayerOnly), "future", "attns.1"),
    Planted("torch encoder without a mask", seeded(Stacked), "future", "encoder.layers.0.self_attn"),
    Planted(
        "torch Transformer without a target mask",
        seeded(NoTargetMask, seq2seq("src", "tgt")),
        "future",
        "transformer.decoder.layers.0.self_attn",
    ),
    Planted(
        "cross-attention reads the target",
        seeded(CrossAttentionToTarget, seq2seq("source", "target")),
        "future",
        "decoder.1.cross",
    ),
    Planted(
        "attention_mask replaces the triangle",
        seeded(MaskReplacesTriangle),
        "future",
        "layers.0",
        also=("padding",),
    ),
    Planted(
        "no triangle without attention_mask",
        seeded(TriangleOnlyWithMask),
        "future",
        "layers.0",
        also=("padding",),
    ),
    Planted("unmasked when weights are shown", seeded(lambda: ReturnsWeights(False)), "future", "second"),
    Planted("masked only when weights are shown", seeded(lambda: ReturnsWeights(True)), "future", "second"),
    Planted("a bare function", seeded(smoothing_function, random_features()), "future", ""),
]
