"""The paged decode step on a CPU: pages are attended to in place, in batches of neighbouring pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.paged_kv_cache import EMPTY_SLOT, PagePool, PageTable, next_slots
from keepleft.inference.beam_slots import BeamSlots
from keepleft.inference.decode_layers import DecodeLayers
from keepleft.inference.ops import PageBatch, PagedLayout
from keepleft.inference.ops_torch import TorchOps
from keepleft.models.transformer import CausalModel


class PagedCPUStep:
    """For models that the fused decode step serves."""

    def __init__(
        self, model: CausalModel, pool: PagePool, source_pool: PagePool | None, beam_slots: BeamSlots
    ) -> None:
        self.model = model
        self.pool = pool
        self.source_pool = source_pool
        self.beam_slots = beam_slots
        self.decode_layers = DecodeLayers(model, TorchOps(paged=True))
        self.device = model.token.weight.device

    def step(self, page_tables: Sequence[PageTable], tokens: Sequence[int]) -> Tensor:
        page_size, to_tensor = self.pool.page_size, lambda values: torch.tensor(values, device=self.device)
        slots, lengths = map(to_tensor, next_slots(page_tables, page_size))
        self.beam_slots.mark_own(page_tables, slots)
        page, offset = slots // page_size, slots % page_size
        self.pool.positions[page, offset] = lengths
        self.decode_layers.prepare_tables(max(page_table.num_tokens for page_table in page_tables) + 1)
        by_position = lambda table: F.embedding(lengths, table)
        layout = PagedLayout([], page, offset)
        first_row = 0
        for width, group in groupby(page_tables, lambda page_table: page_table.width):
            group_tables = list(group)
            page_batch = self._page_batch(
                self.pool,
                [page_table.pages for page_table in group_tables],
                [page_table.num_slots + page_table.width for page_table in group_tables],
                first_row,
                width,
            )
            positions = lengths[first_row : first_row + width * len(group_tables) : width]
            for window in set(self.decode_layers.windows):
                page_batch.biases[window] = self._attention_bias(page_batch, positions, window)
            layout.page_batches.append(page_batch)
            if self.source_pool is not None:
                page_batch = self._page_batch(
                    self.source_pool,
                    [page_table.source_pages for page_table in group_tables],
                    [page_table.num_source_tokens for page_table in group_tables],
                    first_row,
                    width,
                )
                page_batch.biases[None] = self._expand_bias(
                    page_batch,
                    hidden=_select_pages(self.source_pool.positions, page_batch)[:, None] == EMPTY_SLOT,
                )
                layout.source_batches.append(page_batch)
            first_row += width * len(group_tables)
        source_kv = None if self.source_pool is None else self.source_pool.layers
        context = self.decode_layers.context(lengths, layout, by_position)
        return self.decode_layers.forward(
            to_tensor(tokens), by_position, context, self.pool.layers, source_kv
        )

    def _page_batch(
        self, pool: PagePool, pages: list[list[int]], num_slots: list[int], first_row: int, width: int
    ) -> PageBatch:
        """The pages of these sequences: a slice of the pool where few foreign pages lie among them, else
        picked one by one.
        """
        tables = [table[: pool.pages_for(count)] for table, count in zip(pages, num_slots, strict=True)]
        all_pages = [page for table in tables for page in table]
        owners = [n for n, table in enumerate(tables) for _ in table]
        one_page_each = len(all_pages) == len(tables)
        fill = max(num_slots) if one_page_each else pool.page_size
        begin, end = min(all_pages), max(all_pages) + 1
        if len(set(all_pages)) < len(all_pages) or end - begin > 2 * len(all_pages) + 4:
            owner = torch.tensor(owners, device=self.device)
            home = torch.arange(len(tables), device=self.device) if one_page_each else None
            return PageBatch(
                first_row,
                len(tables),
                width,
                0,
                0,
                torch.tensor(all_pages, device=self.device),
                owner,
                home,
                fill,
            )
        owner = torch.full((end - begin,), len(tables), device=self.device)
        page_index = torch.tensor(all_pages, device=self.device) - begin
        owner[page_index] = torch.tensor(owners, device=self.device)
        return PageBatch(
            first_row,
            len(tables),
            width,
            begin,
            end,
            None,
            owner,
            page_index if one_page_each else None,
            fill,
        )

    def _attention_bias(self, page_batch: PageBatch, positions: Tensor, window: int | None) -> Tensor:
        """Added to the scores of a page batch whose sequences are at these positions: the mask and the
        relative bias.
        """
        slot_positions = _select_pages(self.pool.positions, page_batch)
        hidden = slot_positions[:, None] == EMPTY_SLOT  # (n, 1 or width, filled slots)
        if page_batch.rows_per_sequence > 1:
            hidden = hidden | ~_select_pages(self.beam_slots.table(page_batch.rows_per_sequence), page_batch)
        query_positions = F.pad(positions, (0, 1))[page_batch.owners][:, None]
        if window is not None:
            hidden = hidden | (slot_positions <= query_positions - window)[:, None]
        return self._expand_bias(
            page_batch,
            hidden,
            (query_positions - slot_positions).clamp(0, len(self.decode_layers.relative_bias[0]) - 1)
            if len(self.decode_layers.relative_bias)
            else None,
        )

    def _expand_bias(self, page_batch: PageBatch, hidden: Tensor, distance: Tensor | None = None) -> Tensor:
        """(n, 1 or width, slots) booleans, and distances where there is a relative bias → (n · Hk, width · G,
        slots)
        """
        config = self.model.design.attention
        kv_heads = config.kv_heads
        group = config.heads // config.kv_heads
        (n, num_rows, fill) = hidden.shape
        bias = torch.zeros(1, 1, 1, 1, 1, dtype=self.model.token.weight.dtype, device=self.device)
        if distance is not None:
            bias = (
                self.decode_layers.relative_bias[:, distance]
                .view(kv_heads, group, n, fill)
                .permute(2, 0, 1, 3)[:, :, None]
            )
        bias = bias.expand(n, kv_heads, num_rows, group, fill).masked_fill(
            hidden[:, None, :, None], float("-inf")
        )
        return bias.expand(n, kv_heads, page_batch.rows_per_sequence, group, fill).reshape(
            n * kv_heads, page_batch.rows_per_sequence * group, fill
        )


def _select_pages(table: Tensor, page_batch: PageBatch) -> Tensor:
    """(pages, …, page_size) → (n, …, filled slots)"""
    pages = (
        table[page_batch.page_begin : page_batch.page_end]
        if page_batch.page_ids is None
        else table[page_batch.page_ids]
    )
    return pages[..., : page_batch.filled_slots]
