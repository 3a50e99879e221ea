"""Counter-based RNG: random numbers are a pure function of a seed and a position, so a sequence is sampled
the same whatever is sampled beside it, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = -0x61C8864680B583EB
_MULTIPLIER_1 = -0x40A7B892E31B1A47
_MULTIPLIER_2 = -0x6B2FB644ECCEEE15  # of SplitMix64 (Steele et al. 2014)


def splitmix64(seed: Tensor, counter: Tensor | int) -> Tensor:
    """SplitMix64 of two integers; the same on every device."""
    z = (
        seed + (counter + 1) * _GAMMA
        if isinstance(counter, Tensor)
        else seed + _wrap_int64((counter + 1) * _GAMMA)
    )
    z = (z ^ _logical_shift_right(z, 30)) * _MULTIPLIER_1
    z = (z ^ _logical_shift_right(z, 27)) * _MULTIPLIER_2
    return z ^ _logical_shift_right(z, 31)


def uniform(seed: Tensor, counter: Tensor | int) -> Tensor:
    """Uniform numbers in [0, 1), in float64."""
    return _logical_shift_right(splitmix64(seed, counter), 11).double() * 2.0**-53


def derive_seeds(seed: int, indices: Tensor) -> Tensor:
    """The seeds of several sequences of one request: (N,) from (N,) indices."""
    return splitmix64(torch.full_like(indices, _wrap_int64(seed)), indices)


def _logical_shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of a signed integer."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _wrap_int64(n: int) -> int:
    """Wrap around to a signed 64-bit integer."""
    return (n + (1 << 63)) % (1 << 64) - (1 << 63)
