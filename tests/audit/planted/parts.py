"""Small correct parts that leaks are planted into: attention, a block, a language model."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCAB = 23
WIDTH = 14
HEADS = 2


def random_tokens(rows: int = 2, length: int = 11, vocab: int = VOCAB) -> torch.Tensor:
    """Random tokens (rows, length)."""
    return torch.randint(1, vocab, (rows, length))


def causal_mask(length: int, device=None) -> torch.Tensor:
    """(length, length): True where the query may attend to the key."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def sinusoidal_positions(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Sinusoidal positions (..., width)."""
    rates = torch.exp(-math.log(1000.0) * torch.arange(0, width, 2, device=positions.device) / width)
    angles = positions[..., None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)[..., :width]


def apply_rotary(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x (..., T, D); an odd last column stays as it is."""
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[..., None].float() * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left = x[..., :half]
    right = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    return torch.cat([left * cos - right * sin, left * sin + right * cos, rest], -1)


def masked_softmax(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Softmax over the visible keys; a row without any gets finite numbers, which nothing reads."""
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(self.mix(q, k, v).transpose(1, 2).reshape(rows, length, width))

    def mix(self, q, k, v):
        """(B, H, T, D) each, to (B, H, T, D)."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MaskedAttention(Attention):
    """Self-attention with a mask `seen` (B or 1, 1, T, T)."""

    def forward(self, x, seen):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = masked_softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), seen) @ v
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """A pre-norm block: a mixer over time, then a feed-forward layer."""

    def __init__(self, mixer: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.mixer = mixer
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, *more):
        x = x + self.mixer(self.norm1(x), *more)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Tokens (B, T) to logits (B, T, V) through one block per mixer."""

    def __init__(self, *mixers: nn.Module, vocab: int = VOCAB, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(mixer, width) for mixer in mixers])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def embedded(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        return x + sinusoidal_positions(positions, x.shape[-1]).to(x.dtype)

    def forward(self, tokens):
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CapacityExperts(nn.Module):
    """Each expert serves four tokens of a row, whatever their segment; padding uses up capacity too."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.capacity = 4
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(experts)])

    def forward(self, x, seen):
        chosen = F.one_hot(self.router(x).argmax(-1), len(self.experts))
        served = (chosen * (chosen.cumsum(1) <= self.capacity)).to(x.dtype)
        return sum(served[..., n, None] * expert(x) for n, expert in enumerate(self.experts))
