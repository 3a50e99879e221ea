"""Work in a thread that ends with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def run_in_own_thread(function: Callable[[], Result]) -> Result:
    """What a function gives, worked out in a thread of its own; its errors too.

    OpenMP keeps a team of helpers for every thread that ever computed with several. Two teams on the same cores do not wait for
    work actively any more, and the small steps of an engine take half as long again. So whoever loads a model does it in a
    thread that takes its team along when it ends, and the engine's team is the only one.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="keepleft setup", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
