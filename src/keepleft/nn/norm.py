"""Normalisation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from keepleft import checks


@dataclass(frozen=True)
class LayerNorm:
    eps: float = 1e-5

    def __post_init__(self) -> None:
        checks.check_number("eps", self.eps)


@dataclass(frozen=True)
class RMSNorm:
    eps: float = 1e-6

    def __post_init__(self) -> None:
        checks.check_number("eps", self.eps)


Norm = LayerNorm | RMSNorm


def make_norm(config: Norm, dim: int) -> nn.Module:
    """(…, dim) in, (…, dim) out; PyTorch takes the statistics of half-precision numbers in float32."""
    kind = nn.LayerNorm if isinstance(config, LayerNorm) else nn.RMSNorm
    return kind(dim, eps=config.eps)
