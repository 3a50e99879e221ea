"""What a decode step is made of: the context that all layers share, and the operations that a backend
provides.

A step decodes one token per row. `DecodeOps` has two backends, plain torch (ops_torch.py) and Triton
(ops_triton.py); each attends over contiguous or over paged keys and values, as the context's layout says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from keepleft.nn.attention import AttentionConfig
from keepleft.nn.feedforward import FeedForwardLayer

NormLinearOp = Callable[[Any], tuple[Any, Any, Tensor]]  # residual → residual, normed, linear(normed)
LinearResidualOp = Callable[[Any, Tensor], Any]  # residual and (R, …) → residual with linear(…) added


class RotaryCosSin(NamedTuple):
    """Cosines and sines of each row's position, (R or 1, 1, D)."""

    cosines: Tensor
    sines: Tensor


@dataclass
class StaticLayout:
    """Keys and values in contiguous buffers (capacity, R, Hk, D), one column per token; sources in (B, Hk, S,
    D).
    """

    length: int  # filled columns; a captured step reads `DecodeContext.position` instead
    starts: Tensor | None = None  # (R,) column where each row's sequence starts; None: 0
    beam_rows: Tensor | None = None  # (capacity, R) buffer row that holds a column of a row; None: its own
    # by window: added to the scores (torch only)
    biases: dict[int | None, Tensor | None] = field(default_factory=dict)
    source_bias: Tensor | None = None  # (B, S) 0 or -∞ by what is no padding; None: all is


@dataclass
class PageBatch:
    """Neighbouring sequences with the same number of rows (beams), and the pages that they attend to."""

    first_row: int
    num_sequences: int
    rows_per_sequence: int
    page_begin: int  # the pages are these, one after the other …
    page_end: int
    page_ids: Tensor | None  # … or just these
    owners: Tensor  # (n,) sequence of each page; `num_sequences`: none
    sequence_pages: Tensor | None  # (num_sequences,) the page of each sequence, where each has just one
    filled_slots: int  # slots of a page in use
    # by window: (n · Hk, rows_per_sequence · G, slots)
    biases: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_sequences * self.rows_per_sequence


@dataclass
class PagedLayout:
    """Keys and values in pages (pages, Hk, page_size, D), attended where they lie."""

    page_batches: list[PageBatch]
    page: Tensor  # (R,) page that each row's own key and value go to
    offset: Tensor  # (R,) and the slot within it
    source_batches: list[PageBatch] = field(default_factory=list)


@dataclass
class SlotTableLayout:
    """Keys and values in pages, looked up by tables on the device: what a CUDA graph can read."""

    table: Tensor  # (table rows, columns) slot of each token
    table_rows: Tensor  # (R,) table row of each row
    write_slots: Tensor  # (R,) slot that each row's own key and value go to
    source_table: Tensor | None = None
    source_lengths: Tensor | None = None  # (table rows,)


@dataclass
class DecodeContext:
    """What all layers of one decode step share."""

    position: Tensor  # tokens before this one: (1,) for all rows, or (R,) for each
    layout: StaticLayout | PagedLayout | SlotTableLayout
    rotary: RotaryCosSin | None = None
    relative_bias: Tensor | None = None  # (H, capacity) added to a score by distance


class SelfAttentionOp(Protocol):
    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
        """(R, (H + 2 Hk) · D) → (R, H · D); the new keys and values are written to the buffers."""
        ...


class CrossAttentionOp(Protocol):
    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
        """(R, H · D) over the sources' keys and values → (R, H · D)"""
        ...


class DecodeOps(Protocol):
    """The operations of a decode step.

    Each method builds a function once; steps then call it with tensors alone.
    """

    static_shapes: bool  # whole buffers are attended to, so that shapes never change; else the filled part

    def norm_linear(
        self, norm: nn.Module | None, linear: nn.Module, feedforward: FeedForwardLayer | None = None
    ) -> NormLinearOp: ...
    def linear_residual(self, linear: nn.Module) -> LinearResidualOp: ...
    def self_attention(self, config: AttentionConfig, window: int | None) -> SelfAttentionOp: ...
    def cross_attention(self, config: AttentionConfig) -> CrossAttentionOp: ...
