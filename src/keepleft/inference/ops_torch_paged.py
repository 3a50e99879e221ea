"""The step of inference/ops_torch.py over pages, in plain PyTorch: queries go to the pages, pages stay where they lie.

Copying the pages of each text into a row costs more than looking at them. Here each page is asked by the text that it belongs
to, and what the pages of one text found is put together. Pages that belong to nobody are asked too, as long as few do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.inference.ops_torch import (
    CrossAttentionOp,
    LinearResidualOp,
    NormLinearOp,
    RotaryCosSin,
    SelfAttentionOp,
    TorchOps,
    split_qkv,
)
from keepleft.nn.attention import AttentionConfig
from keepleft.nn.feedforward import FeedForwardLayer


@dataclass
class PageBatch:
    """Rows of texts that each have `width` rows, and the pages that they look at."""

    first_row: int                  # of the rows
    num_sequences: int                  # texts
    rows_per_sequence: int
    page_begin: int                  # of the pages, one after the other …
    page_end: int
    page_ids: Tensor | None         # … or just these
    owners: Tensor               # (n,) the text of each page; `count`: none
    sequence_pages: Tensor | None         # (count,) the page of each text, where each has but one
    filled_slots: int                   # slots of a page that are in use
    biases: dict[int | None, Tensor] = field(default_factory=dict)  # by window: (n · Hk, width · G, fill)

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_sequences * self.rows_per_sequence


@dataclass
class PageBatchContext:
    """Where a step over pages stands: what all layers share."""

    page_batches: list[PageBatch]
    page: Tensor                # (R,) where each row's own key and value go
    offset: Tensor              # (R,)
    rotary: RotaryCosSin | None = None


class PagedTorchOps:
    """Tools for steps over pages: buffers are (pages, Hk, size, D)."""

    static_shapes = False

    def __init__(self) -> None:
        self.torch_ops = TorchOps()

    def norm_linear(self, norm: nn.Module | None, linear: nn.Module, feedforward: FeedForwardLayer | None = None) -> NormLinearOp:
        return self.torch_ops.norm_linear(norm, linear, feedforward)

    def linear_residual(self, linear: nn.Module) -> LinearResidualOp:
        return self.torch_ops.linear_residual(linear)

    def self_attention(self, config: AttentionConfig, window: int | None) -> SelfAttentionOp:
        def run(qkv: Tensor, keys: Tensor, values: Tensor, context: Any) -> Tensor:
            q, k, v = split_qkv(qkv, config, context.rotary)
            keys[context.page, :, context.offset] = k
            values[context.page, :, context.offset] = v
            return _concatenate([paged_attention(q[page_batch.first_row:page_batch.end_row], keys, values, page_batch, page_batch.biases[window], config) for page_batch in context.page_batches])
        return run

    def cross_attention(self, config: AttentionConfig) -> CrossAttentionOp:
        def run(q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
            q = q.view(len(q), -1, config.head_dim)
            return _concatenate([paged_attention(q[page_batch.first_row:page_batch.end_row], keys, values, page_batch, page_batch.biases[None], config) for page_batch in bias])
        return run


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, page_batch: PageBatch, bias: Tensor, config: AttentionConfig) -> Tensor:
    """(R, H, D) over pages → (R, H · D)"""
    kv_heads, head_dim, num_sequences = config.kv_heads, config.head_dim, page_batch.num_sequences
    q = q.view(num_sequences, page_batch.rows_per_sequence, kv_heads, -1, head_dim).transpose(1, 2).reshape(num_sequences, kv_heads, -1, head_dim)
    clamped_owners, owners = page_batch.owners.clamp(max=num_sequences - 1), page_batch.owners
    num_queries = q.shape[2]
    q = q.index_select(0, clamped_owners).flatten(0, 1)
    k, v = (select_pages(buffer, page_batch).flatten(0, 1) for buffer in (keys, values))
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=config.softmax_scale)
    if page_batch.sequence_pages is not None:
        attended = torch.bmm(scores.softmax(-1), v).view(-1, kv_heads, num_queries, head_dim).index_select(0, page_batch.sequence_pages)
    else:
        scores = scores.view(-1, kv_heads, num_queries, page_batch.filled_slots)
        page_max = scores.amax(-1)
        sequence_max = page_max.new_full((num_sequences + 1, kv_heads, num_queries), float("-inf"))
        sequence_max.scatter_reduce_(0, owners[:, None, None].expand_as(page_max), page_max, "amax")
        exp_scores = (scores - sequence_max.index_select(0, owners)[..., None]).exp()
        attended = torch.bmm(exp_scores.flatten(0, 1), v).view(-1, kv_heads, num_queries, head_dim)
        attended = attended.new_zeros(num_sequences + 1, kv_heads, num_queries, head_dim).index_add_(0, owners, attended)[:num_sequences]
        attended = attended / attended.new_zeros(num_sequences + 1, kv_heads, num_queries).index_add_(0, owners, exp_scores.sum(-1))[:num_sequences, ..., None]
    return attended.view(num_sequences, kv_heads, page_batch.rows_per_sequence, -1, head_dim).transpose(1, 2).reshape(num_sequences * page_batch.rows_per_sequence, -1)


def select_pages(buffer: Tensor, page_batch: PageBatch) -> Tensor:
    """(pages, Hk, size, D) → (n, Hk, fill, D)"""
    pages = buffer[page_batch.page_begin:page_batch.page_end] if page_batch.page_ids is None else buffer.index_select(0, page_batch.page_ids)
    return pages[:, :, :page_batch.filled_slots]


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
