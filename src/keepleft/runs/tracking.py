"""The reports of a run, passed on to metrics.jsonl and to the trackers that the job names."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from keepleft.disk import atomic
from keepleft.models.design import to_json as write_design
from keepleft.runs.background_tracker import BackgroundTracker
from keepleft.runs.job import TrainJob
from keepleft.runs.metrics import MetricsFile
from keepleft.runs.prepare import TRACKING_FILE, ResolvedJob
from keepleft.runs.trackers import TrackedRun, Tracker, make_trackers
from keepleft.training.loop import TrainReport

FINISH_SECONDS = 30.0  # that the end of a run waits for its trackers


class Tracking:
    """All trackers of a run, from its first report on.

    metrics.jsonl is written at once; the others work in the background, and what they have to say comes from
    `take_notes`.
    """

    def __init__(
        self, job: TrainJob, resolved_job: ResolvedJob, further_trackers: Mapping[str, Tracker]
    ) -> None:
        self.folder = Path(job.out)
        self.config = tracked_config(job, resolved_job)
        trackers = {**make_trackers(job.track), **further_trackers}
        self.background = [BackgroundTracker(tracker, name) for name, tracker in trackers.items()]
        self.trackers: Sequence[Tracker] = [MetricsFile(), *self.background]
        self.has_started = False
        self.completed = False

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.has_started:
            return
        for tracker in self.trackers:
            tracker.finish(self.completed)
        deadline = time.monotonic() + FINISH_SECONDS
        for background_tracker in self.background:
            background_tracker.wait(deadline - time.monotonic())

    def add(self, report: TrainReport, *, completed: bool) -> None:
        """Pass a report on; `completed` says that it is the last of the whole run."""
        if not self.has_started:
            self.has_started = True
            run_id = _read_run_id(self.folder) if self.background else ""
            run = TrackedRun(self.folder, run_id, self.config, report.after, report.resumed_report)
            for tracker in self.trackers:
                tracker.start(run)
        self.completed = completed
        metrics = report.to_dict()
        for tracker in self.trackers:
            tracker.log(report.step, metrics)

    def take_notes(self) -> Iterator[str]:
        """Lines for the log: where metrics can be seen, and which tracker failed."""
        for tracker in self.background:
            yield from tracker.take_notes()


def tracked_config(job: TrainJob, resolved_job: ResolvedJob) -> dict[str, Any]:
    """What trackers show of a job: its options and what was resolved, by dotted names."""
    batch = {
        "tokens": resolved_job.micro_tokens * resolved_job.accumulate,
        "max_length": resolved_job.max_length,
        "pack": resolved_job.pack,
    }
    options = {
        name: getattr(job, name) for name in ("task", "size", "preset", "init_from", "lora", "minutes")
    }
    sections = {
        "recipe": asdict(resolved_job.recipe),
        "batch": batch,
        "design": write_design(resolved_job.design),
    }
    return dict(_flatten("", {**options, **sections}))


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        if value is not None:
            yield prefix, value if isinstance(value, int | float | str) else json.dumps(value)
        return
    for name, part in value.items():
        yield from _flatten(f"{prefix}.{name}" if prefix else str(name), part)


def _read_run_id(folder: Path) -> str:
    """The name that trackers know a run by: made up once, and kept in the run folder."""
    path = folder / TRACKING_FILE
    if path.exists():
        return str(json.loads(path.read_text("utf-8"))["run_id"])
    run_id = uuid4().hex[:12]
    atomic.write_text(path, json.dumps({"run_id": run_id}) + "\n")
    return run_id
