"""A step over pages on a CPU: pages are looked at where they lie, lot by lot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.pages import EMPTY, Pool
from keepleft.models.ancestry import Ancestry
from keepleft.models.leaf import Leaf, next_places
from keepleft.models.lean import Lean
from keepleft.nn.paged import Lot, Paging, Spread


class InPlace:
    """For models that can take steady steps."""

    def __init__(self, model: Any, pool: Pool, sources: Pool | None, ancestry: Ancestry) -> None:
        self.model, self.pool, self.sources, self.ancestry = model, pool, sources, ancestry
        self.lean, self.device = Lean(model, Paging()), model.token.weight.device

    def step(self, leaves: Sequence[Leaf], tokens: Sequence[int]) -> Tensor:
        size, number = self.pool.size, lambda values: torch.tensor(values, device=self.device)
        slots, lengths = map(number, next_places(leaves, size))
        self.ancestry.added(leaves, slots)
        page, within = slots // size, slots % size
        self.pool.place[page, within] = lengths
        self.lean.ready(max(leaf.length for leaf in leaves) + 1)
        at = lambda table: F.embedding(lengths, table)
        here = Spread([], page, within, self.lean.turn(at))
        across, first = [], 0
        for width, group in groupby(leaves, lambda leaf: leaf.width):
            some = list(group)
            lot = self._lot(self.pool, [leaf.pages for leaf in some], [leaf.used + leaf.width for leaf in some], first, width)
            position = lengths[first:first + width * len(some):width]
            for window in set(self.lean.windows):
                lot.biases[window] = self._bias(lot, position, window)
            here.lots.append(lot)
            if self.sources is not None:
                lot = self._lot(self.sources, [leaf.source for leaf in some], [leaf.heard for leaf in some], first, width)
                lot.biases[None] = self._spread(lot, hidden=_part(self.sources.place, lot)[:, None] == EMPTY)
                across.append(lot)
            first += width * len(some)
        sources = None if self.sources is None else self.sources.pairs
        return self.lean.run(number(tokens), at, here, self.pool.pairs, sources, across)

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
        place = _part(self.pool.place, lot)
        hidden = place[:, None] == EMPTY  # (n, 1 or width, fill)
        if lot.width > 1:
            hidden = hidden | ~_part(self.ancestry.of(lot.width), lot)
        now = F.pad(position, (0, 1))[lot.owner][:, None]
        if window is not None:
            hidden = hidden | (place <= now - window)[:, None]
        return self._spread(lot, hidden, (now - place).clamp(0, len(self.lean.near[0]) - 1) if len(self.lean.near) else None)

    def _spread(self, lot: Lot, hidden: Tensor, distance: Tensor | None = None) -> Tensor:
        """(n, 1 or width, fill) → (n · Hk, width · G, fill)"""
        shape = self.model.design.attention
        few, group, (n, texts, fill) = shape.kv_heads, shape.heads // shape.kv_heads, hidden.shape
        bias = torch.zeros(1, 1, 1, 1, 1, dtype=self.model.token.weight.dtype, device=self.device)
        if distance is not None:
            bias = self.lean.near[:, distance].view(few, group, n, fill).permute(2, 0, 1, 3)[:, :, None]
        bias = bias.expand(n, few, texts, group, fill).masked_fill(hidden[:, None, :, None], float("-inf"))
        return bias.expand(n, few, lot.width, group, fill).reshape(n * few, lot.width * group, fill)


def _part(table: Tensor, lot: Lot) -> Tensor:
    """(pages, …, size) → (n, …, fill)"""
    pages = table[lot.begin:lot.end] if lot.only is None else table[lot.only]
    return pages[..., :lot.fill]
