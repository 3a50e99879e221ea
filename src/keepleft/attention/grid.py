"""The rows and columns of one attention matrix: the position and the segment of each query and key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keepleft.attention.masks import Mask, Predicate


@dataclass(frozen=True)
class Grid:
    """Queries at positions start, start + 1, … over keys at 0, 1, …, unless tensors say otherwise.

    A segment is the number of the sequence that a token belongs to; 0 is padding. A token sees its own
    segment only, so padding and sequence packing are one mechanism.
    """

    queries: int
    keys: int
    start: int = 0
    q_pos: Tensor | None = None  # (B, Q)
    k_pos: Tensor | None = None  # (B, K)
    q_seg: Tensor | None = None  # (B, Q)
    k_seg: Tensor | None = None  # (B, K)

    def __post_init__(self) -> None:
        for name, tensor, size in (
            ("q_pos", self.q_pos, self.queries),
            ("k_pos", self.k_pos, self.keys),
            ("q_seg", self.q_seg, self.queries),
            ("k_seg", self.k_seg, self.keys),
        ):
            if tensor is not None and (tensor.dim() != 2 or tensor.shape[1] != size):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be (batch, {size})")
            if tensor is not None and tensor.dtype not in (torch.int64, torch.int32):
                raise ValueError(
                    f"{name} is {tensor.dtype}: integers are needed (a boolean mask of real tokens becomes "
                    "segments with .long())"
                )

    @property
    def is_plain(self) -> bool:
        """Consecutive positions and one sequence per row: known without reading any tensor."""
        return self.q_pos is None and self.k_pos is None and self.q_seg is None and self.k_seg is None

    @property
    def is_square(self) -> bool:
        """Queries and keys are the same tokens: known without reading any tensor."""
        return (
            self.queries == self.keys
            and self.start == 0
            and self.q_pos is self.k_pos
            and self.q_seg is self.k_seg
        )

    def predicate(self, mask: Mask, device: torch.device) -> Predicate:
        """The mask as a function of (b, h, query slot, key slot), restricted to equal segments."""
        mask_predicate = mask.predicate(device)
        start = self.start
        q_pos = self.q_pos
        k_pos = self.k_pos
        k_seg = self.k_seg
        # padding queries become segment -1, so that one comparison keeps segments apart and hides padding
        q_seg = None if self.q_seg is None else self.q_seg.masked_fill(self.q_seg == 0, -1)

        def slot_predicate(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            q = i + start if q_pos is None else q_pos[b, i]
            k = j if k_pos is None else k_pos[b, j]
            visible = mask_predicate(b, h, q, k)
            if k_seg is not None:
                visible = visible & (k_seg[b, j] != 0 if q_seg is None else k_seg[b, j] == q_seg[b, i])
            elif q_seg is not None:
                visible = visible & (q_seg[b, i] != -1)
            return visible

        return slot_predicate

    def table(
        self,
        mask: Mask,
        *,
        batch: int,
        heads: int,
        device: torch.device,
        rows: Tensor | None = None,
        head_indices: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """The mask as booleans, (B or 1, H or 1, Q, K): an axis that nothing depends on has size 1.

        `rows`, `head_indices` and `queries` (slots) select a part of the table; None means all of them.
        """
        b = torch.arange(batch, device=device) if rows is None else rows
        h = torch.arange(heads, device=device) if head_indices is None else head_indices
        i = torch.arange(self.queries, device=device) if queries is None else queries
        j = torch.arange(self.keys, device=device)
        visible = self.predicate(mask, device)(b[:, None, None, None], h[:, None, None], i[:, None], j)
        return visible.expand(torch.broadcast_shapes(visible.shape, (1, 1, len(i), len(j))))
