"""The kernels that attention can run on. A backend is three functions: lower, plus, attend."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask


class Backend(Protocol):
    """What a kernel must offer. Its form is opaque to everyone else."""

    def lower(self, mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> Any:
        """What is seen, in the form that the kernel likes; once per forward pass."""

    def add_bias(self, lowered_mask: Any, bias: Tensor) -> Any:
        """The form with a bias on the scores, (B or 1, H or 1, Q, K), folded in."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, lowered_mask: Any, scale: float, dropout: float
    ) -> Tensor:
        """The attention itself; once per layer."""


def get_backend(name: str) -> Backend:
    """The backend of that name; each is imported when first asked for."""
    if name == "reference":
        from keepleft.attention.backends import reference as backend
    elif name == "sdpa":
        from keepleft.attention.backends import sdpa as backend  # type: ignore[no-redef]
    elif name == "flex":
        from keepleft.attention.backends import flex as backend  # type: ignore[no-redef]
    elif name == "varlen":
        from keepleft.attention.backends import varlen as backend  # type: ignore[no-redef]
    elif name == "traced":
        from keepleft.attention.backends import export as backend  # type: ignore[no-redef]
    else:
        raise ValueError(f"no attention backend is called {name!r}: there are {', '.join(BACKEND_NAMES)}")
    return backend


BACKEND_NAMES = ("reference", "sdpa", "flex", "varlen", "traced")
