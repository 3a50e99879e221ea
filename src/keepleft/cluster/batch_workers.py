"""A batch job on the workers of a Ray cluster.

What goes through Ray are numbers of parts and reports: a worker reads its rows and writes its results itself,
so both must be where all workers see them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

from keepleft.batch.job import Job, Part
from keepleft.batch.worker import PARTS_AT_ONCE, BatchWorker, PartReport
from keepleft.cluster.workers import Rows, map_on_workers


class PartRunner:
    """The actor of a worker."""

    def __init__(self, job: Job, memory_share: float) -> None:
        self.parts = {part.number: part for part in job.parts}
        self.worker = BatchWorker(job, memory_share)
        self.threads = ThreadPoolExecutor(PARTS_AT_ONCE, "keepleft batch")

    def __call__(self, rows: Rows) -> Rows:
        outcomes = list(self.threads.map(self._run, [self.parts[int(n)] for n in rows["item"]]))
        return {"report": [list(report) for report, _ in outcomes], "error": [error for _, error in outcomes]}

    def _run(self, part: Part) -> tuple[PartReport, str]:
        """The report of a part, and what went wrong: Ray would wrap an error, and lose it."""
        try:
            return self.worker.run(part), ""
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) else None
            return PartReport(part.number, 0, 0, 0), reason or str(error) or type(error).__name__


def run_parts(
    job: Job, parts: Sequence[Part], *, workers: int, gpus_per_worker: float | None, address: str | None
) -> Generator[PartReport, None, None]:
    """Run the parts, and yield a report as each is done.

    Raises OSError with what a worker could not do, and what `map_on_workers` raises.
    """
    for row in map_on_workers(
        PartRunner,
        lambda resources: {"job": job, "memory_share": resources.memory_share},
        [part.number for part in parts],
        workers=workers,
        gpus=gpus_per_worker,
        device=job.spec.device,
        address=address,
        items_at_once=PARTS_AT_ONCE,
    ):
        if row["error"]:
            raise OSError(row["error"])
        yield PartReport(*map(int, row["report"]))
