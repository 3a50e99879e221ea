"""Position encodings: sinusoidal, learned, rotary (RoPE) with linear or Llama 3 scaling, T5's relative bias.

    Sinusoidal          added to the embeddings: sines and cosines        (sinusoidal_encoding)
    LearnedPositions    added to the embeddings: a learned table          (LearnedPositionEmbedding)
    Rotary              RoPE: queries and keys are rotated                (rope_cos_sin, apply_rotary)
    LinearRopeScaling   RoPE scaling: positions divided by a factor       (rope_frequencies)
    Llama3RopeScaling   RoPE scaling of Llama 3.1: by wavelength          (rope_frequencies)
    RelativeBias        T5: a bias on the scores by bucketed distance     (RelativePositionBias)

The first column are configs, the choices of a Design; in brackets what computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keepleft import checks


@dataclass(frozen=True)
class Sinusoidal:
    """Sines in the first half of the channels, cosines in the second, as in the authors' own code.

    The paper interleaves them: the same model with its channels in another order.
    """

    length: int = 1024  # for exported files that store a table; the formula itself has no limit

    def __post_init__(self) -> None:
        checks.check_int("length", self.length)


@dataclass(frozen=True)
class LearnedPositions:
    """A learned embedding for each of `length` positions."""

    length: int
    first: int = 0  # unused rows before position 0: BART has 2

    def __post_init__(self) -> None:
        checks.check_int("length", self.length)
        checks.check_int("first", self.first, minimum=0)


@dataclass(frozen=True)
class LinearRopeScaling:
    """Linear RoPE scaling (position interpolation): positions are divided by a factor."""

    factor: float

    def __post_init__(self) -> None:
        checks.check_number("factor", self.factor, above=0)


@dataclass(frozen=True)
class Llama3RopeScaling:
    """RoPE scaling of Llama 3.1: long wavelengths are stretched, short ones kept, with a ramp between.

    In Hugging Face's words: low_freq_factor, high_freq_factor, original_max_position_embeddings.
    """

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
    """Rotary position embedding (RoPE), with optional scaling for longer contexts."""

    base: float = 10_000.0  # rope_theta
    length: int = 2048  # the context length it was trained for; nothing stops there
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
    """T5's relative position bias: a learned number per head and bucket of distances, added to the scores."""

    buckets: int = 32
    farthest: int = 128  # from this distance on, all share the last bucket

    def __post_init__(self) -> None:
        checks.check_int("buckets", self.buckets, minimum=4)  # two for each direction
        # farther than the distances that have a bucket each
        checks.check_int("farthest", self.farthest, minimum=self.buckets // 2 + 1)


Position = Sinusoidal | LearnedPositions | Rotary | RelativeBias


def sinusoidal_encoding(positions: Tensor, dim: int) -> Tensor:
    """(…) positions → (…, dim): sin(p / 10000^(2i/dim)), then the cosines; in float32, as checkpoints are."""
    half = (dim + 1) // 2
    indices = torch.arange(half, dtype=torch.float64, device=positions.device)
    frequencies = torch.exp2(indices * (-2 * math.log2(10_000.0) / dim)) / (2 * math.pi)
    cycles = positions[..., None].double() * frequencies
    angles = (cycles - cycles.round()) * (2 * math.pi)  # a GPU is slow at powers, divisions and large angles
    return torch.cat([angles.sin(), angles.cos()[..., : dim - half]], -1).float()


class LearnedPositionEmbedding(nn.Module):
    """A learned vector for each position; position 0 is row `first` of the table."""

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
    """(B or 1, T) positions → cosines and sines (B or 1, 1, T, head_dim), computed once for all layers"""
    compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = rope_frequencies(config, head_dim, positions.device).to(compute_dtype)
    angles = positions[:, None, :, None].to(compute_dtype) * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope_frequencies(config: Rotary, head_dim: int, device: torch.device) -> Tensor:
    """(head_dim / 2,) frequencies after RoPE scaling. In float32 for any model, as LLaMA was trained."""
    inv_freq = 1.0 / config.base ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    if isinstance(config.scaling, LinearRopeScaling):
        return inv_freq / config.scaling.factor
    if isinstance(config.scaling, Llama3RopeScaling):
        scaling = config.scaling
        # how many wavelengths fit into the original context length
        num_rotations = scaling.original * inv_freq / (2 * math.pi)
        smooth_factor = ((num_rotations - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
        return (1 - smooth_factor) * inv_freq / scaling.factor + smooth_factor * inv_freq
    return inv_freq


def apply_rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair of channels (i, i + D/2) of x, (B, H, T, D), by the angle of its position."""
    low, high = x.chunk(2, -1)
    return x * cosines + torch.cat([-high, low], -1) * sines


class RelativePositionBias(nn.Module):
    """T5's relative position bias: a number for each head and bucket of distances."""

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
        """The bucket of each distance: near ones have one each, far ones share them by logarithm."""
        buckets, max_distance = self.config.buckets, self.config.farthest
        if self.bidirectional:
            buckets //= 2
            bucket_offset = (distance > 0) * buckets
            distance = distance.abs()
        else:
            bucket_offset = torch.zeros_like(distance)
            distance = (-distance).clamp(min=0)
        max_exact = buckets // 2
        log_distance = (distance.clamp(min=1).float() / max_exact).log() / math.log(max_distance / max_exact)
        log_bucket = max_exact + (log_distance * (buckets - max_exact)).long()
        return bucket_offset + torch.where(distance < max_exact, distance, log_bucket.clamp(max=buckets - 1))
