"""Deterministic, resumable batches: their order is a function of seed, epoch and settings alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from keepleft.data.batch import Batch, collate
from keepleft.data.objectives import Examples, Objective
from keepleft.data.packing import PackedLayout
from keepleft.data.ragged import IntArray, Ragged, pad_layout
from keepleft.data.teacher_forcing import shift_right
from keepleft.data.token_store import TokenStore

SORT_POOL_SIZE = 1 << 16  # records sorted by length together


class BatchCursor(NamedTuple):
    """How far a run has come: an epoch, and steps taken within it."""

    epoch: int = 0
    step: int = 0


class BatchLayout(Protocol):
    """How records become rectangles of at most `budget` tokens, padding included."""

    def plan(
        self, order: IntArray, sizes: tuple[IntArray, ...], budget: int, rng: np.random.Generator
    ) -> Iterator[list[IntArray]]:
        """The records of each micro-batch: one array for each packed row, or a single array."""
        ...

    def make_batch(
        self,
        store: TokenStore,
        objective: Objective,
        rows: list[IntArray],
        budget: int,
        rng: np.random.Generator,
        identity: str,
    ) -> Batch: ...


@dataclass(frozen=True)
class BucketedLayout:
    """Sequences of similar length together, one in each row.

    `pad_to_multiple_of` rounds widths up; `fixed_height` gives all batches of one width the same height.
    """

    pad_to_multiple_of: int = 1
    fixed_height: bool = False

    def padded_width(self, size: int) -> int:
        return -(-size // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def plan(
        self, order: IntArray, sizes: tuple[IntArray, ...], budget: int, rng: np.random.Generator
    ) -> Iterator[list[IntArray]]:
        for begin in range(0, len(order), SORT_POOL_SIZE):
            pool = order[begin : begin + SORT_POOL_SIZE]
            max_sizes = np.max([size[pool] for size in sizes], axis=0)
            pool = pool[np.lexsort((*(size[pool] for size in sizes[1:]), sizes[0][pool], max_sizes))]
            max_sizes = np.max([size[pool] for size in sizes], axis=0).tolist()
            buckets, start = [], 0
            for n, size in enumerate(max_sizes):
                if n > start and (n + 1 - start) * self.padded_width(size) > budget:
                    buckets.append(pool[start:n])
                    start = n
            buckets.append(pool[start:])
            for n in rng.permutation(len(buckets)):
                yield [buckets[n]]

    def make_batch(
        self,
        store: TokenStore,
        objective: Objective,
        rows: list[IntArray],
        budget: int,
        rng: np.random.Generator,
        identity: str,
    ) -> Batch:
        examples = objective.examples(tuple(store[field].take(rows[0]) for field in objective.fields), rng)
        sequences = [examples.tokens] if examples.source is None else [examples.tokens, examples.source]
        widths = [self.padded_width(int(sequence.lengths.max(initial=1))) for sequence in sequences]
        height = None
        if self.fixed_height:
            widths = [max(widths)] * len(widths)
            height = max(budget // widths[0], len(rows[0]))
        layouts = [
            pad_layout(sequence, width=width, rows=height)
            for sequence, width in zip(sequences, widths, strict=True)
        ]
        return collate(examples, layouts[0], layouts[1] if len(layouts) > 1 else None, identity)


@dataclass(frozen=True)
class WindowLayout:
    """Running text cut into windows of one width, regardless of record boundaries."""

    width: int

    def plan(
        self, order: IntArray, sizes: tuple[IntArray, ...], budget: int, rng: np.random.Generator
    ) -> Iterator[list[IntArray]]:
        height = max(1, budget // self.width)
        for begin in range(0, len(order), height):
            yield [order[begin : begin + height]]

    def make_batch(
        self,
        store: TokenStore,
        objective: Objective,
        rows: list[IntArray],
        budget: int,
        rng: np.random.Generator,
        identity: str,
    ) -> Batch:
        tokens = store[objective.fields[0]].tokens
        windows = np.stack([tokens[begin : begin + self.width + 1] for begin in rows[0].tolist()]).astype(
            np.int64
        )
        targets = Ragged(windows[:, 1:].reshape(-1), np.full(len(windows), self.width))
        examples = Examples(*shift_right(windows[:, 0], targets))
        return collate(examples, pad_layout(examples.tokens), None, identity, segments=False)


@dataclass(frozen=True)
class Batches:
    """The batches of all epochs.

    A step is `accumulate` micro-batches of at most `budget` tokens, dealt out to `world_size` processes.
    """

    store: TokenStore
    objective: Objective
    layout: BucketedLayout | PackedLayout | WindowLayout
    budget: int
    accumulate: int = 1
    seed: int = 0
    shuffle: bool = True
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.layout, WindowLayout):
            total = len(self.store[self.objective.fields[0]].tokens)
            if total < self.layout.width + 1:
                raise ValueError(
                    f"the text has {total} tokens, fewer than one window of {self.layout.width} and the "
                    "token after it: give more text, or a smaller --batch.max-length"
                )
            return
        for name, record_sizes in zip(("text", "source"), self.sizes(), strict=False):
            limit = self.layout.width if isinstance(self.layout, PackedLayout) else self.budget
            if len(record_sizes) and int(record_sizes.max()) > limit:
                raise ValueError(
                    f"record {int(record_sizes.argmax())} has a {name} of {int(record_sizes.max())} tokens, "
                    f"a batch holds {limit}: give larger batches, or leave longer texts out"
                )

    @property
    def fixed_width(self) -> int | None:
        """The row width of packed batches, 0 for windows of running text, None where shapes vary."""
        if isinstance(self.layout, PackedLayout):
            return self.layout.width
        return 0 if isinstance(self.layout, WindowLayout) else None

    @property
    def tokens(self) -> int:
        """The most tokens in a step, padding included."""
        return self.budget * self.accumulate

    def sizes(self) -> tuple[IntArray, ...]:
        """The most tokens that each record takes, as target and, where there is one, as source."""
        return self.objective.sizes(tuple(self.store[field].lengths() for field in self.objective.fields))

    def plan(self, epoch: int) -> Iterator[list[list[IntArray]]]:
        """The record numbers of every step of an epoch."""
        rng = np.random.Generator(np.random.Philox([self.seed, epoch]))
        if isinstance(self.layout, WindowLayout):
            total, width = len(self.store[self.objective.fields[0]].tokens), self.layout.width
            offset = int(rng.integers(min(width, total - width))) if self.shuffle else 0
            order = np.arange(offset, total - width, width)
            sizes: tuple[IntArray, ...] = ()
        else:
            order, sizes = np.arange(len(self.store)), self.sizes()
        if self.shuffle:
            order = rng.permutation(order)
        step: list[list[IntArray]] = []
        bucket_rng = rng if self.shuffle else _NoShuffle()
        for micro_batch in self.layout.plan(order, sizes, self.budget, bucket_rng):  # type: ignore[arg-type]
            step.append(micro_batch)
            if len(step) == self.accumulate:
                yield step
                step = []
        if step:
            yield step

    def steps(self, cursor: tuple[int, int] = (0, 0)) -> Iterator[tuple[BatchCursor, list[Batch]]]:
        """Endless, from a cursor on: the cursor after each step, and this process's micro-batches."""
        epoch, skip = cursor
        while True:
            n = -1
            for n, step in enumerate(self.plan(epoch)):
                if n >= skip:
                    yield BatchCursor(epoch, n + 1), self.shard(step, epoch, n)
            if n < 0:
                raise ValueError("there is nothing to train on: the source holds no record that fits")
            epoch, skip = epoch + 1, 0

    def one_epoch(self) -> Iterator[Batch]:
        """The batches of epoch 0, once: for evaluation."""
        for n, step in enumerate(self.plan(0)):
            for batch in self.shard(step, 0, n):
                if batch.tokens:
                    yield batch

    def shard(self, step: list[list[IntArray]], epoch: int, n: int) -> list[Batch]:
        """This process's micro-batches of a step.

        Every process gets the same number; one that is a batch short repeats the first without targets.
        """
        out = [self.make_batch(step[m], epoch, n, m) for m in range(self.rank, len(step), self.world_size)]
        if len(out) < -(-len(step) // self.world_size):
            out.append(self.make_batch(step[0], epoch, n, 0).without_targets())
        return out

    def make_batch(self, rows: list[IntArray], epoch: int, n: int, m: int) -> Batch:
        rng = np.random.Generator(np.random.Philox([self.seed, epoch, n, m]))
        first_records = np.concatenate(rows)[:8].tolist()
        identity = (
            f"epoch {epoch}, step {n} of it, micro-batch {m}: records {', '.join(map(str, first_records))}, …"
        )
        return self.layout.make_batch(self.store, self.objective, rows, self.budget, rng, identity)


class _NoShuffle:
    """Stands in for a random generator and leaves the order as it is."""

    def permutation(self, n: int) -> IntArray:
        return np.arange(n)
