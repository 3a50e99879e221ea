"""A worker of a batch job: it loads the model once, and turns parts of the job into files of results."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from keepleft.batch.job import Job, Part, row_records
from keepleft.batch.rows import RowReader
from keepleft.batch.tasks import LoadedTask

PARTS_AT_ONCE = 2  # of a worker: while the last rows of one are finished, those of the next fill the batch


class PartReport(NamedTuple):
    """What has become of a part."""

    number: int
    num_rows: int
    num_failed: int
    num_tokens: int


class BatchWorker:
    """`run` may be called from several threads. `memory_share` is as in `plan_capacity`."""

    def __init__(self, job: Job, memory_share: float = 1.0) -> None:
        self.job = job
        self.reader = RowReader(job.field, job.id_field)
        self.reader_lock = threading.Lock()
        self.task = LoadedTask(job.spec, memory_share)

    def run(self, part: Part) -> PartReport:
        """Write the results of a part."""
        with self.reader_lock:
            rows = self.job.read_part(part, self.reader)
        readable = [n for n, row in enumerate(rows) if row.error is None]
        done = self.task.run([rows[n].text for n in readable], [part.first_row + n for n in readable])
        result_by_row: dict[int, dict[str, Any]] = dict(zip(readable, done, strict=True))
        results = [result_by_row.get(n) or {"error": row.error} for n, row in enumerate(rows)]
        self.job.write_part(part, row_records(rows, part.first_row, results))
        return PartReport(
            part.number,
            len(rows),
            sum("error" in result for result in results),
            sum(result.get("num_tokens", 0) for result in results),
        )

    def close(self) -> None:
        self.task.close()
