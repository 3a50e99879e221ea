"""Model runner over a paged KV cache: many requests at once, each at its own position, that come and go
between any two steps.

    prefill(page_tables, chunks)           prompts, or chunks of them, into their pages
    encode_sources(page_tables, sources)   sources of an encoder-decoder into theirs
    decode(page_tables, tokens) -> logits  one more token for every sequence
    reorder_beams(page_tables, parents)    beams of a request continue their parents

Prompts are prefilled by the model itself, with a view of some pages as its cache, whatever its mask. Decode
steps run where the pages lie (paged_cpu.py), on a GPU by slot tables and CUDA graphs (paged_cuda.py), and for
masks that neither serves by the model itself again (`GatherStep`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from keepleft.attention.cross_memory import Memory
from keepleft.attention.paged_kv_cache import EMPTY_SLOT, PagedCacheView, PagePool, PageTable, next_slots
from keepleft.inference.beam_slots import BeamSlots
from keepleft.inference.decode_layers import unsupported_reason
from keepleft.inference.paged_cpu import PagedCPUStep
from keepleft.inference.paged_cuda import PagedCUDAStep
from keepleft.models.transformer import CausalModel, EncoderDecoder


class SlotTracking(Protocol):
    """Tracks which slots each beam may attend to."""

    def clear_pages(self, pool: PagePool, page_table: PageTable, pages: list[int]) -> None: ...
    def mark_shared(self, page_tables: Sequence[PageTable], slots: Sequence[np.ndarray]) -> None: ...
    def mark_source(self, page_tables: Sequence[PageTable], slots: Sequence[np.ndarray]) -> None: ...
    def reorder(self, page_tables: Sequence[PageTable], parents: Tensor) -> None: ...
    def release(self, page_table: PageTable) -> None: ...


class DecodeStep(Protocol):
    """One decode step over pages."""

    def step(self, page_tables: Sequence[PageTable], tokens: Sequence[int]) -> Tensor: ...


class PagedRunner:
    """A model over a page pool, and a second pool for sources.

    On a GPU a step has at most `max_rows` rows, and the slot tables have `max_table_rows` (default: as many)
    of `max_length` slots.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        num_pages: int,
        page_size: int = 128,
        num_source_pages: int = 0,
        max_rows: int = 256,
        max_table_rows: int | None = None,
        max_length: int = 4096,
    ) -> None:
        config, like = model.design.attention, model.token.weight
        self.model = model
        self.device = like.device
        layers = len(model.decoder.layers)
        fused = unsupported_reason(model) is None
        on_cuda = fused and self.device.type == "cuda"
        self.pool = PagePool(layers, num_pages + on_cuda, page_size, config.kv_heads, config.head_dim, like)
        self.source_pool = (
            PagePool(layers, num_source_pages, page_size, config.kv_heads, config.head_dim, like)
            if num_source_pages
            else None
        )
        self.slot_tracking: SlotTracking
        self.decode_step: DecodeStep
        if on_cuda:
            self.slot_tracking = self.decode_step = PagedCUDAStep(
                model, self.pool, self.source_pool, max_rows, max_length, max_table_rows=max_table_rows
            )
        else:
            self.slot_tracking = beam_slots = BeamSlots(self.pool)
            self.decode_step = (
                PagedCPUStep(model, self.pool, self.source_pool, beam_slots)
                if fused
                else GatherStep(self, beam_slots)
            )

    def warm_up(self) -> None:
        """Capture CUDA graphs before the first request comes."""
        if isinstance(self.decode_step, PagedCUDAStep):
            self.decode_step.warm_up()

    def reserve(self, page_table: PageTable, num_slots: int) -> bool:
        """Allocate pages until the request has `num_slots` slots; False if the pool has not enough."""
        num_new_pages = self.pool.pages_for(num_slots) - len(page_table.pages)
        if num_new_pages > self.pool.num_free:
            return False
        if num_new_pages > 0:
            pages = self.pool.allocate(num_new_pages, from_end=page_table.width > 1)
            page_table.pages += pages
            self.slot_tracking.clear_pages(self.pool, page_table, pages)
        return True

    def reserve_source(self, page_table: PageTable, num_tokens: int) -> bool:
        assert self.source_pool is not None
        if self.source_pool.pages_for(num_tokens) > self.source_pool.num_free:
            return False
        page_table.source_pages = self.source_pool.allocate(
            self.source_pool.pages_for(num_tokens), from_end=page_table.width > 1
        )
        self.slot_tracking.clear_pages(self.source_pool, page_table, page_table.source_pages)
        return True

    def attach_prefix(self, page_table: PageTable, pages: list[int]) -> None:
        """Let a new request start with cached pages that another one filled."""
        if not pages:
            return
        num_slots = len(pages) * self.pool.page_size
        page_table.pages = list(pages)
        self.slot_tracking.mark_shared(
            [page_table], [page_table.slot_range(self.pool.page_size, 0, num_slots)]
        )
        page_table.num_slots = page_table.num_tokens = num_slots

    def free(self, page_table: PageTable) -> None:
        """Release all pages of a request."""
        self.pool.release(page_table.pages)
        if self.source_pool is not None:
            self.source_pool.release(page_table.source_pages)
        self.slot_tracking.release(page_table)
        page_table.pages = []
        page_table.source_pages = []
        page_table.num_slots = 0
        page_table.num_tokens = 0
        page_table.num_source_tokens = 0

    @torch.no_grad()
    def encode_by_layer(
        self, sources: Sequence[Sequence[int]]
    ) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
        """Run the encoder over sources and yield after each layer; returns its (B, S, dim) output and the
        segments.
        """
        assert isinstance(self.model, EncoderDecoder)
        tokens, segments = self._pad_tokens(sources)
        x, positions, grid = self.model.embed_source(tokens, segments=segments)
        encoder = self.model.encoder
        return (yield from encoder.layer_by_layer(x, positions, [grid] * len(encoder.masks))), segments

    @torch.no_grad()
    def store_sources(
        self,
        page_tables: Sequence[PageTable],
        sources: Sequence[Sequence[int]],
        encoder_output: Tensor,
        segments: Tensor | None,
    ) -> None:
        """Write the cross-attention memory of encoded sources into their pages, which they have already."""
        assert self.source_pool is not None
        memory = self.model.decoder.cross_memory(encoder_output, segments)
        source_slots = [
            page_table.source_slot_range(self.source_pool.page_size, len(source))
            for page_table, source in zip(page_tables, sources, strict=True)
        ]
        slots = self._pad_rows(source_slots)
        cache = PagedCacheView(self.source_pool, slots[:, :0], slots, self._filled_indices(source_slots))
        cache.admit(slots.shape[1], torch.arange(slots.shape[1], device=self.device).expand_as(slots))
        for n, (k, v) in enumerate(memory.layers):
            cache.update(n, k[:, :, : slots.shape[1]], v[:, :, : slots.shape[1]])
        self.slot_tracking.mark_source(page_tables, source_slots)
        for page_table, source in zip(page_tables, sources, strict=True):
            page_table.num_source_tokens = len(source)

    def encode_sources(self, page_tables: Sequence[PageTable], sources: Sequence[Sequence[int]]) -> None:
        """Encode sources in one batch; each request must have its source pages already."""
        layers = self.encode_by_layer(sources)
        try:
            while True:
                next(layers)
        except StopIteration as finished:
            self.store_sources(page_tables, sources, *finished.value)

    @torch.no_grad()
    def prefill(self, page_tables: Sequence[PageTable], chunks: Sequence[Sequence[int]]) -> Tensor:
        """Prefill one chunk of each prompt, before the beams of a request diverge → (B, n, dim)"""
        tokens, segments = self._pad_tokens(chunks)
        page_size = self.pool.page_size
        past_slots = self._pad_rows(
            [page_table.slot_range(page_size, 0, page_table.num_slots) for page_table in page_tables]
        )
        slots = [
            page_table.slot_range(page_size, page_table.num_slots, len(chunk))
            for page_table, chunk in zip(page_tables, chunks, strict=True)
        ]
        new_slots = self._pad_rows(slots)
        starts = torch.tensor([page_table.num_tokens for page_table in page_tables], device=self.device)
        positions = torch.where(
            new_slots == EMPTY_SLOT, 0, starts[:, None] + torch.arange(new_slots.shape[1], device=self.device)
        )
        cache = PagedCacheView(self.pool, past_slots, new_slots, self._filled_indices(slots))
        hidden_states = self.forward(tokens, cache, positions, segments, self.source_memory(page_tables))
        self.slot_tracking.mark_shared(page_tables, slots)
        for page_table, chunk in zip(page_tables, chunks, strict=True):
            page_table.num_slots += len(chunk)
            page_table.num_tokens += len(chunk)
        return hidden_states

    @torch.no_grad()
    def decode(self, page_tables: Sequence[PageTable], tokens: Sequence[int]) -> Tensor:
        """One more token for each sequence → (R, V) logits.

        Requests of one width stand side by side, and have slots reserved.
        """
        logits = self.decode_step.step(page_tables, tokens)
        for page_table in page_tables:
            page_table.num_slots += page_table.width
            page_table.num_tokens += 1
        return logits

    def reorder_beams(self, page_tables: Sequence[PageTable], parents: Tensor) -> None:
        """(B, width) parents: each beam of these requests continues a beam of the same request."""
        self.slot_tracking.reorder(page_tables, parents)

    def forward(
        self,
        tokens: Tensor,
        cache: PagedCacheView,
        positions: Tensor,
        segments: Tensor | None,
        memory: Memory | None,
    ) -> Tensor:
        """(B, n) tokens through the model's own layers → (B, n, dim)"""
        model = self.model
        model.check_inputs("tokens", tokens, positions, segments)
        model.check_positions(tokens, positions, 0)
        grids = [cache.admit(tokens.shape[1], positions, segments)] * len(model.decoder.masks)
        x = model.embed(model.token, tokens, positions)
        return model.decoder(x, positions, grids, [cache] * len(grids), memory, segments)

    def source_memory(self, page_tables: Sequence[PageTable]) -> Memory | None:
        """Cross-attention memory of these requests, gathered from their source pages."""
        if self.source_pool is None:
            return None
        slots = self._pad_rows(
            [
                page_table.source_slot_range(self.source_pool.page_size, page_table.num_source_tokens)
                for page_table in page_tables
            ]
        )
        slot_index = self.source_pool.locate(slots)
        kv_pairs = [self.source_pool.gather(n, slot_index) for n in range(len(self.source_pool.layers))]
        return Memory(kv_pairs, (slots != EMPTY_SLOT).long())

    def _pad_tokens(self, token_rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """(B, T) tokens, and segments where lengths differ."""
        tokens = self._pad_rows([np.array(row) for row in token_rows])
        if all(len(row) == tokens.shape[1] for row in token_rows):
            return tokens, None
        return tokens.clamp(min=0), (tokens != EMPTY_SLOT).long()

    def _pad_rows(self, arrays: Sequence[np.ndarray]) -> Tensor:
        """(R, K), padded with EMPTY_SLOT."""
        out = np.full((len(arrays), max(map(len, arrays))), EMPTY_SLOT, dtype=np.int64)
        for padded_row, row in zip(out, arrays, strict=True):
            padded_row[: len(row)] = row
        return torch.from_numpy(out).to(self.device)

    def _filled_indices(self, arrays: Sequence[np.ndarray]) -> Tensor:
        """Flat indices of the entries of such a table that are not padding."""
        width = max(map(len, arrays))
        return torch.from_numpy(
            np.concatenate([n * width + np.arange(len(row)) for n, row in enumerate(arrays)])
        ).to(self.device)


class GatherStep:
    """Decode steps by the model itself, for any mask: the visible slots of each sequence are gathered every
    time.
    """

    def __init__(self, runner: PagedRunner, beam_slots: BeamSlots) -> None:
        self.runner = runner
        self.beam_slots = beam_slots

    def step(self, page_tables: Sequence[PageTable], tokens: Sequence[int]) -> Tensor:
        runner, page_size = self.runner, self.runner.pool.page_size
        to_tensor = lambda values: torch.tensor(values, device=runner.device)
        slots, lengths = map(to_tensor, next_slots(page_tables, page_size))
        past_slots = [
            row_slots for page_table in page_tables for row_slots in self._visible_slots(page_table)
        ]
        self.beam_slots.mark_own(page_tables, slots)
        cache = PagedCacheView(runner.pool, runner._pad_rows(past_slots), slots[:, None])
        row_tables = [page_table for page_table in page_tables for _ in range(page_table.width)]
        x = runner.forward(
            to_tensor(tokens)[:, None], cache, lengths[:, None], None, runner.source_memory(row_tables)
        )
        return runner.model.head(x[:, -1], runner.model.token)

    def _visible_slots(self, page_table: PageTable) -> list[np.ndarray]:
        """The slots that each beam sees."""
        all_slots = page_table.slot_range(self.runner.pool.page_size, 0, page_table.num_slots)
        if page_table.width == 1:
            return [all_slots]
        visible = (
            self.beam_slots.table(page_table.width)[page_table.pages]
            .transpose(0, 1)
            .flatten(1)[:, : page_table.num_slots]
        )
        return [all_slots[row_mask] for row_mask in visible.cpu().numpy()]
