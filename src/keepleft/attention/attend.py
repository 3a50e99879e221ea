"""The entry point to attention: see() lowers a mask once per forward pass, attend() runs once per layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask

BACKEND_NAMES = ("reference", "sdpa", "flex", "varlen", "export")

# From this many queries on a GPU, a dense boolean mask costs more than compiling a kernel that needs none.
MIN_QUERIES_WITHOUT_TABLE = 512


class Backend(Protocol):
    """What a module in backends/ provides. Its lowered mask is opaque to everyone else."""

    def lower(self, mask: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> Any:
        """The mask over a grid in the kernel's own representation; once per forward pass."""

    def add_bias(self, lowered_mask: Any, bias: Tensor) -> Any:
        """The lowered mask with a bias on the scores, (B or 1, H or 1, Q, K), folded in."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, lowered_mask: Any, scale: float, dropout: float
    ) -> Tensor:
        """Attention itself, shapes as in attend(); once per layer."""


@dataclass(frozen=True)
class Sight:
    """A mask over a grid, lowered for one backend: what each query may attend to."""

    mask: Mask
    grid: Grid
    batch: int
    heads: int
    device: torch.device
    backend: str
    kernel: Backend
    lowered_mask: Any
    is_uniform: bool = True  # the same for every row and head
    bias: Tensor | None = None  # (B or 1, H or 1, Q, K), already folded into lowered_mask

    def add_bias(self, bias: Tensor | None) -> Sight:
        """The same sight with a bias on the scores, folded in once for all layers.

        bias: (B or 1, H or 1, Q, K). Variable-length attention takes none, so that sight is lowered again
        for FlexAttention.
        """
        if bias is None:
            return self
        if bias.dim() != 4 or bias.shape[-2:] != (self.grid.queries, self.grid.keys):
            raise ValueError(
                f"a bias of shape {tuple(bias.shape)} does not fit {self.grid.queries} queries over "
                f"{self.grid.keys} keys: it must be (batch or 1, heads or 1, queries, keys)"
            )
        if self.backend == "varlen":
            return see(
                self.mask, self.grid, batch=self.batch, heads=self.heads, device=self.device, backend="flex"
            ).add_bias(bias)
        return replace(
            self,
            lowered_mask=self.kernel.add_bias(self.lowered_mask, bias),
            bias=bias if self.bias is None else self.bias + bias,
        )


Watcher = Callable[[Tensor, Tensor, Sight, float], None]  # (q, k, sight, scale)


def see(
    mask: Mask,
    grid: Grid,
    *,
    batch: int = 1,
    heads: int = 1,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
) -> Sight:
    """Lower a mask over a grid for a backend; with backend=None the cheapest one that can express it."""
    if not isinstance(mask, Mask) or not isinstance(grid, Grid):
        raise TypeError(
            f"see wants a mask and a grid, not {type(mask).__name__} and {type(grid).__name__}: "
            "see(causal, Grid(5, 5)); parse_mask('causal') reads a mask from text, "
            "Where(name, fn) is one of your own"
        )
    if mask.rows not in (None, batch):
        raise ValueError(
            f"the mask {mask} has lengths for {mask.rows} rows, the batch has {batch}: give see(…, batch=…)"
        )
    device = torch.device(device)
    for tensor in (grid.q_pos, grid.k_pos, grid.q_seg, grid.k_seg):
        if tensor is not None and tensor.shape[0] != batch:
            raise ValueError(
                f"the grid has {tensor.shape[0]} rows, the batch has {batch}: give see(…, batch=…)"
            )
    name = backend or _choose_backend(mask, grid, device, dtype)
    kernel = get_backend(name)
    try:
        lowered_mask = kernel.lower(mask, grid, batch, heads, device)
    except ValueError:
        if backend is not None or name != "varlen":
            raise
        return see(mask, grid, batch=batch, heads=heads, device=device, dtype=dtype, backend="flex")
    return Sight(mask, grid, batch, heads, device, name, kernel, lowered_mask, mask.is_uniform)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    watcher: Watcher | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + bias, over the keys in sight) v: (B, H, Q, D)

    q: (B, H, Q, D)   k, v: (B, H or a divisor of it, K, D)   bias: (B or 1, H or 1, Q, K)
    A query with no key in sight gets zeros. The scale is 1/√D unless given. A watcher is called with the
    queries, keys, sight and scale before the kernel runs.
    """
    if not isinstance(sight, Sight):
        raise TypeError(
            f"attend wants a sight, not {type(sight).__name__}: "
            f"see(causal, Grid({q.shape[-2]}, {k.shape[-2]}))"
        )
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} must each be "
            "(batch, heads, tokens, width)"
        )
    grid = sight.grid
    batch, heads, queries, head_dim = q.shape
    key_batch, kv_heads, keys, key_head_dim = k.shape
    if not sight.is_uniform and (batch != sight.batch or heads != sight.heads):
        raise ValueError(
            f"the mask may differ by row and head, and the sight is for {sight.batch} rows and {sight.heads} "
            f"heads; the queries have {batch} and {heads}: give see(…, batch={batch}, heads={heads})"
        )
    if (
        queries != grid.queries
        or keys != grid.keys
        or head_dim != key_head_dim
        or key_batch != batch
        or v.shape[:3] != k.shape[:3]
    ):
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit "
            f"a sight of {grid.queries} queries over {grid.keys} keys"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads: one must divide the other")
    if bias is not None:
        sight = sight.add_bias(bias)
    if scale is None:
        scale = head_dim**-0.5
    if watcher is not None:
        watcher(q, k, sight, scale)
    return sight.kernel.attend(q, k, v, sight.lowered_mask, scale, dropout)


def get_backend(name: str) -> Backend:
    """The backend of that name; each is imported on first use. ValueError for a name there is none of."""
    match name:
        case "reference":
            from keepleft.attention.backends import reference

            return reference
        case "sdpa":
            from keepleft.attention.backends import sdpa

            return sdpa
        case "flex":
            from keepleft.attention.backends import flex

            return flex
        case "varlen":
            from keepleft.attention.backends import varlen

            return varlen
        case "export":
            from keepleft.attention.backends import export

            return export
    raise ValueError(f"no attention backend is called {name!r}: there are {', '.join(BACKEND_NAMES)}")


def _choose_backend(mask: Mask, grid: Grid, device: torch.device, dtype: torch.dtype) -> str:
    """The cheapest backend that can express the mask: SDPA, unless that takes a large dense mask on a GPU."""
    if device.type != "cuda" or grid.queries < MIN_QUERIES_WITHOUT_TABLE:
        return "sdpa"
    from keepleft.attention.backends import sdpa, varlen

    if grid.is_plain and sdpa.builtin_mask(mask, grid):
        return "sdpa"
    if dtype in (torch.float16, torch.bfloat16) and varlen.supports(mask, grid):
        return "varlen"
    return "flex"
