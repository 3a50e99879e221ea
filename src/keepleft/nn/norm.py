"""Normalisation: configs of LayerNorm and RMSNorm, and the torch modules made from them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from keepleft import checks


@dataclass(frozen=True)
class LayerNorm:
    """Config of a layer norm, not a torch module: `make_norm` makes the nn.LayerNorm."""

    eps: float = 1e-5

    def __post_init__(self) -> None:
        checks.check_number("eps", self.eps)


@dataclass(frozen=True)
class RMSNorm:
    """Config of a root-mean-square norm, not a torch module: `make_norm` makes the nn.RMSNorm."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        checks.check_number("eps", self.eps)


Norm = LayerNorm | RMSNorm


def make_norm(config: Norm, dim: int) -> nn.Module:
    """The torch module, (…, dim) → (…, dim); PyTorch computes half-precision statistics in float32."""
    module_class = nn.LayerNorm if isinstance(config, LayerNorm) else nn.RMSNorm
    return module_class(dim, eps=config.eps)
