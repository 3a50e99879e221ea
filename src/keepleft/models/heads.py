"""The last step: hidden states to scores over a vocabulary, over labels, or to one vector for each text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.models.design import Classes, Design, Masked, Pooled, Vocabulary
from keepleft.nn.feedforward import ACTIVATIONS
from keepleft.nn.norm import norm


class Scores(nn.Module):
    """(…, dim) → (…, V)"""

    bias: Tensor | None

    def __init__(self, choice: Vocabulary, design: Design) -> None:
        super().__init__()
        self.scale = design.dim ** -0.5 if choice.scale else 1.0
        self.weight = None if choice.tied else nn.Parameter(torch.empty(design.vocab, design.dim))
        self.register_buffer("bias", torch.zeros(design.vocab) if choice.bias else None)

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        return F.linear(self.ready(x), *self.matrix(table))

    def ready(self, x: Tensor) -> Tensor:
        """What meets the matrix: (…, dim) → (…, dim)"""
        return x if self.scale == 1.0 else x * self.scale

    def matrix(self, table: nn.Embedding) -> tuple[Tensor, Tensor | None]:
        """(V, dim) and, where there is one, (V,) bias"""
        return table.weight if self.weight is None else self.weight, self.bias


class MaskedScores(nn.Module):
    """(…, dim) → (…, V) through a layer of its own"""

    def __init__(self, choice: Masked, design: Design) -> None:
        super().__init__()
        self.bend = ACTIVATIONS[choice.activation]
        self.dense = nn.Linear(design.dim, design.dim)
        self.norm = norm(design.norm, design.dim)
        self.bias = nn.Parameter(torch.zeros(design.vocab))

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        return F.linear(self.ready(x), *self.matrix(table))

    def ready(self, x: Tensor) -> Tensor:
        """What meets the matrix: (…, dim) → (…, dim)"""
        return self.norm(self.bend(self.dense(x)))

    def matrix(self, table: nn.Embedding) -> tuple[Tensor, Tensor]:
        """(V, dim) and (V,) bias"""
        return table.weight, self.bias


class Pool(nn.Module):
    """(B, T, dim) → (B, dim); padding counts for nothing"""

    def __init__(self, choice: Pooled, design: Design) -> None:
        super().__init__()
        self.choice = choice
        if choice.how == "tanh":
            self.dense = nn.Linear(design.dim, design.dim)

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        real = torch.ones_like(x[:, :, 0], dtype=torch.bool) if segments is None else segments != 0
        if self.choice.how == "mean":
            x = (x * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1).to(x.dtype)
        else:
            chosen = (last if self.choice.how == "last" else first)(real)
            x = x.gather(1, chosen[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]
            if self.choice.how == "tanh":
                x = self.dense(x).tanh()
        return F.normalize(x, dim=-1) if self.choice.unit else x


class Labels(nn.Module):
    """(B, T, dim) → (B, labels)"""

    def __init__(self, choice: Classes, design: Design) -> None:
        super().__init__()
        self.pool = Pool(Pooled(choice.pool), design)
        self.dropout = nn.Dropout(design.dropout)
        self.out = nn.Linear(design.dim, choice.labels, bias=choice.bias)

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        return self.out(self.dropout(self.pool(x, table, segments)))


class Hidden(nn.Module):
    """No head: the hidden states as they are"""

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        return x


def head(design: Design) -> nn.Module:
    match design.head:
        case Vocabulary() as choice:
            return Scores(choice, design)
        case Masked() as choice:
            return MaskedScores(choice, design)
        case Pooled() as choice:
            return Pool(choice, design)
        case Classes() as choice:
            return Labels(choice, design)
    return Hidden()


def first(real: Tensor) -> Tensor:
    """(B, T) booleans → (B,) the index of each row's first real token; 0 where there is none."""
    return real.int().argmax(1)


def last(real: Tensor) -> Tensor:
    """(B, T) booleans → (B,) the index of each row's last real token; the end where there is none."""
    return real.shape[1] - 1 - real.flip(1).int().argmax(1)
