"""A batch job on disk: what it is, its parts, and which of them are done.

The rows of all files are cut into parts. The results of a part are one file, written completely or not at
all: a worker that dies loses its part and nothing else, and a job that was stopped goes on with the parts
that are missing. Parts are numbered in the order of the rows: sorted by name, the files are in that order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from secrets import randbits
from typing import Any, NamedTuple

from keepleft import __version__
from keepleft.batch import storage
from keepleft.batch.rows import ID_FIELD, TEXT_FIELD, Row, RowReader, check_field, count_rows
from keepleft.batch.tasks import TaskSpec
from keepleft.disk.fingerprint import fingerprint

JOB_NAME = "job.json"
REPORT_NAME = "report.json"
PART_PREFIX = "part-"
ORDERED_NAME = "results.jsonl"
PARTS_PER_JOB = 64  # at least, where the rows are enough: so many workers have something to do
MIN_PART_ROWS = 64  # fewer do not fill the engine's batch
MAX_PART_ROWS = 512  # what a dead worker may lose
MAX_PARTS = 10_000  # files in the folder, however many rows there are
MAX_REPORTED_FAILURES = 100
VERSION_FIELD = "keepleft"
SEED_BITS = 48


class Slice(NamedTuple):
    """A range of rows of one file."""

    path: str
    start: int
    num_rows: int


class Part(NamedTuple):
    """Rows that one worker takes at a time; `first_row` is the number of the first one in the job."""

    number: int
    first_row: int
    slices: tuple[Slice, ...]

    @property
    def name(self) -> str:
        return f"{PART_PREFIX}{self.number:06d}.jsonl"

    @property
    def num_rows(self) -> int:
        return sum(piece.num_rows for piece in self.slices)

    def locate(self, n: int) -> tuple[str, int]:
        """The file of the part's row `n`, and its line there, counted from 1."""
        for piece in self.slices:
            if n < piece.num_rows:
                return piece.path, piece.start + n + 1
            n -= piece.num_rows
        raise IndexError(n)


@dataclass(frozen=True)
class Job:
    """`files`: paths with their number of rows; `field`, `id_field`: where a row has its text and its id."""

    spec: TaskSpec
    files: tuple[tuple[str, int], ...]
    output: str
    field: str = TEXT_FIELD
    id_field: str = ID_FIELD

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.files)

    @cached_property
    def parts(self) -> list[Part]:
        return list(_cut(self.files, part_rows(self.num_rows)))

    def path(self, name: str) -> str:
        return storage.join(self.output, name)

    def missing_parts(self, *, retry_failed: bool = False) -> list[Part]:
        """The parts that are not done yet; with `retry_failed` also those with rows that failed."""
        names = set(storage.names_in(self.output))
        return [
            part
            for part in self.parts
            if part.name not in names or (retry_failed and self._has_failures(part))
        ]

    def _has_failures(self, part: Part) -> bool:
        lines = storage.read_file(self.path(part.name)).splitlines()
        return any("error" in json.loads(line) for line in lines)

    def read_part(self, part: Part, reader: RowReader) -> list[Row]:
        return [row for piece in part.slices for row in reader.read(*piece)]

    def write_part(self, part: Part, records: Sequence[dict[str, Any]]) -> None:
        lines = (f"{json.dumps(record, ensure_ascii=False)}\n".encode() for record in records)
        storage.write_file(self.path(part.name), lines)

    def describe(self) -> dict[str, Any]:
        """What makes it this job: another description gives other results."""
        spec = asdict(self.spec)
        del spec["device"]
        spec["options"] = {name: value for name, value in spec["options"].items() if value is not None}
        return {
            VERSION_FIELD: __version__,
            **spec,
            "model_fingerprint": _model_fingerprint(self.spec.model),
            "files": [[*file, storage.fingerprint(file[0])] for file in self.files],
            "part_rows": part_rows(self.num_rows),
            "field": self.field,
            "id_field": self.id_field,
        }


def make_job(
    spec: TaskSpec, patterns: Sequence[str], output: str, *, field: str = TEXT_FIELD, id_field: str = ID_FIELD
) -> Job:
    """Look at the files, and start a job in the folder `output` or go on with the one that is there.

    Without results in it, it becomes this job. Raises ValueError if a file cannot be read, FileExistsError if
    something else is in the folder.
    """
    spec = replace(spec, model=storage.absolute(spec.model))  # workers have folders of their own
    output = storage.absolute(output, may_be_missing=True)
    paths = list(dict.fromkeys(path for pattern in patterns for path in storage.list_files(pattern)))
    paths = [storage.absolute(path) for path in paths]
    files = tuple((path, count_rows(path, field)) for path in paths)
    for path, _ in files:
        check_field(path, field)
    storage.make_folder(output)
    names = storage.names_in(output)
    if any(name.startswith(PART_PREFIX) for name in names) and JOB_NAME in names:
        saved = json.loads(storage.read_file(storage.join(output, JOB_NAME)))
        spec = _with_seed(spec, saved["options"]["seed"])
        job = Job(spec, files, output, field, id_field)
        _check_same_job(output, saved, json.loads(json.dumps(job.describe())))
        return job
    if others := [name for name in names if name not in (JOB_NAME, REPORT_NAME)]:
        raise FileExistsError(
            f"{output} has other files in it, such as {others[0]}: give a new folder with --output"
        )
    job = Job(_with_seed(spec, randbits(SEED_BITS)), files, output, field, id_field)
    storage.write_file(job.path(JOB_NAME), [f"{json.dumps(job.describe(), indent=2)}\n".encode()])
    return job


def part_rows(num_rows: int) -> int:
    """Rows of a part. It depends on nothing but their number: a job goes on with other workers too."""
    count = min(max(num_rows // PARTS_PER_JOB, MIN_PART_ROWS), MAX_PART_ROWS)
    return max(count, -(-num_rows // MAX_PARTS))


def row_records(
    rows: Sequence[Row], first_row: int, results: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What is written of each row: its id, its text, and the result or the error."""
    return [
        {"id": first_row + n if row.id is None else row.id, "input": row.text, **result}
        for n, (row, result) in enumerate(zip(rows, results, strict=True))
    ]


def finish_job(job: Job, *, seconds: float, num_done_before: int, in_order: bool) -> dict[str, Any]:
    """Write the report, and with `in_order` all results in one file; returns the report."""
    num_rows = num_failed = num_tokens = 0
    failures: list[dict[str, Any]] = []
    for part in job.parts:
        lines = storage.read_file(job.path(part.name)).splitlines()
        if len(lines) != part.num_rows:
            raise ValueError(
                f"{job.path(part.name)} has {len(lines)} rows of {part.num_rows}: delete it, and give the "
                "command again"
            )
        for n, line in enumerate(lines):
            record = json.loads(line)
            num_rows += 1
            num_tokens += record.get("num_tokens", 0)
            if "error" in record:
                num_failed += 1
                if len(failures) < MAX_REPORTED_FAILURES:
                    path, number = part.locate(n)
                    failures.append(
                        {"id": record["id"], "file": path, "line": number, "error": record["error"]}
                    )
    if in_order:
        storage.write_file(
            job.path(ORDERED_NAME), (storage.read_file(job.path(part.name)) for part in job.parts)
        )
    report = {
        "task": job.spec.task,
        "model": job.spec.model,
        "rows": num_rows,
        "failed": num_failed,
        "tokens": num_tokens,
        "seconds": round(seconds, 3),
        "rows_done_before": num_done_before,
        "failures": failures,
    }
    text = json.dumps(report, indent=2, ensure_ascii=False)
    storage.write_file(job.path(REPORT_NAME), [f"{text}\n".encode()])
    return report


def _cut(files: Sequence[tuple[str, int]], size: int) -> Iterator[Part]:
    slices: list[Slice] = []
    number = first_row = num_rows = 0
    for path, count in files:
        start = 0
        while start < count:
            taken = min(size - num_rows, count - start)
            slices.append(Slice(path, start, taken))
            start += taken
            num_rows += taken
            if num_rows == size:
                yield Part(number, first_row, tuple(slices))
                number, first_row, num_rows, slices = number + 1, first_row + num_rows, 0, []
    if slices:
        yield Part(number, first_row, tuple(slices))


def _with_seed(spec: TaskSpec, seed: int) -> TaskSpec:
    """With this seed if the user has given none: a job has one, so that it can go on where it was."""
    if spec.options.seed is not None:
        return spec
    return replace(spec, options=replace(spec.options, seed=seed))


def _check_same_job(output: str, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise FileExistsError, naming the difference, unless the folder has this very job."""
    if changed := _first_change(saved.get("files"), wanted["files"]):
        raise FileExistsError(f"{output} has the results of another job: {changed}; give another --output")
    for name in wanted:
        if name != VERSION_FIELD and saved.get(name) != wanted[name]:
            raise FileExistsError(
                f"{output} has the results of another job: its {name} is {_short(saved.get(name))}, and this "
                f"one's {_short(wanted[name])}; give another --output"
            )


def _first_change(saved: Any, wanted: list[list[Any]]) -> str:
    """How the input files differ from those of the job; empty where they do not."""
    before = {name: rest for name, *rest in saved} if isinstance(saved, list) else {}
    for name, *rest in wanted:
        if name not in before:
            return f"{name} was not among its files"
        if before.pop(name) != rest:
            return f"{name} has changed since"
    return f"{next(iter(before))} was among its files" if before else ""


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def _model_fingerprint(model: str) -> str:
    """Of the files of a model: another one under the same path is noticed."""
    path = Path(model)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256("".join(f"{file.name} {fingerprint(file)}\n" for file in files).encode())
    return digest.hexdigest()
