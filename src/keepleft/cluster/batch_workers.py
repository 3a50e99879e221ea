"""A batch job on the workers of a Ray cluster.

What goes through Ray are numbers of parts and reports: a worker reads its rows and writes its results itself,
so both must be where all workers see them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

from keepleft.batch.job import Job, Part
from keepleft.batch.worker import PARTS_AT_ONCE, PartReport, Worker
from keepleft.cluster.workers import Rows, map_on_workers


class PartRunner:
    """The actor of a worker."""

    def __init__(self, job: Job) -> None:
        self.parts = {part.number: part for part in job.parts}
        self.worker = Worker(job)
        self.threads = ThreadPoolExecutor(PARTS_AT_ONCE, "keepleft batch")

    def __call__(self, rows: Rows) -> Rows:
        reports = list(self.threads.map(self.worker.run, [self.parts[int(n)] for n in rows["item"]]))
        return {name: [getattr(report, name) for report in reports] for name in PartReport._fields}


def run_parts(
    job: Job, parts: Sequence[Part], *, workers: int, gpus_per_worker: float, address: str | None
) -> Generator[PartReport, None, None]:
    """Run the parts, and yield a report as each is done. Errors as `map_on_workers`."""
    for row in map_on_workers(
        PartRunner,
        {"job": job},
        [part.number for part in parts],
        workers=workers,
        gpus=gpus_per_worker,
        address=address,
        items_at_once=PARTS_AT_ONCE,
    ):
        yield PartReport(**{name: int(row[name]) for name in PartReport._fields})
