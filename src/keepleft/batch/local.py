"""A batch job in this process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing

from keepleft.batch.job import Job, Part
from keepleft.batch.worker import PARTS_AT_ONCE, BatchWorker, PartReport


def run_parts(job: Job, parts: Sequence[Part]) -> Generator[PartReport, None, None]:
    """Run the parts, and yield a report as each is done."""
    if not parts:
        return
    with closing(BatchWorker(job)) as worker, ThreadPoolExecutor(PARTS_AT_ONCE, "keepleft batch") as threads:
        futures = [threads.submit(worker.run, part) for part in parts]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            worker.close()  # what runs ends with an error
            raise
