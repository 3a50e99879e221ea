"""The one door to attention: see() once per forward pass, attend() once per layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keepleft.attention import backends
from keepleft.attention.backends import Backend
from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask

MIN_QUERIES_WITHOUT_TABLE = (
    512  # tokens from which, on a GPU, a table of booleans costs more than compiling a kernel without one
)


@dataclass(frozen=True)
class Sight:
    """What each query sees, in the form that one backend wants. Opaque to everyone else."""

    mask: Mask
    grid: Grid
    batch: int
    heads: int
    device: torch.device
    backend: str
    kernel: Backend
    lowered_mask: Any
    is_uniform: bool = True  # the same for every row and head
    bias: Tensor | None = None  # (B or 1, H or 1, Q, K), already in the form

    def add_bias(self, bias: Tensor | None) -> Sight:
        """The same sight with a bias added to the scores, folded in once for all layers."""
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
    """Turn a mask over a grid into what a kernel wants; None chooses the kernel."""
    if not isinstance(mask, Mask) or not isinstance(grid, Grid):
        raise TypeError(
            f"see wants a mask and a grid, not {type(mask).__name__} and {type(grid).__name__}: "
            "see(causal, Grid(5, 5)); parse_mask('causal') reads a mask from text, Where(name, fn) is one of your own"
        )
    if mask.rows not in (None, batch):
        raise ValueError(
            f"the mask {mask} speaks of {mask.rows} rows, the batch has {batch}: give see(…, batch=…)"
        )
    device = torch.device(device)
    for tensor in (grid.q_pos, grid.k_pos, grid.q_seg, grid.k_seg):
        if tensor is not None and tensor.shape[0] != batch:
            raise ValueError(
                f"the grid speaks of {tensor.shape[0]} rows, the batch has {batch}: give see(…, batch=…)"
            )
    name = backend or _choose_backend(mask, grid, device, dtype)
    kernel = backends.get_backend(name)
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
    """softmax(q kᵀ · scale + bias, over the keys in sight) v

    q: (B, H, Q, D)   k, v: (B, H or a divisor of it, K, D)   bias: (B or 1, H or 1, Q, K)
    A query with nothing in sight gets zeros. Scale is 1/√D unless given.
    """
    if not isinstance(sight, Sight):
        raise TypeError(
            f"attend wants a sight, not {type(sight).__name__}: see(causal, Grid({q.shape[-2]}, {k.shape[-2]}))"
        )
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} must each be "
            "(batch, heads, tokens, width)"
        )
    grid = sight.grid
    (batch, heads, queries, head_dim) = q.shape
    (key_batch, kv_heads, keys, key_head_dim) = k.shape
    if not sight.is_uniform and (batch != sight.batch or heads != sight.heads):
        raise ValueError(
            f"what is seen may differ by row and head, and was asked for {sight.batch} rows and {sight.heads} "
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


def _choose_backend(mask: Mask, grid: Grid, device: torch.device, dtype: torch.dtype) -> str:
    """The cheapest kernel that can say the mask: the fused ones, unless they would need a large table on a
    GPU.
    """
    if device.type != "cuda" or grid.queries < MIN_QUERIES_WITHOUT_TABLE:
        return "sdpa"
    from keepleft.attention.backends import sdpa, varlen

    if grid.is_plain and sdpa.builtin_mask(mask, grid):
        return "sdpa"
    if dtype in (torch.float16, torch.bfloat16) and varlen.supports(mask, grid):
        return "varlen"
    return "flex"
