"""Leaks between the rows of a batch."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from audit.planted.case import Planted, seeded
from audit.planted.parts import HEADS, VOCAB, WIDTH, Attention, LanguageModel, causal_mask, masked_softmax


class BatchCentering(nn.Module):
    """Subtracts the mean over the rows."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class StepNorm(nn.Module):
    """Batch norm at each time step, as in recurrent networks: rows mix in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return torch.stack([self.norm(step) for step in x.unbind(1)], 1)


class BatchQuantizer(nn.Module):
    """Rounds to 127 steps of the largest value that any row has at this time."""

    def forward(self, x):
        scale = x.detach().abs().amax((0, 2), keepdim=True) / 127
        return x + ((x / scale).round() * scale - x).detach()


class BatchNormLM(LanguageModel):
    """A language model with another norm in the second block, or at the end."""

    def __init__(self, norm: nn.Module, last: bool = False) -> None:
        super().__init__(Attention(), Attention())
        if last:
            self.norm = norm
        else:
            self.blocks[1].norm1 = norm


class RNNOverRows(nn.Module):
    """A recurrent network over the batch axis instead of time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 11)
        self.rnn = nn.GRU(11, 13)
        self.head = nn.Linear(13, VOCAB)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class AttentionOverRows(nn.Module):
    """Attention over the batch axis instead of time."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


class FlattenedBatch(Attention):
    """All rows as one long causal sequence: a row attends to the rows above it."""

    def forward(self, x):
        return super().forward(x.reshape(1, -1, x.shape[-1])).view_as(x)


class WrongReshape(nn.Module):
    """Goes to (T, B, D) by reshape where a transpose was needed, and comes back the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH)

    def forward(self, x):
        rows, length, width = x.shape
        return self.rnn(x.reshape(length, rows, width))[0].reshape(rows, length, width)


class CarriedOver(nn.Module):
    """One row after another; the final state of one is the initial state of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        state, rows = None, []
        for row in x:
            y, state = self.cell(row[None], state)
            rows.append(y)
        return torch.cat(rows)


class BatchCapacity(nn.Module):
    """Each expert serves five tokens of the batch, in order: the first rows use up its capacity."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.capacity = 5
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(experts)])

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chosen = F.one_hot(self.router(flat).argmax(-1), len(self.experts))
        served = (chosen * (chosen.cumsum(0) <= self.capacity)).to(x.dtype)
        return sum(served[:, n, None] * expert(flat) for n, expert in enumerate(self.experts)).view_as(x)


class BestRow(nn.Module):
    """At each position only the row with the highest score goes through the expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        best = self.router(x).argmax(0, keepdim=True)
        return torch.zeros_like(x).scatter(0, best.expand(-1, -1, x.shape[-1]), 1.0) * self.expert(x)


class OverRows(Attention):
    """Softmax over the rows instead of the keys."""

    def mix(self, q, k, v):
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(0)
        return (weights * causal_mask(q.shape[2], q.device).to(q.dtype) / 5) @ v


class SummedKeys(Attention):
    """One letter wrong in an einsum: keys are summed over all rows."""

    def mix(self, q, k, v):
        scores = torch.einsum("bhqd,chkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        return masked_softmax(scores, causal_mask(q.shape[2], q.device)) @ v


class FirstRowsGate(nn.Module):
    """The gate of the first row is used for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.attn(x) * torch.sigmoid(self.gate(x[:1]))


class Mixup(LanguageModel):
    """In training every row gets a tenth of a neighbouring row."""

    def embedded(self, tokens):
        x = super().embedded(tokens)
        return 0.9 * x + 0.1 * x.roll(1, 0) if self.training else x


class SortedRows(LanguageModel):
    """Rows are sorted by how many rare tokens they begin with, and not restored to their order."""

    def forward(self, tokens):
        return super().forward(tokens[(tokens[:, 0] > 11).long().argsort(stable=True)])


def language(name, module, *mixers, model=LanguageModel, **fields):
    return Planted(name, seeded(lambda: model(*[mixer() for mixer in mixers])), "batch", module, **fields)


# a row reads all of the rows above it, so a probe that changes every row at once finds a leak of the future
ROWS_ABOVE = ("future",)


PLANTED = [
    language("mean over the rows", "blocks.1.norm1", BatchCentering, model=BatchNormLM),
    Planted(
        "batch norm while training",
        seeded(lambda: BatchNormLM(StepNorm(WIDTH), last=True)),
        "batch",
        "norm.norm",
    ),
    language("rounded by the largest of all rows", "blocks.1.norm1", BatchQuantizer, model=BatchNormLM),
    Planted("GRU along the rows", seeded(RNNOverRows), "batch", "rnn"),
    language("attention along the rows", "blocks.1.mixer.attn", Attention, AttentionOverRows),
    language("rows as one long text", "blocks.0.mixer", FlattenedBatch, Attention, also=ROWS_ABOVE),
    language("reshape instead of transpose", "blocks.1.mixer", Attention, WrongReshape, also=ROWS_ABOVE),
    language("state carried from row to row", "blocks.0.mixer", CarriedOver, Attention, also=ROWS_ABOVE),
    language("capacity of the whole batch", "blocks.1.mixer", Attention, BatchCapacity, also=ROWS_ABOVE),
    language("only the best row at each time", "blocks.1.mixer", Attention, BestRow),
    language("softmax over the rows", "blocks.1.mixer", Attention, OverRows),
    language("keys summed over the rows", "blocks.2.mixer", Attention, Attention, SummedKeys),
    language("the first row's gate", "blocks.0.mixer", FirstRowsGate, Attention),
    language("rows mixed while training", "", Attention, model=Mixup),
    language("rows sorted and not sorted back", "", Attention, model=SortedRows),
]
