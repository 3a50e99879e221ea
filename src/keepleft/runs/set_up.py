"""Set up training: prepare or read the run folder, make batches and model, audit it, and plan the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from keepleft.auditing.report import AuditReport
from keepleft.data.batches import Batches
from keepleft.data.tokenizer import SOURCE_TOKENIZER_FILE, load_tokenizer
from keepleft.disk import atomic
from keepleft.disk.regular_file import exists_in
from keepleft.models.transformer import Model
from keepleft.runs import prepare
from keepleft.runs.audit_verdict import AuditVerdict, describe_audit
from keepleft.runs.data_files import check_unchanged
from keepleft.runs.dataset import ProgressCallback, Tokenizers
from keepleft.runs.job import TrainJob
from keepleft.runs.job_batches import JobBatches, make_batches
from keepleft.runs.plan import TimeEstimate, TrainingPlan, fit_recipe, max_steps
from keepleft.runs.prepare import CONFIG_FILE, RESOLVED_FILE, ResolvedJob, apply_changeable, prepare_run
from keepleft.runs.save_model import MODEL_FOLDER
from keepleft.runs.validation_metrics import GENERATION_METRICS, MAX_GENERATED_RECORDS, translation_metrics
from keepleft.training import checkpoint
from keepleft.training.distributed import DistributedContext
from keepleft.training.trial import StepTime, measure_steps
from keepleft.weights.model_directory import AnyModel

CHECKPOINTS_FOLDER = "checkpoints"
FORWARD_FRACTION = 1 / 3  # of the arithmetic of a step, that evaluation does for the same tokens
ASSUMED_DISK_RATE = 200e6  # bytes per second that a checkpoint is written with
SAMPLE_RECORDS = 4  # that are translated to find out how long that takes


@dataclass(frozen=True)
class TrainingSetup:
    """Everything that training needs."""

    job: TrainJob  # with the commit of init_from, if that is on the hub
    resolved_job: ResolvedJob
    model: AnyModel
    tokenizers: Tokenizers
    batches: JobBatches


def set_up_training(
    job: TrainJob,
    distributed: DistributedContext,
    on_progress: ProgressCallback,
    *,
    resume: bool,
    audit: Callable[[Model], AuditReport] | None,
    start_time: float | None = None,
    planned_folder: Path | None = None,
) -> Generator[str | TrainingPlan, None, TrainingSetup]:
    """Prepare the run folder `job.out`, or read it if the run is resumed; audit a new model; plan the run.

    `start_time` is when the minutes of the job began, by the monotonic clock. `planned_folder` is given for a
    plan alone: the run folder of the plan. If that is `job.out`, nothing is written. Yields lines for the
    log, and last the plan, unless a resumed run has no steps left.
    """
    start_time = time.monotonic() if start_time is None else start_time
    out = Path(job.out)
    run_folder = planned_folder or out
    if not resume:
        refuse_existing_run(run_folder)
    steps_done = _count_steps_done(out)
    is_prepared = resume and (out / RESOLVED_FILE).exists()
    if distributed.rank == 0 and not is_prepared:
        if resume:
            yield _describe_start(run_folder)
        yield from prepare_run(job, out, distributed, on_progress)
    distributed.barrier()
    stored_job = read_resolved_job(out)
    if distributed.rank == 0 and is_prepared:
        yield from check_unchanged(out, stored_job.data_files, stored_job.store_files)
        if not steps_done:
            yield f"{out / CHECKPOINTS_FOLDER} holds no checkpoint yet: starting from the first step"
    job = replace(job, init_from=stored_job.init_from or job.init_from)
    resolved_job = apply_changeable(stored_job, job) if resume else stored_job
    tokenizers = load_tokenizers(out)
    batches = make_batches(job, resolved_job, tokenizers, out, distributed)
    model = prepare.initial_model(job, resolved_job.design, resolved_job.labels, resolved_job.recipe.seed)
    step_time: StepTime | None = None
    if steps_done < resolved_job.recipe.steps:
        step_time = measure_steps(
            model,
            batches.training,
            resolved_job.recipe,
            distributed,
            tokens_per_step=batches.training.tokens,
            row_length=batches.training.fixed_width,
        )
    model = model.to(distributed.device)
    if distributed.rank == 0 and audit is not None and not steps_done:
        report = audit(model)
        AuditVerdict.of(report).write(out)
        yield from describe_audit(report, run_folder / MODEL_FOLDER)
    if distributed.rank == 0 and step_time is not None:
        estimate = _estimate_time(model, resolved_job, batches, tokenizers, step_time)
        if job.minutes is not None and stored_job.minutes is None:
            seconds_left = 60 * job.minutes - (time.monotonic() - start_time)
            recipe = fit_recipe(job, estimate, stored_job.steps_per_epoch, seconds_left)
            stored_job = replace(stored_job, recipe=recipe, minutes=job.minutes)
            if planned_folder != out:
                atomic.write_text(out / RESOLVED_FILE, stored_job.to_json())
            resolved_job = apply_changeable(stored_job, job) if resume else stored_job
        yield _make_plan(
            job, resolved_job, model, batches, distributed, estimate, step_time, steps_done, run_folder
        )
    distributed.barrier()
    if distributed.rank:  # the first process may have chosen the number of steps
        stored_job = read_resolved_job(out)
        resolved_job = apply_changeable(stored_job, job) if resume else stored_job
    return TrainingSetup(job, resolved_job, model, tokenizers, batches)


def refuse_existing_run(out: Path) -> None:
    """Raise ValueError if a folder has checkpoints of a run."""
    if _count_steps_done(out):
        raise ValueError(f"{out} holds a run already: add --resume to go on with it, or give another --out")


def _count_steps_done(out: Path) -> int:
    """The steps of the newest checkpoint, whole or damaged; 0 if there is none."""
    directories = checkpoint.list_resumable(out / CHECKPOINTS_FOLDER)
    return checkpoint.step_number(directories[0]) if directories else 0


def _describe_start(out: Path) -> str:
    """A line for the log: why a run that was to be resumed starts from the beginning."""
    if (out / CONFIG_FILE).exists():
        return f"the data of the run in {out} were not prepared to the end: starting from the beginning"
    return f"there is no run in {out} to resume yet: starting one"


def read_resolved_job(out: Path) -> ResolvedJob:
    """What a run folder says was resolved."""
    return ResolvedJob.from_json((out / RESOLVED_FILE).read_text("utf-8"))


def load_tokenizers(out: Path) -> Tokenizers:
    """The tokenizers of a run folder."""
    target = load_tokenizer(out)
    if exists_in(out, SOURCE_TOKENIZER_FILE):
        return Tokenizers(target, load_tokenizer(out, SOURCE_TOKENIZER_FILE))
    return Tokenizers(target, target)


def _estimate_time(
    model: Model, resolved_job: ResolvedJob, batches: JobBatches, tokenizers: Tokenizers, step_time: StepTime
) -> TimeEstimate:
    """How long the parts of the run take, from trial steps and rules of thumb."""
    evaluation = 0.0
    if batches.validation is not None:
        steps_of_data = resolved_job.steps_per_epoch * batches.validation_size / max(1, batches.training_size)
        evaluation = FORWARD_FRACTION * step_time.seconds * steps_of_data
        if resolved_job.recipe.metric in GENERATION_METRICS:
            evaluation += _estimate_generation(model, tokenizers, batches.validation)
    num_parameters = sum(p.numel() for p in model.parameters())
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_averaged = num_parameters if resolved_job.recipe.ema_decay else 0
    checkpoint_bytes = 4 * (num_parameters + 2 * num_trained + num_averaged)  # weights, AdamW, EMA
    return TimeEstimate(step_time.seconds, evaluation, checkpoint_bytes / ASSUMED_DISK_RATE)


def _estimate_generation(model: Model, tokenizers: Tokenizers, validation: Batches) -> float:
    """Seconds to translate the validation data: at most, as a model that has learned nothing never ends."""
    num_records = min(MAX_GENERATED_RECORDS, len(validation.store))
    start_time = time.perf_counter()
    model.eval()
    with torch.no_grad():
        translation_metrics(model, tokenizers, validation, SAMPLE_RECORDS)
    model.train()
    return (time.perf_counter() - start_time) * num_records / min(SAMPLE_RECORDS, num_records)


def _make_plan(
    job: TrainJob,
    resolved_job: ResolvedJob,
    model: Model,
    batches: JobBatches,
    distributed: DistributedContext,
    estimate: TimeEstimate,
    step_time: StepTime,
    steps_done: int,
    run_folder: Path,
) -> TrainingPlan:
    recipe = resolved_job.recipe
    devices = f"{distributed.world_size} × {distributed.device.type}"
    if distributed.device.type == "cpu":
        threads = torch.get_num_threads()
        devices += f" ({threads} {'thread' if threads == 1 else 'threads'})"
    return TrainingPlan(
        data=batches.describe_training(),
        validation=batches.describe_validation(),
        model=_describe_model(job, model),
        recipe=recipe,
        tokens_per_step=batches.training.tokens,
        epochs=recipe.steps / resolved_job.steps_per_epoch if resolved_job.steps_per_epoch else 0.0,
        devices=devices,
        micro_batches=resolved_job.accumulate,
        num_processes=distributed.world_size,
        steps_done=steps_done,
        step_seconds=step_time.seconds,
        seconds=estimate.run_seconds(recipe, steps_done),
        minutes=resolved_job.minutes,
        at_epoch_limit=recipe.steps == max_steps(job, resolved_job.steps_per_epoch),
        checkpoints_folder=run_folder / CHECKPOINTS_FOLDER,
        model_folder=run_folder / MODEL_FOLDER,
    )


def _describe_model(job: TrainJob, model: Model) -> str:
    design = model.design
    num_parameters = sum(p.numel() for p in model.parameters())
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layers = " + ".join(str(stack.layers) for stack in (design.encoder, design.decoder) if stack is not None)
    trained = "" if num_trained == num_parameters else f", {num_trained:,} of them trained"
    return (
        f"{num_parameters:,} parameters{trained}: {design.kind}, {layers} layers of width {design.dim}, "
        f"vocabulary {design.vocab:,}"
    )
