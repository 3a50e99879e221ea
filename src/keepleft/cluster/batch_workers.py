"""A batch job on the workers of a Ray cluster, by Ray Data.

What goes through Ray are numbers of parts and reports: a worker reads its rows and writes its results itself,
so both must be where all workers see them. A worker that dies is started again, and its parts with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keepleft.batch.job import Job, Part
from keepleft.batch.worker import PARTS_AT_ONCE, PartReport, Worker
from keepleft.cluster.connection import check_resources, connected


class PartRunner:
    """The actor of a worker."""

    def __init__(self, job: Job, num_threads: int) -> None:
        self.parts = {part.number: part for part in job.parts}
        self.worker = Worker(job)
        self.threads = ThreadPoolExecutor(num_threads, "keepleft batch")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        reports = list(self.threads.map(self.worker.run, [self.parts[int(n)] for n in batch["number"]]))
        return {name: [getattr(report, name) for report in reports] for name in PartReport._fields}


def run_parts(
    job: Job,
    parts: Sequence[Part],
    *,
    workers: int,
    gpus_per_worker: float,
    address: str | None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Generator[PartReport, None, None]:
    """Run the parts, and yield a report as each is done.

    Raises ValueError if the cluster is too small, ConnectionError if there is none.
    """
    if not parts:
        return
    with connected(address) as ray:
        check_resources(ray, count=workers, what="workers", gpus=gpus_per_worker)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        numbers = [{"number": part.number} for part in parts]
        reports = ray.data.from_items(numbers, override_num_blocks=len(numbers)).map_batches(
            PartRunner,
            fn_constructor_kwargs={"job": job, "num_threads": PARTS_AT_ONCE},
            batch_size=PARTS_AT_ONCE,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(parts))),
            num_cpus=1,
            num_gpus=gpus_per_worker or None,
        )
        for row in reports.iter_rows():
            yield PartReport(**{name: int(row[name]) for name in PartReport._fields})
