"""What is kept between calls, and what depends on how many rows there are and in which order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import keepleft as kl

from ..case import case
from ..proofs import BOTH_MODES, Runner, difference, feature_maker, future, padding, rows
from .parts import VOCAB, Layer, MixerLM, SelfAttention, honest, mixers


class CalibratedMixer(nn.Module):
    """Activations are brought to scale; the scale is measured once for each shape."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.attention = SelfAttention(dim)
        self.scales: dict[tuple[int, ...], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape)
        if shape not in self.scales:
            self.scales[shape] = x.detach().abs().amax(dim=(1, 2), keepdim=True)
        return self.attention(torch.tanh(x / self.scales[shape].to(x)))


@case(
    leaks=True,
    kinds=("future", "batch"),
    modules=("", *mixers(1, "attention")),
    after="a common mistake: calibration on the first call, kept by shape; it measures the whole sequence",
    prove=lambda: future(scale_kept_by_shape, fresh=True),
)
def scale_kept_by_shape() -> dict[str, Any]:
    """The first call of a shape measures a scale over all positions; later calls use it as it is."""
    torch.manual_seed(0)
    return {"target": MixerLM(CalibratedMixer())}


class RunningScale(nn.Module):
    """Observations brought to zero mean and unit variance, in the way of reinforcement learning."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))
        self.register_buffer("count", torch.tensor(8.0))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        flat = x.flatten(0, -2)
        total = self.count + len(flat)
        delta = flat.mean(dim=0) - self.mean
        spread = self.var * self.count + flat.var(dim=0, correction=0) * len(flat)
        self.var = (spread + delta.square() * self.count * len(flat) / total) / total
        self.mean = self.mean + delta * len(flat) / total
        self.count = total

    def scaled(self, x: Tensor) -> Tensor:
        return ((x - self.mean) * torch.rsqrt(self.var + 1e-8)).clamp(-10.0, 10.0)

    def forward(self, x: Tensor) -> Tensor:
        self.update(x)
        return self.scaled(x)


class ScaleThenUpdate(RunningScale):
    def forward(self, x: Tensor) -> Tensor:
        y = self.scaled(x)
        if self.training:
            self.update(x)
        return y


class Policy(nn.Module):
    def __init__(self, scale: type[RunningScale], features: int = 4, hidden: int = 16) -> None:
        super().__init__()
        self.obs_norm = scale(features)
        self.lstm, self.actor = nn.LSTM(features, hidden, batch_first=True), nn.Linear(hidden, 3)

    def forward(self, obs: Tensor) -> torch.distributions.Categorical:
        h, _ = self.lstm(self.obs_norm(obs))
        return torch.distributions.Categorical(logits=self.actor(h))


def _policy(model: Any, obs: Tensor) -> Tensor:
    return model(obs).logits


@case(
    leaks=True,
    kinds=("future", "batch"),
    modules=("obs_norm",),
    after="a common mistake: running statistics updated before they are used, and in eval mode too",
    prove=lambda: future(scale_updated_first, _policy, inputs=feature_maker(4), fresh=True),
)
def scale_updated_first() -> dict[str, Any]:
    """A policy over observations; the mean and variance it uses have seen the whole episode."""
    torch.manual_seed(0)
    return {"target": Policy(RunningScale), "example": torch.randn(2, 10, 4)}


@case(
    leaks=False,
    after="a common mistake, done right: running statistics used, then updated, and in training only",
    prove=lambda: honest(scale_updated_after_use, _policy, inputs=feature_maker(4), fresh=True),
)
def scale_updated_after_use() -> dict[str, Any]:
    """Buffers change with every call in training, but no call uses what it adds to them."""
    torch.manual_seed(0)
    return {"target": Policy(ScaleThenUpdate), "example": torch.randn(2, 10, 4)}


class MinibatchStd(nn.Module):
    """StyleGAN's layer: how much does a feature vary within a group of rows?"""

    def __init__(self, group_size: int = 4) -> None:
        super().__init__()
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        extra = x.new_zeros(b, t, 1)
        if b >= self.group_size and b % self.group_size == 0:
            groups = x.unflatten(0, (-1, self.group_size))
            std = groups.var(dim=1, correction=0).add(1e-8).sqrt().mean(dim=-1, keepdim=True)
            extra = std.repeat_interleave(self.group_size, dim=0)
        return torch.cat((x, extra), dim=-1)


class SequenceCritic(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCAB, dim), nn.GRU(dim, dim, batch_first=True)
        self.mbstd, self.score = MinibatchStd(), nn.Linear(dim + 1, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        h, _ = self.rnn(self.embed(tokens))
        return self.score(self.mbstd(h))


@case(
    leaks=True,
    kinds=("batch",),
    modules=("mbstd",),
    after="StyleGAN's minibatch standard deviation in a model whose rows should not know each other",
    prove=lambda: rows(deviation_of_four_rows, batches=(4,), lengths=(6, 12), alone=False),
)
def deviation_of_four_rows() -> dict[str, Any]:
    """Batches of four and their multiples share a statistic; smaller ones do not."""
    torch.manual_seed(0)
    return {"target": SequenceCritic(), "example": torch.randint(VOCAB, (4, 12)), "vocab": VOCAB}


class KeysFirstAttention(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = torch.einsum("bkd,bqd->bkq", k, q) / q.size(-1) ** 0.5
        ahead = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).tril(-1)
        scores = scores.masked_fill(ahead, -torch.inf).squeeze(0)
        weights = torch.softmax(scores, dim=1)  # over the keys
        return weights.mT @ v


@case(
    leaks=True,
    kinds=("future", "batch"),
    modules=mixers(2),
    after="a common mistake: squeeze() takes the batch axis of a single row away, and dim=1 is another axis",
    prove=lambda: future(squeezed_batch_of_one, batches=(1,)),
)
def squeezed_batch_of_one() -> dict[str, Any]:
    """Right for several rows; for one row the softmax runs over queries, those to come among them."""
    torch.manual_seed(0)
    return {"target": MixerLM(KeysFirstAttention(), KeysFirstAttention())}


class SortingEncoder(nn.Module):
    """Rows are sorted by length, as for packed sequences, and put back in the end."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Layer(SelfAttention(dim), dim) for _ in range(2))
        self.tags = nn.Linear(dim, 9)

    def lengths_for_mask(self, lengths: Tensor, order: Tensor) -> Tensor:
        return lengths

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        x = self.embed(tokens[order])
        place = torch.arange(tokens.size(1), device=tokens.device)
        real = place < self.lengths_for_mask(lengths, order).clamp(min=1)[:, None]
        for layer in self.layers:
            x = layer(x, real[:, None, None])
        return self.tags(x)[order.argsort()]


class SortingEncoderWithMask(SortingEncoder):
    def lengths_for_mask(self, lengths: Tensor, order: Tensor) -> Tensor:
        return lengths[order]


def _by_length(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    return model(tokens, mask.sum(dim=1))


def _lengths_example() -> dict[str, Tensor]:
    return {"tokens": torch.randint(VOCAB, (3, 12)), "lengths": torch.tensor([5, 12, 8])}


def _unsorted_rows() -> float:
    """Other padding and other rows beside rows of several lengths in every order."""
    run, largest = Runner(key_mask_sorted_too, _by_length, "eval", True, False), 0.0
    for lengths in ((5, 12, 8), (12, 5, 8), (8, 5, 12), (12, 8, 5), (5, 5, 12), (1, 12, 1)):
        torch.manual_seed(0)
        mask = torch.arange(12) < torch.tensor(lengths)[:, None]
        before, after = torch.randint(VOCAB, (3, 12)), torch.randint(VOCAB, (3, 12))
        base = run(before, mask)
        largest = max(largest, difference(run(before.where(mask, after), mask)[mask], base[mask]))
        for row, n in enumerate(lengths):
            changed = after.clone()
            changed[row] = before[row]
            largest = max(largest, difference(run(changed, mask)[row, :n], base[row, :n]))
            alone = run(before[row : row + 1, :n], mask[row : row + 1, :n])
            largest = max(largest, difference(alone[0], base[row, :n]))
    return largest


@case(
    leaks=True,
    kinds=("padding", "batch"),
    modules=("", *(f"layers.{i}{rest}" for i in (0, 1) for rest in ("", ".mixer"))),
    after="a common mistake: rows are sorted by length, the mask of their lengths is not",
    prove=lambda: padding(key_mask_not_sorted, _by_length, sides=("right",), batches=(3,)),
)
def key_mask_not_sorted() -> dict[str, Any]:
    """An encoder with lengths: right where rows come in falling order, or else rows get others' masks."""
    torch.manual_seed(0)
    return {"target": SortingEncoder(), "example": _lengths_example(), "claim": kl.full, "vocab": VOCAB}


@case(
    leaks=False,
    after="a common mistake, done right: rows and the mask of their lengths are sorted alike",
    prove=lambda: max(
        padding(key_mask_sorted_too, _by_length, sides=("right",), batches=(1, 3)),
        rows(key_mask_sorted_too, lambda m, x: m(x, torch.full((x.size(0),), x.size(1))), modes=BOTH_MODES),
        _unsorted_rows(),
    ),
)
def key_mask_sorted_too() -> dict[str, Any]:
    """An encoder with lengths that sorts rows and puts them back."""
    torch.manual_seed(0)
    return {
        "target": SortingEncoderWithMask(),
        "example": _lengths_example(),
        "claim": kl.full,
        "vocab": VOCAB,
    }
