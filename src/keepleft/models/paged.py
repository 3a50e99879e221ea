"""Texts in pages: many at once, each at its own place, that come and go between any two steps.

    read(leaves, chunks)            prompts, or pieces of them, into their pages
    hear(leaves, sources)           sources of an encoder-decoder into theirs
    step(leaves, tokens) -> scores  one more token for every text
    moved(leaves, parents)          the texts of a request change places, as beams do

Prompts are read by the model itself, with a view of some pages as its cache, whatever its mask. Steps are taken where pages
lie (in_place.py), on a GPU by tables of slots (tabled.py), and for masks that neither knows by the model itself again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from keepleft.attention.memory import Memory
from keepleft.attention.pages import EMPTY, Leaves, Pool
from keepleft.models.ancestry import Ancestry
from keepleft.models.in_place import InPlace
from keepleft.models.leaf import Leaf, next_places
from keepleft.models.lean import why_not
from keepleft.models.tabled import Tabled


class Seen(Protocol):
    """What must be remembered of which text sees which slots."""

    def blank(self, pool: Pool, leaf: Leaf, pages: list[int]) -> None: ...
    def shown(self, leaves: Sequence[Leaf], slots: Sequence[np.ndarray]) -> None: ...
    def heard(self, leaves: Sequence[Leaf], slots: Sequence[np.ndarray]) -> None: ...
    def moved(self, leaves: Sequence[Leaf], parents: Tensor) -> None: ...
    def left(self, leaf: Leaf) -> None: ...


class Way(Protocol):
    """How steps are taken."""

    def step(self, leaves: Sequence[Leaf], tokens: Sequence[int]) -> Tensor: ...


class Paged:
    """A model over a pool of pages, and one of pages for sources where it reads some. `rows` and `longest` bound tables."""

    def __init__(self, model: Any, *, pages: int, size: int = 128, source_pages: int = 0, rows: int = 256,
                 longest: int = 4096) -> None:
        shape, like = model.design.attention, model.token.weight
        self.model, self.device = model, like.device
        layers = len(model.decoder.layers)
        quick = why_not(model) is None
        tabled = quick and self.device.type == "cuda"
        self.pool = Pool(layers, pages + tabled, size, shape.kv_heads, shape.width, like)
        self.sources = Pool(layers, source_pages, size, shape.kv_heads, shape.width, like) if source_pages else None
        self.seen: Seen
        self.way: Way
        if tabled:
            self.seen = self.way = Tabled(model, self.pool, self.sources, rows, longest)
        else:
            self.seen = ancestry = Ancestry(self.pool)
            self.way = InPlace(model, self.pool, self.sources, ancestry) if quick else General(self, ancestry)

    def warm(self) -> None:
        """Whatever can be made ready before the first text comes."""
        if isinstance(self.way, Tabled):
            self.way.warm()

    def room(self, leaf: Leaf, slots: int) -> bool:
        """Pages for so many slots in all; False where there are not enough."""
        more = self.pool.needed(slots) - len(leaf.pages)
        if more > self.pool.free:
            return False
        if more > 0:
            pages = self.pool.take(more, high=leaf.width > 1)
            leaf.pages += pages
            self.seen.blank(self.pool, leaf, pages)
        return True

    def room_for_source(self, leaf: Leaf, tokens: int) -> bool:
        assert self.sources is not None
        if self.sources.needed(tokens) > self.sources.free:
            return False
        leaf.source = self.sources.take(self.sources.needed(tokens), high=leaf.width > 1)
        self.seen.blank(self.sources, leaf, leaf.source)
        return True

    def found(self, leaf: Leaf, pages: list[int]) -> None:
        """A leaf begins with pages that another one filled."""
        if not pages:
            return
        filled = len(pages) * self.pool.size
        leaf.pages = list(pages)
        self.seen.shown([leaf], [leaf.span(self.pool.size, 0, filled)])
        leaf.used = leaf.length = filled

    def free(self, leaf: Leaf) -> None:
        """All that it holds, at once."""
        self.pool.give(leaf.pages)
        if self.sources is not None:
            self.sources.give(leaf.source)
        self.seen.left(leaf)
        leaf.pages, leaf.source, leaf.used, leaf.length, leaf.heard = [], [], 0, 0, 0

    @torch.no_grad()
    def hear(self, leaves: Sequence[Leaf], sources: Sequence[Sequence[int]]) -> None:
        """Sources, read together; each leaf has pages for its own already."""
        assert self.sources is not None
        tokens, segments = self._padded(sources)
        memory = self.model.read(tokens, segments=segments)
        each = [leaf.source_span(self.sources.size, len(source)) for leaf, source in zip(leaves, sources, strict=True)]
        slots = self._table(each)
        cache = Leaves(self.sources, slots[:, :0], slots, self._filled(each))
        cache.admit(slots.shape[1], torch.arange(slots.shape[1], device=self.device).expand_as(slots))
        for n, (k, v) in enumerate(memory.pairs):
            cache.put(n, k, v)
        self.seen.heard(leaves, each)
        for leaf, source in zip(leaves, sources, strict=True):
            leaf.heard = len(source)

    @torch.no_grad()
    def read(self, leaves: Sequence[Leaf], chunks: Sequence[Sequence[int]]) -> None:
        """More tokens of the prompts, before their texts part."""
        tokens, segments = self._padded(chunks)
        size = self.pool.size
        before = self._table([leaf.span(size, 0, leaf.used) for leaf in leaves])
        slots = [leaf.span(size, leaf.used, len(chunk)) for leaf, chunk in zip(leaves, chunks, strict=True)]
        new = self._table(slots)
        start = torch.tensor([leaf.length for leaf in leaves], device=self.device)
        positions = torch.where(new == EMPTY, 0, start[:, None] + torch.arange(new.shape[1], device=self.device))
        cache = Leaves(self.pool, before, new, self._filled(slots))
        self.extended(tokens, cache, positions, segments, self.memory(leaves))
        self.seen.shown(leaves, slots)
        for leaf, chunk in zip(leaves, chunks, strict=True):
            leaf.used += len(chunk)
            leaf.length += len(chunk)

    @torch.no_grad()
    def step(self, leaves: Sequence[Leaf], tokens: Sequence[int]) -> Tensor:
        """One more token for each text of each leaf, leaves of one width side by side → (R, V). There must be room for it."""
        scores = self.way.step(leaves, tokens)
        for leaf in leaves:
            leaf.used += leaf.width
            leaf.length += 1
        return scores

    def moved(self, leaves: Sequence[Leaf], parents: Tensor) -> None:
        """(B, width): each text of these leaves goes on as another of the same leaf did."""
        self.seen.moved(leaves, parents)

    def extended(self, tokens: Tensor, cache: Leaves, positions: Tensor, segments: Tensor | None,
                 memory: Memory | None) -> Tensor:
        """(B, n) tokens through the model's own layers → (B, n, dim)"""
        model = self.model
        model.fits("tokens", tokens, positions, segments)
        model.reachable(tokens, positions, 0)
        grids = [cache.admit(tokens.shape[1], positions, segments)] * len(model.decoder.masks)
        x = model.embed(model.token, tokens, positions)
        return model.decoder(x, positions, grids, [cache] * len(grids), memory, segments)

    def memory(self, leaves: Sequence[Leaf]) -> Memory | None:
        """The sources of some leaves, side by side."""
        if self.sources is None:
            return None
        slots = self._table([leaf.source_span(self.sources.size, leaf.heard) for leaf in leaves])
        where = self.sources.where(slots)
        pairs = [self.sources.at(n, where) for n in range(len(self.sources.pairs))]
        return Memory(pairs, (slots != EMPTY).long())

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """(B, T) tokens, and segments where they are not equally long."""
        tokens = self._table([np.array(row) for row in rows])
        if all(len(row) == tokens.shape[1] for row in rows):
            return tokens, None
        return tokens.clamp(min=0), (tokens != EMPTY).long()

    def _table(self, rows: Sequence[np.ndarray]) -> Tensor:
        """(R, K), filled up with nothing."""
        out = np.full((len(rows), max(map(len, rows))), EMPTY, dtype=np.int64)
        for mine, row in zip(out, rows, strict=True):
            mine[:len(row)] = row
        return torch.from_numpy(out).to(self.device)

    def _filled(self, rows: Sequence[np.ndarray]) -> Tensor:
        """Which places of such a table hold something, counted through all rows."""
        width = max(map(len, rows))
        return torch.from_numpy(np.concatenate([n * width + np.arange(len(row)) for n, row in enumerate(rows)])).to(self.device)


class General:
    """Steps by the model itself, which serves any mask: what each text sees is gathered anew each time."""

    def __init__(self, paged: Paged, ancestry: Ancestry) -> None:
        self.paged, self.ancestry = paged, ancestry

    def step(self, leaves: Sequence[Leaf], tokens: Sequence[int]) -> Tensor:
        paged, size = self.paged, self.paged.pool.size
        number = lambda values: torch.tensor(values, device=paged.device)
        slots, lengths = map(number, next_places(leaves, size))
        before = [some for leaf in leaves for some in self._seen(leaf)]
        self.ancestry.added(leaves, slots)
        cache = Leaves(paged.pool, paged._table(before), slots[:, None])
        each = [leaf for leaf in leaves for _ in range(leaf.width)]
        x = paged.extended(number(tokens)[:, None], cache, lengths[:, None], None, paged.memory(each))
        return paged.model.head(x[:, -1], paged.model.token)

    def _seen(self, leaf: Leaf) -> list[np.ndarray]:
        """The slots that each text sees."""
        every = leaf.span(self.paged.pool.size, 0, leaf.used)
        if leaf.width == 1:
            return [every]
        seen = self.ancestry.of(leaf.width)[leaf.pages].transpose(0, 1).flatten(1)[:, :leaf.used]
        return [every[mine] for mine in seen.cpu().numpy()]
