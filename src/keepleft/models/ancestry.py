"""Which slots each text of a request sees, where several texts write into the same pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from keepleft.attention.pages import Pool
from keepleft.models.leaf import Leaf


class Ancestry:
    """For each number of texts a table (pages, texts, size). Requests of one text see all that is in their pages."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.tables: dict[int, Tensor] = {}

    def of(self, width: int) -> Tensor:
        if width not in self.tables:
            pool = self.pool
            self.tables[width] = torch.zeros(pool.pages, width, pool.size, dtype=torch.bool, device=pool.place.device)
        return self.tables[width]

    def blank(self, pool: Pool, leaf: Leaf, pages: list[int]) -> None:
        """New pages of a leaf: nothing is in them yet."""
        pool.clear(pages)
        if pool is self.pool and leaf.width > 1:
            self.of(leaf.width)[pages] = False

    def shown(self, leaves: Sequence[Leaf], slots: Sequence[np.ndarray]) -> None:
        """All texts of a leaf see these."""
        for leaf, some in zip(leaves, slots, strict=True):
            if leaf.width > 1 and len(some):
                seen = self.of(leaf.width)
                at = torch.from_numpy(some).to(seen.device)
                seen[at // self.pool.size, :, at % self.pool.size] = True

    def added(self, leaves: Sequence[Leaf], slots: Tensor) -> None:
        """(R,) a slot for each text, which it alone sees."""
        first = 0
        for leaf in leaves:
            if leaf.width > 1:
                own = slots[first:first + leaf.width]
                text = torch.arange(leaf.width, device=slots.device)
                self.of(leaf.width)[own // self.pool.size, text, own % self.pool.size] = True
            first += leaf.width

    def moved(self, leaves: Sequence[Leaf], parents: Tensor) -> None:
        """Each text goes on as another one did."""
        for leaf, mine in zip(leaves, parents, strict=True):
            seen = self.of(leaf.width)
            seen[leaf.pages] = seen[leaf.pages][:, mine]

    def heard(self, leaves: Sequence[Leaf], slots: Sequence[np.ndarray]) -> None:
        """A source is seen by all texts of a leaf: nothing has to be remembered."""

    def left(self, leaf: Leaf) -> None:
        """Whoever takes its pages clears them."""
