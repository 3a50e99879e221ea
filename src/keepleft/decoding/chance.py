"""Random numbers that are a function of a seed and a place alone: a text is drawn the same whatever is drawn beside it."""

from __future__ import annotations

import torch
from torch import Tensor

_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64 (Steele et al. 2014)


def mixed(seed: Tensor, place: Tensor | int) -> Tensor:
    """One whole number from two, by SplitMix64; the same on every device."""
    z = seed + (place + 1) * _STEP if isinstance(place, Tensor) else seed + _whole((place + 1) * _STEP)
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def uniform(seed: Tensor, place: Tensor | int) -> Tensor:
    """Numbers in [0, 1), in float64, that look random."""
    return _shifted(mixed(seed, place), 11).double() * 2.0 ** -53


def seeds(one: int, copies: Tensor) -> Tensor:
    """The seed of each of several texts from one request: (N,) from (N,) numbers."""
    return mixed(torch.full_like(copies, _whole(one)), copies)


def _shifted(z: Tensor, by: int) -> Tensor:
    """z >> by as if it had no sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _whole(n: int) -> int:
    """Within 64 bits, with a sign, by wrapping around."""
    return (n + (1 << 63)) % (1 << 64) - (1 << 63)
