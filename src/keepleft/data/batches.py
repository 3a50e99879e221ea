"""A deterministic order of batches: a function of seed, epoch and settings alone, so it can be taken up anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from keepleft.data.batch import Batch, made
from keepleft.data.objectives import Lesson, Objective
from keepleft.data.ragged import Ragged, Whole, packed, padded
from keepleft.data.store import Store
from keepleft.data.teaching import forced

POOL = 1 << 16  # records that are sorted by length together
OPEN = 64       # rows that are filled side by side when packing


class Place(NamedTuple):
    """Where a run stands: so many steps into an epoch."""

    epoch: int = 0
    step: int = 0


class Shape(Protocol):
    """How records become rectangles of at most so many tokens."""

    def plan(self, order: Whole, sizes: tuple[Whole, ...], budget: int, chance: np.random.Generator) -> Iterator[list[Whole]]:
        """The records of each micro-batch, row by row or text by text."""
        ...

    def make(self, store: Store, objective: Objective, rows: list[Whole], budget: int, chance: np.random.Generator,
             identity: str) -> Batch: ...


@dataclass(frozen=True)
class Bucketed:
    """Texts of like length together, a row each. `multiple` rounds widths up; `fixed` also gives every width one height."""

    multiple: int = 1
    fixed: bool = False

    def wide(self, size: int) -> int:
        return -(-size // self.multiple) * self.multiple

    def plan(self, order: Whole, sizes: tuple[Whole, ...], budget: int, chance: np.random.Generator) -> Iterator[list[Whole]]:
        for begin in range(0, len(order), POOL):
            pool = order[begin:begin + POOL]
            longest = np.max([size[pool] for size in sizes], axis=0)
            pool = pool[np.lexsort((*(size[pool] for size in sizes[1:]), sizes[0][pool], longest))]
            longest = np.max([size[pool] for size in sizes], axis=0).tolist()
            cuts, first = [], 0
            for n, size in enumerate(longest):
                if n > first and (n + 1 - first) * self.wide(size) > budget:
                    cuts.append(pool[first:n])
                    first = n
            cuts.append(pool[first:])
            for n in chance.permutation(len(cuts)):
                yield [cuts[n]]

    def make(self, store: Store, objective: Objective, rows: list[Whole], budget: int, chance: np.random.Generator,
             identity: str) -> Batch:
        lesson = objective.lesson(tuple(store[field].take(rows[0]) for field in objective.fields), chance)
        streams = [lesson.tokens] if lesson.source is None else [lesson.tokens, lesson.source]
        widths = [self.wide(int(stream.lengths.max(initial=1))) for stream in streams]
        height = None
        if self.fixed:
            widths = [max(widths)] * len(widths)
            height = max(budget // widths[0], len(rows[0]))
        layouts = [padded(stream, width=width, rows=height) for stream, width in zip(streams, widths, strict=True)]
        return made(lesson, layouts[0], layouts[1] if len(layouts) > 1 else None, identity)


@dataclass(frozen=True)
class Packed:
    """Texts one behind the other in rows of one width, each a segment of its own: no text sees another."""

    width: int

    def plan(self, order: Whole, sizes: tuple[Whole, ...], budget: int, chance: np.random.Generator) -> Iterator[list[Whole]]:
        full: list[Whole] = []
        height = max(1, budget // self.width)
        for row in _filled(order.tolist(), np.stack([size[order] for size in sizes], 1).tolist(), self.width):
            full.append(np.array(row))
            if len(full) == height:
                yield full
                full = []
        if full:
            yield full

    def make(self, store: Store, objective: Objective, rows: list[Whole], budget: int, chance: np.random.Generator,
             identity: str) -> Batch:
        lesson = objective.lesson(tuple(store[field].take(np.concatenate(rows)) for field in objective.fields), chance)
        height = max(1, budget // self.width)
        layouts = [packed(rows, stream, width=self.width, height=height)
                   for stream in (lesson.tokens, lesson.source) if stream is not None]
        return made(lesson, layouts[0], layouts[1] if len(layouts) > 1 else None, identity)


@dataclass(frozen=True)
class Windows:
    """Running text cut into pieces of one width, whatever lies in it: the records' borders are not looked at."""

    width: int

    def plan(self, order: Whole, sizes: tuple[Whole, ...], budget: int, chance: np.random.Generator) -> Iterator[list[Whole]]:
        height = max(1, budget // self.width)
        for begin in range(0, len(order), height):
            yield [order[begin:begin + height]]

    def make(self, store: Store, objective: Objective, rows: list[Whole], budget: int, chance: np.random.Generator,
             identity: str) -> Batch:
        tokens = store[objective.fields[0]].tokens
        cut = np.stack([tokens[begin:begin + self.width + 1] for begin in rows[0].tolist()]).astype(np.int64)
        texts = Ragged(cut[:, 1:].reshape(-1), np.full(len(cut), self.width))
        lesson = Lesson(*forced(cut[:, 0], texts))
        return made(lesson, padded(lesson.tokens), None, identity, segments=False)


@dataclass(frozen=True)
class Batches:
    """All batches of all epochs. A step is `accumulate` micro-batches of at most `budget` tokens; processes share them."""

    store: Store
    objective: Objective
    shape: Bucketed | Packed | Windows
    budget: int
    accumulate: int = 1
    seed: int = 0
    shuffled: bool = True
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.shape, Windows):
            total = len(self.store[self.objective.fields[0]].tokens)
            if total < self.shape.width + 1:
                raise ValueError(f"the text has {total} tokens, fewer than one window of {self.shape.width} and what follows "
                                 "it: give more text, or a smaller width")
            return
        for name, longest in zip(("text", "source"), self.sizes(), strict=False):
            limit = self.shape.width if isinstance(self.shape, Packed) else self.budget
            if len(longest) and int(longest.max()) > limit:
                raise ValueError(f"record {int(longest.argmax())} has a {name} of {int(longest.max())} tokens, a batch holds "
                                 f"{limit}: give larger batches, or leave longer texts out")

    @property
    def fixed(self) -> int | None:
        """Where all batches have one shape: the tokens in a row of texts, or 0 where rows are running text."""
        return self.shape.width if isinstance(self.shape, Packed) else 0 if isinstance(self.shape, Windows) else None

    @property
    def tokens(self) -> int:
        """The most in a step, padding included."""
        return self.budget * self.accumulate

    def sizes(self) -> tuple[Whole, ...]:
        return self.objective.sizes(tuple(self.store[field].lengths() for field in self.objective.fields))

    def plan(self, epoch: int) -> Iterator[list[list[Whole]]]:
        """The records of every step of an epoch, before anything is made of them."""
        chance = np.random.Generator(np.random.Philox([self.seed, epoch]))
        if isinstance(self.shape, Windows):
            total, width = len(self.store[self.objective.fields[0]].tokens), self.shape.width
            shift = int(chance.integers(min(width, total - width))) if self.shuffled else 0
            order = np.arange(shift, total - width, width)
            sizes: tuple[Whole, ...] = ()
        else:
            order, sizes = np.arange(len(self.store)), self.sizes()
        if self.shuffled:
            order = chance.permutation(order)
        step: list[list[Whole]] = []
        for micro in self.shape.plan(order, sizes, self.budget, chance if self.shuffled else _Still()):  # type: ignore[arg-type]
            step.append(micro)
            if len(step) == self.accumulate:
                yield step
                step = []
        if step:
            yield step

    def steps(self, place: tuple[int, int] = (0, 0)) -> Iterator[tuple[Place, list[Batch]]]:
        """From a place on, for ever: the place after each step, and this process's micro-batches of it."""
        epoch, skip = place
        while True:
            n = -1
            for n, step in enumerate(self.plan(epoch)):
                if n >= skip:
                    yield Place(epoch, n + 1), self.share(step, epoch, n)
            if n < 0:
                raise ValueError("there is nothing to train on: the source holds no record that fits")
            epoch, skip = epoch + 1, 0

    def once(self) -> Iterator[Batch]:
        """One epoch in its own order: for evaluation."""
        for n, step in enumerate(self.plan(0)):
            for batch in self.share(step, 0, n):
                if batch.tokens:
                    yield batch

    def share(self, step: list[list[Whole]], epoch: int, n: int) -> list[Batch]:
        """This process's part of a step. All have as many batches; who has none left over repeats one in silence."""
        out = [self.make(step[m], epoch, n, m) for m in range(self.rank, len(step), self.world)]
        if len(out) < -(-len(step) // self.world):
            out.append(self.make(step[0], epoch, n, 0).silent())
        return out

    def make(self, rows: list[Whole], epoch: int, n: int, m: int) -> Batch:
        chance = np.random.Generator(np.random.Philox([self.seed, epoch, n, m]))
        some = np.concatenate(rows)[:8].tolist()
        identity = f"epoch {epoch}, step {n} of it, micro-batch {m}: records {', '.join(map(str, some))}, …"
        return self.shape.make(self.store, self.objective, rows, self.budget, chance, identity)


def _filled(records: list[int], needs: list[list[int]], width: int) -> Iterator[list[int]]:
    """Rows of records, each in the fullest open row that has room for it; when many are open the fullest is closed."""
    rooms: dict[int, list[tuple[list[int], list[int]]]] = {}  # rows and what is left in them, by the least that is left
    bits, count = 0, 0                                        # which rooms there are, as the bits of a number

    def close(least: int) -> list[int]:
        nonlocal bits, count
        row, _ = rooms[least].pop()
        count -= 1
        if not rooms[least]:
            bits &= ~(1 << least)
        return row

    for record, need in zip(records, needs, strict=True):
        above = bits >> (most := max(need))
        if above:
            least = most + (above & -above).bit_length() - 1
            left = rooms[least][-1][1]
            row = close(least)
        else:
            if count == OPEN:
                yield close((bits & -bits).bit_length() - 1)
            row, left = [], [width] * len(need)
        row.append(record)
        left = [b - a for a, b in zip(need, left, strict=True)]
        least = min(left)
        rooms.setdefault(least, []).append((row, left))
        bits |= 1 << least
        count += 1
    while bits:
        yield close((bits & -bits).bit_length() - 1)


class _Still:
    """The order as it is."""

    def permutation(self, n: int) -> Whole:
        return np.arange(n)
