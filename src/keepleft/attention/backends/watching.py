"""What a kernel never shows: the weights themselves, worked out beside it from the same queries, keys and sight."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.attention.attend import Sight
from keepleft.attention.backends.reference import weights

AT_ONCE = 1 << 24  # scores worked out at a time: 64 MiB in float32


@torch.no_grad()
def maps(q: Tensor, k: Tensor, sight: Sight, scale: float, *, rows: Tensor | None = None, heads: Tensor | None = None,
         queries: Tensor | None = None) -> Tensor:
    """(rows, heads, queries, K): the weights of just those rows, heads and query slots; None is all of them."""
    every = lambda n: torch.arange(n, device=q.device)
    rows = every(q.shape[0]) if rows is None else rows.to(q.device)
    heads = every(q.shape[1]) if heads is None else heads.to(q.device)
    queries = every(q.shape[2]) if queries is None else queries.to(q.device)
    some_q = q[rows][:, heads]
    some_k = k[rows][:, heads // (q.shape[1] // k.shape[1])]
    out = q.new_empty(len(rows), len(heads), len(queries), k.shape[2])
    step = max(1, AT_ONCE // max(1, len(rows) * len(heads) * k.shape[2]))
    for begin in range(0, len(queries), step):
        some = queries[begin:begin + step]
        table = sight.grid.table(sight.mask, batch=sight.batch, heads=sight.heads, device=q.device,
                                 rows=rows, some_heads=heads, queries=some)
        bias = sight.bias
        if bias is not None:
            bias = bias[rows if bias.shape[0] > 1 else slice(None)]
            bias = bias[:, heads if bias.shape[1] > 1 else slice(None)][:, :, some].to(q.dtype)
        out[:, :, begin:begin + step] = weights(some_q[:, :, some], some_k, table, bias, scale)
    return out
