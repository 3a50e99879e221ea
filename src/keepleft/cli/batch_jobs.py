"""Batch jobs of generate, translate, summarize, classify, score, embed: files in, a folder of results out."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepleft.cli.progress import Bar

if TYPE_CHECKING:
    from keepleft.batch.job import Job, Part
    from keepleft.batch.tasks import TaskSpec
    from keepleft.batch.worker import PartReport

MAX_SHOWN_FAILURES = 3


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """The options of a batch job, which --input with a pattern or a .jsonl, .parquet or .gz file asks for.

    Args:
        workers: run a batch job on this many workers, by Ray. Without, it runs in this process
        gpus_per_worker: GPUs of each worker. If not given, they share what there is
        address: the Ray cluster of the workers: auto, HOST:PORT or ray://HOST:PORT. If not given, Ray is
            started on this machine
        field: the field of .jsonl and .parquet files that has the text
        id_field: the field that has the id of a row; rows without one are numbered
        in_order: also write all results into one file, results.jsonl, in the order of the rows
        retry_failed: do the parts again that have rows which failed
    """

    workers: int | None = None
    gpus_per_worker: float | None = None
    address: str | None = None
    field: str = "text"
    id_field: str = "id"
    in_order: bool = False
    retry_failed: bool = False


def is_batch_job(input: str | None, output: str | None, job: BatchFlags) -> bool:
    """Whether the files are for a batch job: not one plain file of texts in, and one out.

    Raises ValueError for options of a batch job without one.
    """
    if _asks_for_batch_job(input, output, job):
        return True
    if job != BatchFlags():
        raise ValueError(
            "--field, --id-field and --gpus-per-worker are for batch jobs: give --input with a pattern, or "
            "with a .jsonl, .parquet or .gz file"
        )
    return False


def _asks_for_batch_job(input: str | None, output: str | None, job: BatchFlags) -> bool:
    if job.workers is not None or job.address is not None or job.in_order or job.retry_failed:
        return True
    if input in (None, "", "-"):
        return False
    assert input is not None
    from keepleft.batch import storage

    is_folder = output is not None and (output.endswith("/") or Path(output).is_dir())
    is_plain = Path(input).exists() or not (storage.is_remote(input) or storage.has_wildcard(input))
    return is_folder or not is_plain or input.endswith((".jsonl", ".parquet", ".gz"))


def refuse_batch_size(batch_size: int | None) -> None:
    """Raise ValueError if one was given."""
    if batch_size is not None:
        raise ValueError("--batch-size is not for batch jobs: their engine fills its batch by itself")


def run_batch_job(
    spec: TaskSpec, texts: Sequence[str], input: str | None, output: str | None, job_flags: BatchFlags
) -> int:
    """Run a batch job, or go on with the one that is in the folder. Returns 1 if every row failed."""
    if texts or input in (None, "", "-"):
        raise ValueError("a batch job reads files: give them with --input, as in --input 'texts/*.jsonl'")
    if output in (None, "", "-"):
        raise ValueError("a batch job writes a folder of results: name it with --output")
    assert input is not None
    assert output is not None
    _check_workers(job_flags)
    from keepleft.batch.job import finish_job, make_job

    start = time.monotonic()
    job = make_job(spec, [input], output, field=job_flags.field, id_field=job_flags.id_field)
    missing = job.missing_parts(retry_failed=job_flags.retry_failed)
    num_missing = sum(part.num_rows for part in missing)
    num_done = job.num_rows - num_missing
    if num_done:
        what = f"{num_done:,} of {job.num_rows:,} rows are" if missing else "all rows are"
        print(f"{what} done already" + ("; going on with the others" if missing else ""), file=sys.stderr)
    with Bar("rows", job.num_rows) as bar, closing(_run(job, missing, job_flags)) as reports:
        num_failed = 0
        done = num_done
        bar.update(done, "")
        for report in reports:
            done += report.num_rows
            num_failed += report.num_failed
            bar.update(done, f"{num_failed:,} failed" if num_failed else "")
    seconds = time.monotonic() - start
    report_fields = finish_job(job, seconds=seconds, num_done_before=num_done, in_order=job_flags.in_order)
    _print_report(report_fields, num_missing, output)
    return 1 if report_fields["rows"] and report_fields["failed"] == report_fields["rows"] else 0


def _check_workers(job_flags: BatchFlags) -> None:
    if job_flags.workers is not None and job_flags.workers < 1:
        raise ValueError(f"--workers is {job_flags.workers}: give at least 1, or leave it out")
    if job_flags.gpus_per_worker is not None and job_flags.gpus_per_worker < 0:
        raise ValueError(f"--gpus-per-worker is {job_flags.gpus_per_worker:g}: give 0 or more")
    needs_workers = job_flags.address is not None or job_flags.gpus_per_worker is not None
    if job_flags.workers is None and needs_workers:
        raise ValueError("--address and --gpus-per-worker are for workers: say how many with --workers")


def _run(job: Job, parts: Sequence[Part], job_flags: BatchFlags) -> Generator[PartReport, None, None]:
    if job_flags.workers is None:
        from keepleft.batch import local

        return local.run_parts(job, parts)
    from keepleft.cluster.batch_workers import run_parts

    return run_parts(
        job,
        parts,
        workers=job_flags.workers,
        gpus_per_worker=job_flags.gpus_per_worker,
        address=job_flags.address,
    )


def _print_report(report: dict[str, Any], num_new: int, output: str) -> None:
    speed = f", {num_new / report['seconds']:,.1f} rows/s" if num_new and report["seconds"] else ""
    print(
        f"{report['rows']:,} rows, {report['tokens']:,} tokens; {num_new:,} rows in "
        f"{report['seconds']:,.1f} s{speed}",
        file=sys.stderr,
    )
    if report["failed"]:
        rows, them = ("row", "it") if report["failed"] == 1 else ("rows", "them")
        print(f"{report['failed']:,} {rows} failed; {output}/report.json names {them}:", file=sys.stderr)
        for failure in report["failures"][:MAX_SHOWN_FAILURES]:
            print(f"  {failure['file']}:{failure['line']}: {failure['error']}", file=sys.stderr)
    print(output)
