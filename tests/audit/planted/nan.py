"""Numbers that are none: a row with nothing to see, forward, backward only, or in the next layer."""

from __future__ import annotations

import math

import torch
from torch import nn

import keepleft as kl
from audit.planted.case import Planted, seeded
from audit.planted.parts import HEADS, VOCAB, WIDTH, Attention, Language, Masked, lower, soft, waves


def everything(tokens):
    """A mask that says all tokens (B, T) are real."""
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


def reals(seen):
    """What the last query sees, which is what is real (B or 1, T, 1)."""
    return seen.reshape(-1, *seen.shape[-2:])[:, -1, :, None]


class Infinite(Masked):
    """Minus infinity for all that is hidden: a row that sees nothing is 0 / 0."""

    def forward(self, x, seen):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.weights(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), seen)
        return self.out((weights @ v).transpose(1, 2).reshape(rows, length, width))

    def weights(self, scores, seen):
        return scores.masked_fill(~seen, float("-inf")).softmax(-1)


class Repaired(Infinite):
    """0 / 0 is replaced by 0 after the softmax: forward is fine, backward is not."""

    def weights(self, scores, seen):
        hidden = torch.zeros(seen.shape, device=scores.device, dtype=scores.dtype).masked_fill(
            ~seen, float("-inf")
        )
        return (scores + hidden).softmax(-1).nan_to_num(0.0)


class ZeroTimesInfinity(Infinite):
    """(1 - mask) * -inf, which is no number where the mask is one."""

    def weights(self, scores, seen):
        if seen.dim() == 2:  # nobody gave a mask
            return soft(scores, seen)
        return (scores + (1 - seen.to(scores.dtype)) * float("-inf")).softmax(-1)


class WrongType(Infinite):
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
        real = reals(seen).to(x.dtype)
        return (self.value(x) * real).cumsum(1) / real.cumsum(1)


class UnitLength(nn.Module):
    """Real tokens are brought to length one; pads are zero, and so is their root, whose slope is infinite."""

    def forward(self, x, seen):
        real = reals(seen)
        x = x * real.to(x.dtype)
        return torch.where(real, x / x.pow(2).sum(-1, keepdim=True).sqrt(), 0.0)


class Cosine(Masked):
    """Keys of length one, without a small number in the division; pads are zero."""

    def forward(self, x, seen):
        k = (self.out(x) - self.out.bias) * reals(seen).to(x.dtype)
        k = k / k.norm(dim=-1, keepdim=True)
        return soft(k @ k.transpose(1, 2), seen.reshape(-1, *seen.shape[-2:])) @ x


class Decoder(nn.Module):
    """Causal; pads are hidden, positions count real tokens. A pad on the left sees nothing."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, attention_mask=None):
        real = everything(input_ids) if attention_mask is None else attention_mask.bool()
        seen = real[:, None, None, :] & lower(real.shape[1], real.device)
        if attention_mask is None:
            seen = lower(real.shape[1], real.device)
        x = self.embed(input_ids)
        x = x + waves((real.long().cumsum(1) - 1).clamp(min=0), WIDTH).to(x.dtype)
        for layer in self.layers:
            x = x + layer(x, seen)
        return self.head(x)


class Torch(nn.Module):
    """torch's attention with both masks: a pad on the left sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, key_padding_mask=None):
        x = self.embed(tokens)
        y, _ = self.attn(x, x, x, key_padding_mask=key_padding_mask, attn_mask=~lower(x.shape[1], x.device))
        return self.head(x + y)


class StrictPast(Attention):
    """Sees only what is before: the first token sees nothing."""

    def mix(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        before = lower(q.shape[2], q.device).tril(-1)
        return scores.masked_fill(~before, float("-inf")).softmax(-1) @ v


class Entropy(Attention):
    """Weighs heads by the entropy of their weights; 0 log 0 is left out by where(), but not on the way
    back.
    """

    def mix(self, q, k, v):
        weights = soft(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), lower(q.shape[2], q.device))
        entropy = -torch.where(weights > 0, weights * weights.log(), 0.0).sum(-1, keepdim=True)
        return (weights @ v) * torch.sigmoid(entropy)


class Deviation(nn.Module):
    """Divides by the deviation of the tokens so far, n - 1 in its denominator: the first has none."""

    def forward(self, x):
        n = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        mean = x.cumsum(1) / n
        return x / ((x - mean).pow(2).cumsum(1) / (n - 1) + 1e-3).sqrt()


class Encoder(nn.Module):
    """Everyone sees every real token; a row of nothing but pads has nothing to see."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens, attention_mask=None):
        real = everything(tokens) if attention_mask is None else attention_mask.bool()
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
    decoder("pads that see nothing", "layers.0", Infinite),
    decoder("pads that see nothing, and the next layer", "layers.0", Infinite, Masked),
    decoder("pads that see nothing in the last layer", "layers.2", Masked, Masked, Infinite),
    decoder("repaired forward only", "layers.1", Masked, Repaired),
    decoder("zero times infinity", "layers.0", ZeroTimesInfinity, Masked),
    decoder("smallest float32 in bfloat16", "layers.1", Masked, WrongType),
    decoder("mean of no real tokens yet", "layers.0", RunningMean, Masked),
    decoder("root of zero, backward only", "layers.1", Masked, UnitLength),
    decoder("keys of length zero", "layers.0", Cosine, Masked),
    decoder("torch's attention with two masks", "attn", model=Torch),
    decoder("first token sees nothing", "blocks.1.mixer", Attention, StrictPast, model=Language),
    decoder("entropy, backward only", "blocks.0.mixer", Entropy, Attention, model=Language),
    decoder("deviation of one token", "blocks.1.mixer", Attention, Deviation, model=Language),
    decoder("a row of pads only", "layers.1", Masked, Infinite, model=Encoder, claim=kl.full),
    decoder("mean of a row of pads only", "layers.0", RealMean, Masked, model=Encoder, claim=kl.full),
]
