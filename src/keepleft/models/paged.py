"""Steps over pages: many texts at once, each at its own place, that come and go between any two steps.

    read(chunks) -> scores        prompts, or pieces of them, into their pages
    hear(sources)                 sources of an encoder-decoder into theirs
    step(leaves, tokens) -> scores  one more token for every row
    moved(leaf, parents)          the texts of one request change places, as beams do

A leaf is what one request has in the pool. All its texts write into the same pages, and which slots each of them sees is
remembered: beams share what they have in common, and nothing is copied when they change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.memory import Memory
from keepleft.attention.pages import EMPTY, Leaves, Pool
from keepleft.models.lean import Lean, why_not
from keepleft.nn.paged import Lot, Paging, Spread


@dataclass(eq=False)
class Leaf:
    """One request's part of the pool."""

    width: int = 1                                     # texts
    pages: list[int] = field(default_factory=list)
    used: int = 0                                      # slots
    length: int = 0                                    # tokens of each text
    source: list[int] = field(default_factory=list)    # pages
    heard: int = 0                                     # tokens of the source

    def slots(self, size: int, begin: int, count: int) -> list[int]:
        """The numbers of some of its slots in the pool."""
        return [self.pages[n // size] * size + n % size for n in range(begin, begin + count)]


class Paged:
    """A model over a pool of pages, and one of pages for sources where it reads some."""

    def __init__(self, model: Any, *, pages: int, size: int = 128, source_pages: int = 0) -> None:
        shape, like = model.design.attention, model.token.weight
        self.model, self.design, self.device = model, model.design, like.device
        layers = len(model.decoder.layers)
        self.pool = Pool(layers, pages, size, shape.kv_heads, shape.width, like)
        self.sources = Pool(layers, source_pages, size, shape.kv_heads, shape.width, like) if source_pages else None
        self.lean = Lean(model, Paging()) if why_not(model) is None else None
        self.seen: dict[int, Tensor] = {}  # by width: (pages, width, size) which slots each of the texts sees

    def room(self, leaf: Leaf, slots: int) -> bool:
        """Pages for so many slots in all; False where there are not enough."""
        more = self.pool.needed(slots) - len(leaf.pages)
        if more > self.pool.free:
            return False
        if more > 0:
            pages = self.pool.take(more, high=leaf.width > 1)
            leaf.pages += pages
            if leaf.width > 1:
                self._ancestry(leaf.width)[pages] = False
        return True

    def shown(self, leaf: Leaf, pages: list[int]) -> None:
        """All texts of the leaf see all of these, which others filled."""
        if leaf.width > 1 and pages:
            self._ancestry(leaf.width)[pages] = True

    def room_for_source(self, leaf: Leaf, tokens: int) -> bool:
        assert self.sources is not None
        if self.sources.needed(tokens) > self.sources.free:
            return False
        leaf.source = self.sources.take(self.sources.needed(tokens), high=leaf.width > 1)
        return True

    def free(self, leaf: Leaf) -> None:
        """All that it holds, at once."""
        self.pool.give(leaf.pages)
        if self.sources is not None:
            self.sources.give(leaf.source)
        leaf.pages, leaf.source, leaf.used, leaf.length, leaf.heard = [], [], 0, 0, 0

    @torch.no_grad()
    def hear(self, leaves: Sequence[Leaf], sources: Sequence[Sequence[int]]) -> None:
        """Sources, read together; each leaf has pages for its own already."""
        assert self.sources is not None
        tokens, segments = self._padded(sources)
        memory = self.model.read(tokens, segments=segments)
        size = self.sources.size
        slots = [[leaf.source[n // size] * size + n % size for n in range(len(source))]
                 for leaf, source in zip(leaves, sources, strict=True)]
        flat = torch.tensor([slot for some in slots for slot in some], device=self.device)
        there = slice(None) if segments is None else segments != 0
        self.sources.place.flatten()[flat] = torch.tensor([n for some in slots for n in range(len(some))], device=self.device)
        for n, (k, v) in enumerate(memory.pairs):
            if segments is None:
                self.sources.put(n, flat, k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1))
            else:
                self.sources.put(n, flat, k.transpose(1, 2)[there], v.transpose(1, 2)[there])
        for leaf, source in zip(leaves, sources, strict=True):
            leaf.heard = len(source)

    @torch.no_grad()
    def read(self, leaves: Sequence[Leaf], chunks: Sequence[Sequence[int]]) -> Tensor:
        """More tokens of the prompts, before their texts part: the scores (B, V) of what follows the last of each."""
        tokens, segments = self._padded(chunks)
        size = self.pool.size
        before = self._table([leaf.slots(size, 0, leaf.used) for leaf in leaves])
        new = self._table([leaf.slots(size, leaf.used, len(chunk)) for leaf, chunk in zip(leaves, chunks, strict=True)])
        start = torch.tensor([leaf.length for leaf in leaves], device=self.device)
        positions = torch.where(new == EMPTY, 0, start[:, None] + torch.arange(new.shape[1], device=self.device))
        x = self._extended(tokens, Leaves(self.pool, before, new), positions, segments, self._memory(leaves))
        for leaf, chunk in zip(leaves, chunks, strict=True):
            if leaf.width > 1:
                slots = torch.tensor(leaf.slots(size, leaf.used, len(chunk)), device=self.device)
                self._ancestry(leaf.width)[slots // size, :, slots % size] = True
            leaf.used += len(chunk)
            leaf.length += len(chunk)
        last = torch.tensor([len(chunk) - 1 for chunk in chunks], device=self.device)
        return self.model.head(x[torch.arange(len(x), device=self.device), last], self.model.token)

    @torch.no_grad()
    def step(self, leaves: Sequence[Leaf], tokens: Tensor) -> Tensor:
        """(R,) one more token for each text of each leaf, leaves of one width side by side → (R, V)"""
        size = self.pool.size
        slots = torch.tensor([slot for leaf in leaves for slot in leaf.slots(size, leaf.used, leaf.width)], device=self.device)
        lengths = torch.tensor([leaf.length for leaf in leaves for _ in range(leaf.width)], device=self.device)
        page, within = slots // size, slots % size
        lots = [(width, list(some)) for width, some in groupby(leaves, lambda leaf: leaf.width)]
        first = 0
        for width, some in lots:
            if width > 1:
                rows = slice(first, first + width * len(some))
                text = torch.arange(width, device=self.device).repeat(len(some))
                self._ancestry(width)[page[rows], text, within[rows]] = True
            first += width * len(some)
        scores = self._general(lots, tokens, slots, lengths) if self.lean is None else self._quick(
            lots, tokens, lengths, page, within)
        for leaf in leaves:
            leaf.used += leaf.width
            leaf.length += 1
        return scores

    def moved(self, leaf: Leaf, parents: Tensor) -> None:
        """Each text of the leaf goes on as another one did."""
        seen = self._ancestry(leaf.width)
        seen[leaf.pages] = seen[leaf.pages][:, parents]

    def _quick(self, lots: list[tuple[int, list[Leaf]]], tokens: Tensor, lengths: Tensor, page: Tensor,
               within: Tensor) -> Tensor:
        assert self.lean is not None
        self.pool.place[page, within] = lengths
        self.lean.ready(int(lengths.max()) + 1)
        at = lambda table: F.embedding(lengths, table)
        here = Spread([], page, within, self.lean.turn(at))
        across, first = [], 0
        for width, some in lots:
            held = [leaf.used + leaf.width for leaf in some]
            lot = self._lot(self.pool, [leaf.pages for leaf in some], held, first, width)
            position = lengths[first:first + width * len(some):width]
            for size in set(self.lean.windows):
                lot.biases[size] = self._bias(lot, position, size)
            here.lots.append(lot)
            if self.sources is not None:
                lot = self._lot(self.sources, [leaf.source for leaf in some], [leaf.heard for leaf in some], first, width)
                lot.biases[None] = self._spread(lot, hidden=self._part(self.sources.place, lot)[:, None] == EMPTY)
                across.append(lot)
            first += width * len(some)
        return self.lean.run(tokens, at, here, self.pool.pairs, None if self.sources is None else self.sources.pairs, across)

    def _lot(self, pool: Pool, pages: list[list[int]], held: list[int], first: int, width: int) -> Lot:
        """The pages of some texts: as they lie, where few others lie among them; otherwise one by one."""
        each = [some[:pool.needed(count)] for some, count in zip(pages, held, strict=True)]
        flat = [page for some in each for page in some]
        whose = [n for n, some in enumerate(each) for _ in some]
        single = len(flat) == len(each)
        fill = max(held) if single else pool.size
        begin, end = min(flat), max(flat) + 1
        if len(set(flat)) < len(flat) or end - begin > 2 * len(flat) + 4:
            owner = torch.tensor(whose, device=self.device)
            home = torch.arange(len(each), device=self.device) if single else None
            return Lot(first, len(each), width, 0, 0, torch.tensor(flat, device=self.device), owner, home, fill)
        owner = torch.full((end - begin,), len(each), device=self.device)
        places = torch.tensor(flat, device=self.device) - begin
        owner[places] = torch.tensor(whose, device=self.device)
        return Lot(first, len(each), width, begin, end, None, owner, places if single else None, fill)

    def _bias(self, lot: Lot, position: Tensor, window: int | None) -> Tensor:
        """What is added to the scores of a lot whose texts have come so far."""
        assert self.lean is not None
        place = self._part(self.pool.place, lot)
        hidden = place[:, None] == EMPTY  # (n, 1 or width, fill)
        if lot.width > 1:
            hidden = hidden | ~self._part(self._ancestry(lot.width), lot)
        now = F.pad(position, (0, 1))[lot.owner][:, None]
        if window is not None:
            hidden = hidden | (place <= now - window)[:, None]
        return self._spread(lot, hidden, (now - place).clamp(0, len(self.lean.near[0]) - 1) if len(self.lean.near) else None)

    def _spread(self, lot: Lot, hidden: Tensor, distance: Tensor | None = None) -> Tensor:
        """(n, 1 or width, fill) → (n · Hk, width · G, fill)"""
        shape = self.design.attention
        few, group, (n, texts, fill) = shape.kv_heads, shape.heads // shape.kv_heads, hidden.shape
        bias = torch.zeros(1, 1, 1, 1, 1, dtype=self.model.token.weight.dtype, device=self.device)
        if distance is not None:
            assert self.lean is not None
            bias = self.lean.near[:, distance].view(few, group, n, fill).permute(2, 0, 1, 3)[:, :, None]
        bias = bias.expand(n, few, texts, group, fill).masked_fill(hidden[:, None, :, None], float("-inf"))
        return bias.expand(n, few, lot.width, group, fill).reshape(n * few, lot.width * group, fill)

    def _part(self, table: Tensor, lot: Lot) -> Tensor:
        """(pages, …, size) → (n, …, fill)"""
        pages = table[lot.begin:lot.end] if lot.only is None else table[lot.only]
        return pages[..., :lot.fill]

    def _general(self, lots: list[tuple[int, list[Leaf]]], tokens: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """The same by the model's own step, which serves any mask."""
        size, rows = self.pool.size, []
        for width, some in lots:
            for leaf in some:
                every = torch.tensor(leaf.slots(size, 0, leaf.used))
                seen = self._ancestry(width)[leaf.pages].transpose(0, 1).flatten(1)[:, :leaf.used].cpu() if width > 1 else None
                rows += [every.tolist()] if seen is None else [every[mine].tolist() for mine in seen]
        cache = Leaves(self.pool, self._table(rows), slots[:, None])
        leaves = [leaf for _, some in lots for leaf in some for _ in range(leaf.width)]
        x = self._extended(tokens[:, None], cache, lengths[:, None], None, self._memory(leaves))
        return self.model.head(x[:, -1], self.model.token)

    def _extended(self, tokens: Tensor, cache: Leaves, positions: Tensor, segments: Tensor | None,
                  memory: Memory | None) -> Tensor:
        model = self.model
        model.fits("tokens", tokens, positions, segments)
        model.reachable(tokens, positions, 0)
        grids = [cache.admit(tokens.shape[1], positions, segments)] * len(model.decoder.masks)
        x = model.embed(model.token, tokens, positions)
        return model.decoder(x, positions, grids, [cache] * len(grids), memory, segments)

    def _memory(self, leaves: Sequence[Leaf]) -> Memory | None:
        """The sources of some leaves, side by side."""
        if self.sources is None:
            return None
        size = self.sources.size
        slots = self._table([[leaf.source[n // size] * size + n % size for n in range(leaf.heard)] for leaf in leaves])
        pairs = [self.sources.at(n, slots.clamp(min=0)) for n in range(len(self.sources.pairs))]
        return Memory(pairs, (slots != EMPTY).long())

    def _ancestry(self, width: int) -> Tensor:
        if width not in self.seen:
            self.seen[width] = torch.zeros(self.pool.pages, width, self.pool.size, dtype=torch.bool, device=self.device)
        return self.seen[width]

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        width = max(map(len, rows))
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        if all(len(row) == width for row in rows):
            return tokens, None
        return tokens, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self.device)

    def _table(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(R, K), filled up with nothing."""
        width = max(map(len, rows))
        return torch.tensor([[*row, *[EMPTY] * (width - len(row))] for row in rows], dtype=torch.long,
                            device=self.device).view(len(rows), width)
