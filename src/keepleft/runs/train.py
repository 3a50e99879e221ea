"""Run a training job, from plain files to a model directory, as a generator of events.

runs/NAME/config.yaml     the job as it was given
runs/NAME/resolved.json   what was chosen from the data: design, recipe, labels
runs/NAME/data/           the token stores
runs/NAME/metrics.jsonl   one line for each report
runs/NAME/checkpoints/    training checkpoints, to resume from
runs/NAME/model/          the result, a model directory
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from keepleft.data.prefetch import PrefetchedBatches
from keepleft.disk import atomic
from keepleft.runs import prepare, save_model
from keepleft.runs.audit_verdict import audit_before_training
from keepleft.runs.dataset import ProgressCallback, Tokenizers, no_progress
from keepleft.runs.job import TrainJob
from keepleft.runs.metrics import plot_loss, read_best_measures, restore_lines
from keepleft.runs.model_card import make_card, write_card
from keepleft.runs.next_commands import example_text, next_commands
from keepleft.runs.plan import TrainingPlan
from keepleft.runs.prepare import RESOLVED_FILE, ResolvedJob
from keepleft.runs.set_up import CHECKPOINTS_FOLDER, TrainingSetup, set_up_training
from keepleft.runs.trackers import Tracker
from keepleft.runs.tracking import Tracking
from keepleft.runs.validate import validate_job
from keepleft.runs.validation_metrics import make_measure
from keepleft.training import checkpoint
from keepleft.training.distributed import DistributedContext, init_distributed
from keepleft.training.loop import TrainReport, train


@dataclass(frozen=True)
class TrainingStarted:
    """Everything is prepared; reports follow."""

    steps: int


@dataclass(frozen=True)
class TrainingFinished:
    """The result of a run, its last event."""

    folder: Path
    summary: str
    stopped: bool  # before the end, to be resumed: there is no model directory yet
    measures: dict[str, float]  # of the best evaluation
    next_commands: list[str]  # to try the model, or to go on training


# a str is a line for the log
TrainEvent = str | TrainingPlan | TrainingStarted | TrainReport | TrainingFinished


def run_job(
    job: TrainJob,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_progress: ProgressCallback = no_progress,
    trackers: Mapping[str, Tracker] = MappingProxyType({}),
    start_time: float | None = None,
) -> Iterator[TrainEvent]:
    """Train a model from a job's data and write it to the run folder `job.out`.

    With `resume`, a run that has checkpoints continues exactly where it stopped. `stop` is called after each
    step; if it returns True, a checkpoint is saved and the run ends. `on_progress` reports the work before
    training. `trackers` get the reports besides those that the job names. `start_time` is when the minutes of
    the job began, by the monotonic clock; now, if not given. Raises before any data is read if the job is
    invalid; a start that fails leaves no files behind.
    """
    out = Path(job.out)
    distributed = init_distributed(job.parallel, job.device)
    created_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        validate_job(job)
        with (
            atomic.explain_os_error(f"the run {out}"),
            atomic.lock_folder(out) if distributed.rank == 0 else nullcontext(),
        ):
            try:
                audit = audit_before_training if job.audit else None
                setup = yield from set_up_training(
                    job, distributed, on_progress, resume=resume, audit=audit, start_time=start_time
                )
            except BaseException:
                if created_folders and distributed.rank == 0:  # remove what the failed start has created
                    atomic.remove_folder(out)
                    with suppress(OSError):  # others may have put something there since
                        for folder in created_folders[1:]:
                            folder.rmdir()
                raise
            yield from _train(setup, out, distributed, stop, trackers)
    finally:
        distributed.destroy()


def plan_job(
    job: TrainJob, *, resume: bool = False, on_progress: ProgressCallback = no_progress
) -> Iterator[str | TrainingPlan]:
    """What `run_job` would say and plan, up to the first step. Writes nothing but temporary files.

    Raises what `run_job` would raise until then, except for an audit, which is not made.
    """
    out = Path(job.out)
    distributed = init_distributed(job.parallel, job.device)
    try:
        if distributed.world_size > 1:
            raise ValueError("a plan is made by one process: leave torchrun out")
        validate_job(job)
        with tempfile.TemporaryDirectory(prefix="keepleft-") as temporary_folder:
            is_prepared = resume and (out / RESOLVED_FILE).exists()
            planned_job = job if is_prepared else replace(job, out=temporary_folder)
            yield from set_up_training(
                planned_job, distributed, on_progress, resume=resume, audit=None, planned_folder=out
            )
    finally:
        distributed.destroy()


def _train(
    setup: TrainingSetup,
    out: Path,
    distributed: DistributedContext,
    stop: Callable[[], bool],
    trackers: Mapping[str, Tracker],
) -> Iterator[TrainEvent]:
    """Train, log the reports, and write the model directory unless `stop` ended the run."""
    job = setup.job
    resolved_job = setup.resolved_job
    tokenizers = setup.tokenizers
    batches = setup.batches.training
    validation = setup.batches.validation
    if distributed.rank == 0:
        yield TrainingStarted(resolved_job.recipe.steps)
    measure = None if validation is None else make_measure(validation, tokenizers, resolved_job.recipe)
    depth = max(1, job.batch.prefetch)
    batch_order = PrefetchedBatches(batches, depth, pin=distributed.device.type == "cuda")
    metadata = {
        "task": job.task,
        "records": len(batches.store),
        "budget": resolved_job.micro_tokens,
        "accumulate": resolved_job.accumulate,
    }
    last_report: TrainReport | None = None
    is_complete = lambda report: report.step >= resolved_job.recipe.steps or report.early_stopped
    with Tracking(job, resolved_job, trackers) if distributed.rank == 0 else nullcontext() as tracking:
        for report in train(
            setup.model,
            batch_order,
            resolved_job.recipe,
            folder=out / CHECKPOINTS_FOLDER,
            measure=measure,
            stop=stop,
            distributed=distributed,
            metadata=metadata,
        ):
            last_report = report
            if tracking is not None:
                tracking.add(report, completed=is_complete(report))
                yield report
                yield from tracking.take_notes()
    if tracking is None:
        return
    yield from tracking.take_notes()
    stopped = last_report is not None and not is_complete(last_report)
    if stopped:
        summary = "stopped, and saved: add --resume to go on"
        commands = [f"keepleft train --out {shlex.quote(str(out))} --resume"]
    else:
        summary = _save_result(job, resolved_job, tokenizers, out, already_finished=last_report is None)
        example = example_text(job, setup.batches, tokenizers)
        commands = next_commands(job, out / save_model.MODEL_FOLDER, example)
    plot_loss(out)
    yield TrainingFinished(out, summary, stopped, read_best_measures(out), commands)


def _save_result(
    job: TrainJob, resolved_job: ResolvedJob, tokenizers: Tokenizers, out: Path, *, already_finished: bool
) -> str:
    """Write the model directory from the checkpoints. Returns a line for the log."""
    newest = checkpoint.latest(out / CHECKPOINTS_FOLDER)
    assert newest is not None
    _, state, _ = newest
    if already_finished:
        restore_lines(out, state["step"], state.get("report"))
    model = prepare.initial_model(job, resolved_job.design, resolved_job.labels, resolved_job.recipe.seed)
    description = save_model.select_weights(
        model, out / CHECKPOINTS_FOLDER, state["best_step"], job.average_last
    )
    if job.lora:
        from keepleft.training.lora import merge

        merge(model)
    model_folder = out / save_model.MODEL_FOLDER
    save_model.write_model_directory(model.eval(), tokenizers, resolved_job.labels, job.task, model_folder)
    write_card(model_folder, make_card(model_folder))
    prefix = "this run was finished already: " if already_finished else ""
    return f"{prefix}{model_folder} holds {description}"
