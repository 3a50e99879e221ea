"""The paged decode step on a GPU: slot tables say where each token's keys and values lie, and steps are CUDA
graphs.

A sequence owns a row of the slot table while it is served; beams are reordered by exchanging rows. Graphs are
captured for a few batch sizes. A step replays the next larger one; its padding rows write to a scratch page
that nobody attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.paged_kv_cache import PagePool, PageTable, next_slots
from keepleft.cuda_graph import capture_graph
from keepleft.inference.decode_layers import DecodeLayers
from keepleft.inference.ops import SlotTableLayout
from keepleft.inference.ops_triton import TritonOps
from keepleft.models.transformer import CausalModel

GRAPH_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # rows


class PagedCUDAStep:
    """For models that the fused decode step serves: at most `max_rows` sequences of at most `max_length`
    tokens in a step, and `max_table_rows` (default: as many) between steps.
    """

    def __init__(
        self,
        model: CausalModel,
        pool: PagePool,
        source_pool: PagePool | None,
        max_rows: int,
        max_length: int,
        *,
        max_table_rows: int | None = None,
        capture: bool = True,
    ) -> None:
        self.decode_layers = DecodeLayers(model, TritonOps())
        self.pool = pool
        self.source_pool = source_pool
        self.device = model.token.weight.device
        self.capture = capture
        self.scratch_page = pool.reserve_scratch_page()  # where padding rows write to
        zeros = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device=self.device)
        table_rows = max_table_rows or max_rows
        self.slot_table = zeros(table_rows + 1, max_length + 1)
        self.source_slot_table = zeros(table_rows + 1, max_length + 1) if source_pool is not None else None
        self.source_lengths = zeros(table_rows + 1)
        self.free_rows = list(range(table_rows))[::-1]
        self.padding_row = table_rows  # table row of padding rows
        # token, table row, length and slot of each row
        self.inputs = torch.zeros(4, max(max_rows, 1), dtype=torch.long, device=self.device)
        self.decode_layers.prepare_tables(max_length + 1)
        self.graphs: dict[int, tuple[Any, Tensor]] = {}

    def clear_pages(self, pool: PagePool, page_table: PageTable, pages: list[int]) -> None:
        pass

    def mark_shared(self, page_tables: Sequence[PageTable], slots: Sequence[np.ndarray]) -> None:
        """The next tokens of all beams of each request lie in these slots."""
        self._write_slots(
            self.slot_table, page_tables, slots, [page_table.num_tokens for page_table in page_tables]
        )

    def mark_source(self, page_tables: Sequence[PageTable], slots: Sequence[np.ndarray]) -> None:
        """The sources lie in these slots."""
        assert self.source_slot_table is not None
        self._write_slots(self.source_slot_table, page_tables, slots, [0] * len(page_tables))
        row_lengths = [
            (row, len(source_slots))
            for page_table, source_slots in zip(page_tables, slots, strict=True)
            for row in page_table.rows
        ]
        rows, lengths = torch.tensor(row_lengths, device=self.device).t()
        self.source_lengths[rows] = lengths.to(torch.int32)

    def _write_slots(
        self,
        table: Tensor,
        page_tables: Sequence[PageTable],
        slots: Sequence[np.ndarray],
        starts: Sequence[int],
    ) -> None:
        for page_table in page_tables:
            self._assign_rows(page_table)
        entries = [
            np.stack([np.full_like(row_slots, row), start + np.arange(len(row_slots)), row_slots])
            for page_table, row_slots, start in zip(page_tables, slots, starts, strict=True)
            for row in page_table.rows
        ]
        rows, columns, values = torch.from_numpy(np.concatenate(entries, 1)).to(self.device)
        table[rows, columns] = values.to(torch.int32)

    def _assign_rows(self, page_table: PageTable) -> None:
        if not page_table.rows:
            page_table.rows = [self.free_rows.pop() for _ in range(page_table.width)]

    def release(self, page_table: PageTable) -> None:
        self.free_rows += page_table.rows
        page_table.rows = []

    def reorder(self, page_tables: Sequence[PageTable], parents: Tensor) -> None:
        rows = torch.tensor([page_table.rows for page_table in page_tables], device=self.device)
        max_tokens = max(page_table.num_tokens for page_table in page_tables)
        self.slot_table[rows.flatten(), :max_tokens] = self.slot_table[
            rows.gather(1, parents).flatten(), :max_tokens
        ]

    def step(self, page_tables: Sequence[PageTable], tokens: Sequence[int]) -> Tensor:
        page_size, num_rows = self.pool.page_size, len(tokens)
        for page_table in page_tables:
            self._assign_rows(page_table)
        graph_rows = min(
            next((batch_size for batch_size in GRAPH_BATCH_SIZES if batch_size >= num_rows), num_rows),
            self.inputs.shape[1],
        )
        num_padding = graph_rows - num_rows
        slots, lengths = next_slots(page_tables, page_size)
        inputs = [
            [*tokens, *[0] * num_padding],
            [
                *(row for page_table in page_tables for row in page_table.rows),
                *[self.padding_row] * num_padding,
            ],
            [*lengths, *[0] * num_padding],
            [*slots, *(self.scratch_page * page_size + n % page_size for n in range(num_padding))],
        ]
        self.inputs[:, :graph_rows] = torch.tensor(inputs, device=self.device)
        return self._replay(graph_rows)[:num_rows]

    def warm_up(self) -> None:
        """Capture the graphs of all batch sizes now, so that no request waits for it: all rows are padding
        rows.
        """
        max_rows = self.inputs.shape[1]
        idle_inputs = torch.tensor(
            [0, self.padding_row, 0, self.scratch_page * self.pool.page_size], device=self.device
        )
        self.inputs.copy_(idle_inputs[:, None].expand(-1, max_rows))
        with torch.no_grad():
            for num_rows in sorted({min(size, max_rows) for size in GRAPH_BATCH_SIZES}):
                self._replay(num_rows)

    def _replay(self, num_rows: int) -> Tensor:
        if not self.capture:
            return self._forward(num_rows)
        if num_rows not in self.graphs:
            # running the same step several times changes nothing
            self.graphs[num_rows] = capture_graph(lambda: self._forward(num_rows), warmup=2)
        graph, logits = self.graphs[num_rows]
        graph.replay()
        return logits

    def _forward(self, num_rows: int) -> Tensor:
        tokens, table_rows, lengths, slots = self.inputs[:, :num_rows]
        self.slot_table[table_rows, lengths] = slots.to(torch.int32)
        by_position = lambda table: F.embedding(lengths, table)
        layout = SlotTableLayout(
            self.slot_table,
            table_rows,
            slots,
            self.source_slot_table,
            None if self.source_pool is None else self.source_lengths,
        )
        context = self.decode_layers.context(lengths, layout, by_position)
        source_kv = None if self.source_pool is None else self.source_pool.layers
        return self.decode_layers.forward(tokens, by_position, context, self.pool.layers, source_kv)
