"""Where a token stands: waves added, a table added, a rotation of queries and keys, or a bias on the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keepleft import checks


@dataclass(frozen=True)
class Sinusoidal:
    """Sines in the first half of the width, cosines in the second, as in the authors' own code.

    The paper interleaves them: the same model with its width in another order.
    """

    length: int = 1024  # how far other programs should prepare; the waves go on for ever

    def __post_init__(self) -> None:
        checks.check_int("length", self.length)


@dataclass(frozen=True)
class LearnedPositions:
    length: int
    first: int = 0  # BART counts from 2

    def __post_init__(self) -> None:
        checks.check_int("length", self.length)
        checks.check_int("first", self.first, minimum=0)


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by a factor: linear scaling."""

    factor: float

    def __post_init__(self) -> None:
        checks.check_number("factor", self.factor, above=0)


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Long waves stretched, short ones kept, a ramp between: LLaMA 3.1's scaling."""

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        checks.check_number("factor", self.factor, above=0)
        checks.check_number("low", self.low, above=0)
        checks.check_number("high", self.high, above=0)
        checks.check_int("original", self.original)
        if self.low >= self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}: the ramp must go up")


@dataclass(frozen=True)
class Rotary:
    base: float = 10_000.0
    length: int = 2048  # what it was trained for; nothing stops it there
    scaling: LinearRopeScaling | Llama3RopeScaling | None = None

    def __post_init__(self) -> None:
        checks.check_number("base", self.base, above=0)
        checks.check_int("length", self.length)
        if not isinstance(self.scaling, LinearRopeScaling | Llama3RopeScaling | None):
            raise ValueError(
                f"scaling is {self.scaling!r}: it must be a LinearRopeScaling, a Llama3RopeScaling or None"
            )


@dataclass(frozen=True)
class RelativeBias:
    buckets: int = 32
    farthest: int = 128

    def __post_init__(self) -> None:
        checks.check_int("buckets", self.buckets, minimum=4)  # two for each way to look
        # beyond those counted one by one
        checks.check_int("farthest", self.farthest, minimum=self.buckets // 2 + 1)


Position = Sinusoidal | LearnedPositions | Rotary | RelativeBias


def sinusoidal_encoding(positions: Tensor, dim: int) -> Tensor:
    """(…) positions → (…, dim): sin(p / 10000^(2i/dim)), then the cosines; to float32's precision, as others
    keep them.
    """
    half = (dim + 1) // 2
    indices = torch.arange(half, dtype=torch.float64, device=positions.device)
    cycles = positions[..., None].double() * (
        torch.exp2(indices * (-2 * math.log2(10_000.0) / dim)) / (2 * math.pi)
    )
    angles = (cycles - cycles.round()) * (2 * math.pi)  # a GPU is slow at powers, divisions and large angles
    return torch.cat([angles.sin(), angles.cos()[..., : dim - half]], -1).float()


class LearnedPositionEmbedding(nn.Module):
    """A learned vector for each position, counting from `first`."""

    def __init__(self, config: LearnedPositions, dim: int) -> None:
        super().__init__()
        self.length = config.length
        self.first = config.first
        self.weight = nn.Parameter(torch.empty(config.length + config.first, dim))

    def forward(self, positions: Tensor) -> Tensor:
        return nn.functional.embedding(positions + self.first, self.weight)


def rope_cos_sin(
    config: Rotary, positions: Tensor, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(B or 1, T) positions → cosines and sines (B or 1, 1, T, width), once for all layers."""
    compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions[:, None, :, None].to(compute_dtype) * rope_frequencies(
        config, head_dim, positions.device
    ).to(compute_dtype)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope_frequencies(config: Rotary, head_dim: int, device: torch.device) -> Tensor:
    """(width / 2,) how fast each pair turns. In float32, whatever the model: what LLaMA was trained with."""
    inv_freq = 1.0 / config.base ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    if isinstance(config.scaling, LinearRopeScaling):
        return inv_freq / config.scaling.factor
    if isinstance(config.scaling, Llama3RopeScaling):
        scaling = config.scaling
        # how often the wave fits into the original length
        num_rotations = scaling.original * inv_freq / (2 * math.pi)
        smooth_factor = ((num_rotations - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
        return (1 - smooth_factor) * inv_freq / scaling.factor + smooth_factor * inv_freq
    return inv_freq


def apply_rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (i, i + width/2) of x, (B, H, T, width), by its position's angle."""
    low, high = x.chunk(2, -1)
    return x * cosines + torch.cat([-high, low], -1) * sines


class RelativePositionBias(nn.Module):
    """T5's bias on the scores: a number for each head and each bucket of distances."""

    def __init__(self, config: RelativeBias, heads: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.config = config
        self.bidirectional = bidirectional
        self.weight = nn.Parameter(torch.empty(config.buckets, heads))

    def forward(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """(B or 1, Q), (B or 1, K) → (B or 1, H, Q, K)"""
        distance = k_pos[:, None, :] - q_pos[:, :, None]
        return nn.functional.embedding(self.bucket(distance), self.weight).permute(0, 3, 1, 2)

    def bucket(self, distance: Tensor) -> Tensor:
        """Near distances one by one, far ones by logarithm, the farthest together."""
        buckets, max_distance = self.config.buckets, self.config.farthest
        if self.bidirectional:
            buckets //= 2
            bucket_offset = (distance > 0) * buckets
            distance = distance.abs()
        else:
            bucket_offset = torch.zeros_like(distance)
            distance = (-distance).clamp(min=0)
        max_exact = buckets // 2
        log_bucket = (
            max_exact
            + (
                (distance.clamp(min=1).float() / max_exact).log()
                / math.log(max_distance / max_exact)
                * (buckets - max_exact)
            ).long()
        )
        return bucket_offset + torch.where(distance < max_exact, distance, log_bucket.clamp(max=buckets - 1))
