"""Workers on a Ray cluster, by Ray Data: each is an actor that is made once and then takes items."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from keepleft.cluster.connection import errors_in_one_line, ray_connection
from keepleft.cluster.resources import Resources, divide_cluster

MAX_RESTARTS = 5  # of a worker, and tries of its items: some kill whoever takes them
Rows = dict[str, Any]  # a list for each column


def map_on_workers(
    make: type[Callable[[Rows], Rows]],
    arguments: Callable[[Resources], dict[str, Any]],
    items: Sequence[Any],
    *,
    workers: int,
    gpus: float | None = 0.0,
    device: str | None = None,
    address: str | None = None,
    items_at_once: int = 1,
) -> Generator[dict[str, Any], None, None]:
    """Yield what the workers make of the items, as soon as it is there and in any order.

    `make(**arguments(resources))` is a worker; `gpus` and `device` are as in `divide_cluster`. It is called
    with {"item": [...]} of `items_at_once` items, and returns as many rows. Where a worker dies, another one
    is made, and its items are tried again. Raises ValueError if the cluster is too small, ConnectionError if
    there is none.
    """
    if not items:
        return
    with ray_connection(address) as ray:
        resources = divide_cluster(ray, count=workers, what="worker", gpus=gpus, device=device)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        # each a block of its own, or one worker would get them all
        dataset = ray.data.from_items([{"item": item} for item in items], override_num_blocks=len(items))
        results = dataset.map_batches(
            make,
            fn_constructor_kwargs=arguments(resources),
            batch_size=items_at_once,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(items))),
            num_cpus=resources.cpus,
            num_gpus=resources.gpus or None,
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,
        )
        with errors_in_one_line("a worker"):
            yield from results.iter_rows()
