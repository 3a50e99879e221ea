"""Where a token stands: waves added, a table added, a rotation of queries and keys, or a bias on the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keepleft.nn import sense


@dataclass(frozen=True)
class Sinusoidal:
    """Sines in the first half of the width, cosines in the second, as in the authors' own code.

    The paper interleaves them: the same model with its width in another order.
    """

    length: int = 1024  # how far other programs should prepare; the waves go on for ever

    def __post_init__(self) -> None:
        sense.whole("length", self.length)


@dataclass(frozen=True)
class Learned:
    length: int
    first: int = 0      # BART counts from 2

    def __post_init__(self) -> None:
        sense.whole("length", self.length)
        sense.whole("first", self.first, least=0)


@dataclass(frozen=True)
class Stretched:
    """Positions divided by a factor: linear scaling."""

    factor: float

    def __post_init__(self) -> None:
        sense.real("factor", self.factor, above=0)


@dataclass(frozen=True)
class Llama3:
    """Long waves stretched, short ones kept, a ramp between: LLaMA 3.1's scaling."""

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        sense.real("factor", self.factor, above=0)
        sense.real("low", self.low, above=0)
        sense.real("high", self.high, above=0)
        sense.whole("original", self.original)
        if self.low >= self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}: the ramp must go up")


@dataclass(frozen=True)
class Rotary:
    base: float = 10_000.0
    length: int = 2048  # what it was trained for; nothing stops it there
    scaling: Stretched | Llama3 | None = None

    def __post_init__(self) -> None:
        sense.real("base", self.base, above=0)
        sense.whole("length", self.length)
        if not isinstance(self.scaling, Stretched | Llama3 | None):
            raise ValueError(f"scaling is {self.scaling!r}: it must be a Stretched, a Llama3 or None")


@dataclass(frozen=True)
class RelativeBias:
    buckets: int = 32
    farthest: int = 128

    def __post_init__(self) -> None:
        sense.whole("buckets", self.buckets, least=4)  # two for each way to look
        sense.whole("farthest", self.farthest, least=self.buckets // 2 + 1)  # beyond those counted one by one


Position = Sinusoidal | Learned | Rotary | RelativeBias


def waves(positions: Tensor, dim: int) -> Tensor:
    """(…) positions → (…, dim): sin(p / 10000^(2i/dim)), then the cosines; to float32's precision, as others keep them."""
    half = (dim + 1) // 2
    steps = torch.arange(half, dtype=torch.float64, device=positions.device)
    turns = positions[..., None].double() * (torch.exp2(steps * (-2 * math.log2(10_000.0) / dim)) / (2 * math.pi))
    angles = (turns - turns.round()) * (2 * math.pi)  # a GPU is slow at powers, divisions and large angles
    return torch.cat([angles.sin(), angles.cos()[..., :dim - half]], -1).float()


class PositionTable(nn.Module):
    """A learned vector for each position, counting from `first`."""

    def __init__(self, choice: Learned, dim: int) -> None:
        super().__init__()
        self.length, self.first = choice.length, choice.first
        self.weight = nn.Parameter(torch.empty(choice.length + choice.first, dim))

    def forward(self, positions: Tensor) -> Tensor:
        return nn.functional.embedding(positions + self.first, self.weight)


def rotation(choice: Rotary, positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(B or 1, T) positions → cosines and sines (B or 1, 1, T, width), once for all layers."""
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions[:, None, :, None].to(precise) * frequencies(choice, width, positions.device).to(precise)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def frequencies(choice: Rotary, width: int, device: torch.device) -> Tensor:
    """(width / 2,) how fast each pair turns. In float32, whatever the model: what LLaMA was trained with."""
    turns = 1.0 / choice.base ** (torch.arange(0, width, 2, device=device).float() / width)
    if isinstance(choice.scaling, Stretched):
        return turns / choice.scaling.factor
    if isinstance(choice.scaling, Llama3):
        scaling = choice.scaling
        rounds = scaling.original * turns / (2 * math.pi)  # how often the wave fits into the original length
        keep = ((rounds - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
        return (1 - keep) * turns / scaling.factor + keep * turns
    return turns


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (i, i + width/2) of x, (B, H, T, width), by its position's angle."""
    low, high = x.chunk(2, -1)
    return x * cosines + torch.cat([-high, low], -1) * sines


class Nearness(nn.Module):
    """T5's bias on the scores: a number for each head and each bucket of distances."""

    def __init__(self, choice: RelativeBias, heads: int, *, both_ways: bool) -> None:
        super().__init__()
        self.choice, self.both_ways = choice, both_ways
        self.weight = nn.Parameter(torch.empty(choice.buckets, heads))

    def forward(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """(B or 1, Q), (B or 1, K) → (B or 1, H, Q, K)"""
        distance = k_pos[:, None, :] - q_pos[:, :, None]
        return nn.functional.embedding(self.bucket(distance), self.weight).permute(0, 3, 1, 2)

    def bucket(self, distance: Tensor) -> Tensor:
        """Near distances one by one, far ones by logarithm, the farthest together."""
        buckets, farthest = self.choice.buckets, self.choice.farthest
        if self.both_ways:
            buckets //= 2
            ahead = (distance > 0) * buckets
            distance = distance.abs()
        else:
            ahead = torch.zeros_like(distance)
            distance = (-distance).clamp(min=0)
        near = buckets // 2
        far = near + ((distance.clamp(min=1).float() / near).log() / math.log(farthest / near) * (buckets - near)).long()
        return ahead + torch.where(distance < near, distance, far.clamp(max=buckets - 1))
