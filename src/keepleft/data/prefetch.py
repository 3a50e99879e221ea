"""Background prefetching: a thread prepares the next few items of an iterator."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import Empty, Full, Queue
from typing import TypeVar

from keepleft.data.batch import Batch
from keepleft.data.batches import BatchCursor, Batches

T = TypeVar("T")


def prefetch(items: Iterable[T], depth: int = 4) -> Iterator[T]:
    """The same items, prepared by a thread up to `depth` ahead.

    An exception in the thread is raised here; closing the generator ends the thread.
    """
    queue: Queue[tuple[bool, T | BaseException | None]] = Queue(depth)
    stop = threading.Event()

    def put(is_item: bool, item: T | BaseException | None) -> None:
        while not stop.is_set():
            try:
                queue.put((is_item, item), timeout=0.1)
            except Full:
                continue
            return

    def produce() -> None:
        try:
            for item in items:
                put(True, item)
                if stop.is_set():
                    return
        except BaseException as error:
            put(False, error)
        else:
            put(False, None)

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            try:
                is_item, item = queue.get(timeout=1.0)
            except Empty:
                if thread.is_alive():
                    continue
                raise RuntimeError("the prefetch thread has died") from None
            if is_item:
                yield item  # type: ignore[misc]
            elif item is None:
                return
            else:
                assert isinstance(item, BaseException)
                raise item
    finally:
        stop.set()
        thread.join(timeout=5.0)


class PrefetchedBatches:
    """Batches prepared in the background, in pinned memory where `pin` says so."""

    def __init__(self, batches: Batches, depth: int = 4, *, pin: bool = False) -> None:
        self.batches = batches
        self.depth = depth
        self.pin = pin
        self.fixed_width = batches.fixed_width
        self.tokens = batches.tokens

    def steps(self, cursor: tuple[int, int] = (0, 0)) -> Iterator[tuple[BatchCursor, list[Batch]]]:
        steps = self.batches.steps(cursor)
        if self.pin:
            steps = ((next_cursor, [batch.pin_memory() for batch in step]) for next_cursor, step in steps)
        return prefetch(steps, self.depth)
