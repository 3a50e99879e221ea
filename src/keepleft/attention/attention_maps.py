"""Attention maps: the softmax weights that fused kernels never return, recomputed from q, k and the sight."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.attention.attend import Sight
from keepleft.attention.backends.reference import attention_weights

MAX_SCORES = 1 << 24  # scores computed at a time: 64 MiB in float32


@torch.no_grad()
def attention_maps(
    q: Tensor,
    k: Tensor,
    sight: Sight,
    scale: float,
    *,
    rows: Tensor | None = None,
    heads: Tensor | None = None,
    queries: Tensor | None = None,
) -> Tensor:
    """The weights of these batch rows, heads and query slots, (rows, heads, queries, K); None means all.

    q: (B, H, Q, D)   k: (B, H or a divisor of it, K, D). Computed in chunks of queries.
    """
    all_indices = lambda n: torch.arange(n, device=q.device)
    rows = all_indices(q.shape[0]) if rows is None else rows.to(q.device)
    heads = all_indices(q.shape[1]) if heads is None else heads.to(q.device)
    queries = all_indices(q.shape[2]) if queries is None else queries.to(q.device)
    selected_q = q[rows][:, heads]
    selected_k = k[rows][:, heads // (q.shape[1] // k.shape[1])]
    out = q.new_empty(len(rows), len(heads), len(queries), k.shape[2])
    chunk_size = max(1, MAX_SCORES // max(1, len(rows) * len(heads) * k.shape[2]))
    for begin in range(0, len(queries), chunk_size):
        query_chunk = queries[begin : begin + chunk_size]
        table = sight.grid.table(
            sight.mask,
            batch=sight.batch,
            heads=sight.heads,
            device=q.device,
            rows=rows,
            head_indices=heads,
            queries=query_chunk,
        )
        bias = sight.bias
        if bias is not None:
            bias = bias[rows if bias.shape[0] > 1 else slice(None)]
            bias = bias[:, heads if bias.shape[1] > 1 else slice(None)][:, :, query_chunk].to(q.dtype)
        out[:, :, begin : begin + chunk_size] = attention_weights(
            selected_q[:, :, query_chunk], selected_k, table, bias, scale
        )
    return out
