"""Other rows of the batch move this row."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from audit.planted.case import Planted, seeded
from audit.planted.parts import HEADS, VOCAB, WIDTH, Attention, Language, lower, soft


class Centred(nn.Module):
    """Subtracts the mean over the rows."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class StepNorm(nn.Module):
    """Batch norm for each time on its own, as recurrent networks have it: rows meet while training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return torch.stack([self.norm(step) for step in x.unbind(1)], 1)


class Largest(nn.Module):
    """Rounds to 127 steps of the largest value that any row has at this time."""

    def forward(self, x):
        scale = x.detach().abs().amax((0, 2), keepdim=True) / 127
        return x + ((x / scale).round() * scale - x).detach()


class Normed(Language):
    """One norm of the second block, or the last one, is of another kind."""

    def __init__(self, norm: nn.Module, last: bool = False) -> None:
        super().__init__(Attention(), Attention())
        if last:
            self.norm = norm
        else:
            self.blocks[1].norm1 = norm


class Rows(nn.Module):
    """A recurrent network that takes the rows for time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 11)
        self.rnn = nn.GRU(11, 13)
        self.head = nn.Linear(13, VOCAB)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class NotBatchFirst(nn.Module):
    """Attention that takes the rows for time: each time sees itself in all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


class Flattened(Attention):
    """All rows as one long text, causal: a row sees the rows above."""

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
    """Row after row, and the state of one row starts the next."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        state, rows = None, []
        for row in x:
            y, state = self.cell(row[None], state)
            rows.append(y)
        return torch.cat(rows)


class Capacity(nn.Module):
    """Each expert serves five tokens of the batch: the upper rows take the places."""

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
    """At each time only the row with the best score goes through the expert."""

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
        return (weights * lower(q.shape[2], q.device).to(q.dtype) / 5) @ v


class SummedKeys(Attention):
    """One letter wrong in an einsum: keys are summed over all rows."""

    def mix(self, q, k, v):
        scores = torch.einsum("bhqd,chkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        return soft(scores, lower(q.shape[2], q.device)) @ v


class FirstRowsGate(nn.Module):
    """The first row's gate is everyone's."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.attn(x) * torch.sigmoid(self.gate(x[:1]))


class Mixup(Language):
    """While training every row gets a tenth of its neighbour."""

    def embedded(self, tokens):
        x = super().embedded(tokens)
        return 0.9 * x + 0.1 * x.roll(1, 0) if self.training else x


class Sorted(Language):
    """Rows are sorted by how many rare tokens they begin with, and not sorted back."""

    def forward(self, tokens):
        return super().forward(tokens[(tokens[:, 0] > 11).long().argsort(stable=True)])


def language(name, module, *mixers, model=Language, **fields):
    return Planted(name, seeded(lambda: model(*[mixer() for mixer in mixers])), "batch", module, **fields)


# all of the rows above is seen: a probe that changes or cuts every row at once sees the future move
ROWS_ABOVE = ("future",)


PLANTED = [
    language("mean over the rows", "blocks.1.norm1", Centred, model=Normed),
    Planted(
        "batch norm while training", seeded(lambda: Normed(StepNorm(WIDTH), last=True)), "batch", "norm.norm"
    ),
    language("rounded by the largest of all rows", "blocks.1.norm1", Largest, model=Normed),
    Planted("GRU along the rows", seeded(Rows), "batch", "rnn"),
    language("attention along the rows", "blocks.1.mixer.attn", Attention, NotBatchFirst),
    language("rows as one long text", "blocks.0.mixer", Flattened, Attention, also=ROWS_ABOVE),
    language("reshape instead of transpose", "blocks.1.mixer", Attention, WrongReshape, also=ROWS_ABOVE),
    language("state carried from row to row", "blocks.0.mixer", CarriedOver, Attention, also=ROWS_ABOVE),
    language("capacity of the whole batch", "blocks.1.mixer", Attention, Capacity, also=ROWS_ABOVE),
    language("only the best row at each time", "blocks.1.mixer", Attention, BestRow),
    language("softmax over the rows", "blocks.1.mixer", Attention, OverRows),
    language("keys summed over the rows", "blocks.2.mixer", Attention, Attention, SummedKeys),
    language("the first row's gate", "blocks.0.mixer", FirstRowsGate, Attention),
    language("rows mixed while training", "", Attention, model=Mixup),
    language("rows sorted and not sorted back", "", Attention, model=Sorted),
]
