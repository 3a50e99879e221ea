"""Work in the background: the next few items of an iterator are made while this one is used."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import Empty, Full, Queue
from typing import TypeVar

from keepleft.data.batch import Batch
from keepleft.data.batches import Batches, Place

T = TypeVar("T")


def ahead(items: Iterable[T], depth: int = 4) -> Iterator[T]:
    """The same items, made by a thread up to `depth` ahead. What goes wrong there is raised here; closing ends the thread."""
    made: Queue[tuple[bool, T | BaseException | None]] = Queue(depth)
    done = threading.Event()

    def give(good: bool, item: T | BaseException | None) -> None:
        while not done.is_set():
            try:
                made.put((good, item), timeout=0.1)
            except Full:
                continue
            return

    def work() -> None:
        try:
            for item in items:
                give(True, item)
                if done.is_set():
                    return
        except BaseException as error:
            give(False, error)
        else:
            give(False, None)

    thread = threading.Thread(target=work, name="ahead", daemon=True)
    thread.start()
    try:
        while True:
            try:
                good, item = made.get(timeout=1.0)
            except Empty:
                if thread.is_alive():
                    continue
                raise RuntimeError("the thread that makes batches is gone") from None
            if good:
                yield item  # type: ignore[misc]
            elif item is None:
                return
            else:
                assert isinstance(item, BaseException)
                raise item
    finally:
        done.set()
        thread.join(timeout=5.0)


class Ahead:
    """Batches made in the background, and pinned where a GPU will fetch them."""

    def __init__(self, batches: Batches, depth: int = 4, *, pin: bool = False) -> None:
        self.batches, self.depth, self.pin = batches, depth, pin
        self.fixed, self.tokens = batches.fixed, batches.tokens

    def steps(self, place: tuple[int, int] = (0, 0)) -> Iterator[tuple[Place, list[Batch]]]:
        made = self.batches.steps(place)
        if self.pin:
            made = ((where, [batch.pinned() for batch in step]) for where, step in made)
        return ahead(made, self.depth)
