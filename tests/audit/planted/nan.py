"""NaN where a query may attend to nothing: forward, backward only, or in the next layer."""

from __future__ import annotations

import math

import torch
from torch import nn

import keepleft as kl
from audit.planted.case import Planted, seeded
from audit.planted.parts import (
    HEADS,
    VOCAB,
    WIDTH,
    Attention,
    LanguageModel,
    MaskedAttention,
    causal_mask,
    masked_softmax,
    sinusoidal_positions,
)


def all_real(tokens):
    """(B, T): all tokens are real."""
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


def real_tokens(seen):
    """(B or 1, T, 1): the tokens that the last query attends to, which are the real ones."""
    return seen.reshape(-1, *seen.shape[-2:])[:, -1, :, None]


class MinusInfinity(MaskedAttention):
    """Hidden scores get -inf: a row that attends to nothing is 0 / 0."""

    def forward(self, x, seen):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.weights(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), seen)
        return self.out((weights @ v).transpose(1, 2).reshape(rows, length, width))

    def weights(self, scores, seen):
        return scores.masked_fill(~seen, float("-inf")).softmax(-1)


class Repaired(MinusInfinity):
    """0 / 0 is replaced by 0 after the softmax: forward is fine, backward is not."""

    def weights(self, scores, seen):
        hidden = torch.zeros(seen.shape, device=scores.device, dtype=scores.dtype).masked_fill(
            ~seen, float("-inf")
        )
        return (scores + hidden).softmax(-1).nan_to_num(0.0)


class ZeroTimesInfinity(MinusInfinity):
    """(1 - mask) * -inf, which is NaN where the mask is one."""

    def weights(self, scores, seen):
        if seen.dim() == 2:  # no padding mask was given
            return masked_softmax(scores, seen)
        return (scores + (1 - seen.to(scores.dtype)) * float("-inf")).softmax(-1)


class WrongType(MinusInfinity):
    """The smallest float32 is minus infinity in bfloat16."""

    def weights(self, scores, seen):
        hidden = torch.zeros(seen.shape, device=scores.device).masked_fill(
            ~seen, torch.finfo(torch.float32).min
        )
        return (scores + hidden.to(scores.dtype)).softmax(-1)


class RunningMean(nn.Module):
    """The mean of the real tokens so far: 0 / 0 before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, seen):
        real = real_tokens(seen).to(x.dtype)
        return (self.value(x) * real).cumsum(1) / real.cumsum(1)


class UnitLength(nn.Module):
    """Real tokens are normalised to length one; padding is zero, where the square root has an infinite
    gradient.
    """

    def forward(self, x, seen):
        real = real_tokens(seen)
        x = x * real.to(x.dtype)
        return torch.where(real, x / x.pow(2).sum(-1, keepdim=True).sqrt(), 0.0)


class Cosine(MaskedAttention):
    """Keys of length one, without an epsilon in the division; padding is zero."""

    def forward(self, x, seen):
        k = (self.out(x) - self.out.bias) * real_tokens(seen).to(x.dtype)
        k = k / k.norm(dim=-1, keepdim=True)
        return masked_softmax(k @ k.transpose(1, 2), seen.reshape(-1, *seen.shape[-2:])) @ x


class Decoder(nn.Module):
    """Causal; padding is hidden, positions count real tokens. Padding on the left attends to nothing."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, attention_mask=None):
        real = all_real(input_ids) if attention_mask is None else attention_mask.bool()
        seen = real[:, None, None, :] & causal_mask(real.shape[1], real.device)
        if attention_mask is None:
            seen = causal_mask(real.shape[1], real.device)
        x = self.embed(input_ids)
        x = x + sinusoidal_positions((real.long().cumsum(1) - 1).clamp(min=0), WIDTH).to(x.dtype)
        for layer in self.layers:
            x = x + layer(x, seen)
        return self.head(x)


class TorchAttention(nn.Module):
    """torch's attention with both masks: padding on the left attends to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, key_padding_mask=None):
        x = self.embed(tokens)
        y, _ = self.attn(
            x, x, x, key_padding_mask=key_padding_mask, attn_mask=~causal_mask(x.shape[1], x.device)
        )
        return self.head(x + y)


class StrictPast(Attention):
    """Attends to earlier positions only: the first one to nothing."""

    def mix(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        before = causal_mask(q.shape[2], q.device).tril(-1)
        return scores.masked_fill(~before, float("-inf")).softmax(-1) @ v


class Entropy(Attention):
    """Weights heads by the entropy of their attention; where() removes 0 log 0 in the forward pass, but not
    in the backward pass.
    """

    def mix(self, q, k, v):
        weights = masked_softmax(
            q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), causal_mask(q.shape[2], q.device)
        )
        entropy = -torch.where(weights > 0, weights * weights.log(), 0.0).sum(-1, keepdim=True)
        return (weights @ v) * torch.sigmoid(entropy)


class Deviation(nn.Module):
    """Divides by the standard deviation of the tokens so far, with n - 1 in its denominator: 0 / 0 for the
    first.
    """

    def forward(self, x):
        n = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        mean = x.cumsum(1) / n
        return x / ((x - mean).pow(2).cumsum(1) / (n - 1) + 1e-3).sqrt()


class Encoder(nn.Module):
    """Bidirectional over real tokens; a row of padding alone attends to nothing."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens, attention_mask=None):
        real = all_real(tokens) if attention_mask is None else attention_mask.bool()
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, real[:, None, None, :])
        return self.head(x)


class RealMean(nn.Module):
    """The mean over real tokens, divided by their number even where it is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, seen):
        real = seen[:, 0, 0, :, None].to(x.dtype)
        return (self.value(x) * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)


def decoder(name, module, *layers, model=Decoder, claim=None):
    return Planted(name, seeded(lambda: model(*[layer() for layer in layers])), "nan", module, claim)


PLANTED = [
    decoder("pads that see nothing", "layers.0", MinusInfinity),
    decoder("pads that see nothing, and the next layer", "layers.0", MinusInfinity, MaskedAttention),
    decoder(
        "pads that see nothing in the last layer", "layers.2", MaskedAttention, MaskedAttention, MinusInfinity
    ),
    decoder("repaired forward only", "layers.1", MaskedAttention, Repaired),
    decoder("zero times infinity", "layers.0", ZeroTimesInfinity, MaskedAttention),
    decoder("smallest float32 in bfloat16", "layers.1", MaskedAttention, WrongType),
    decoder("mean of no real tokens yet", "layers.0", RunningMean, MaskedAttention),
    decoder("root of zero, backward only", "layers.1", MaskedAttention, UnitLength),
    decoder("keys of length zero", "layers.0", Cosine, MaskedAttention),
    decoder("torch's attention with two masks", "attn", model=TorchAttention),
    decoder("first token sees nothing", "blocks.1.mixer", Attention, StrictPast, model=LanguageModel),
    decoder("entropy, backward only", "blocks.0.mixer", Entropy, Attention, model=LanguageModel),
    decoder("deviation of one token", "blocks.1.mixer", Attention, Deviation, model=LanguageModel),
    decoder("a row of pads only", "layers.1", MaskedAttention, MinusInfinity, model=Encoder, claim=kl.full),
    decoder(
        "mean of a row of pads only", "layers.0", RealMean, MaskedAttention, model=Encoder, claim=kl.full
    ),
]
