"""One job from plain files to a model directory; a generator of what happens.

runs/NAME/config.yaml     the job as it was given
runs/NAME/resolved.json   what was chosen from the data: design, recipe, labels
runs/NAME/data/           the texts as integers
runs/NAME/metrics.jsonl   a line for each report
runs/NAME/checkpoints/    where the run stands
runs/NAME/model/          the result
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from keepleft.attention.masks import causal, full
from keepleft.auditing.audit import audit
from keepleft.data.batches import Batches, BucketedLayout, PackedLayout, WindowLayout
from keepleft.data.prefetch import PrefetchedBatches
from keepleft.data.token_store import TokenStore
from keepleft.data.tokenizer import load_tokenizer as read_tokenizer
from keepleft.disk import atomic
from keepleft.evaluation.likelihood import likelihood
from keepleft.models.transformer import Model
from keepleft.runs import initial_model, save_model
from keepleft.runs.dataset import ProgressCallback, Tokenizers, no_progress
from keepleft.runs.job import TrainJob
from keepleft.runs.metrics import MetricsLog, plot_loss
from keepleft.runs.prepare import RESOLVED_FILE, ResolvedJob, apply_changeable, prepare_run
from keepleft.runs.tasks import objective
from keepleft.runs.validate import validate_job
from keepleft.training import checkpoint
from keepleft.training.distributed import DistributedContext, init_distributed
from keepleft.training.loop import TrainReport, train

CHECKPOINTS_FOLDER = "checkpoints"
# without a validation text: every 50th record is held out, or the last twentieth of running text, but not
# more than
HOLDOUT_INTERVAL = 50
MAX_HELDOUT_RECORDS = 4096
MAX_HELDOUT_TOKENS = 1 << 18
MIN_RELIABLE_RECORDS = 100
MIN_RELIABLE_TOKENS = 10_000  # with fewer to measure on, chance says as much as the model


@dataclass(frozen=True)
class TrainingStarted:
    """Everything is ready, and training begins."""

    steps: int


@dataclass(frozen=True)
class TrainingFinished:
    """The result of a run."""

    folder: Path
    summary: str
    stopped: bool
    measures: dict[str, float]


TrainEvent = str | TrainingStarted | TrainReport | TrainingFinished


def run_job(
    job: TrainJob,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_progress: ProgressCallback = no_progress,
) -> Iterator[TrainEvent]:
    """Do a job. Lines are for people, reports for the record; the last event says where the model lies.

    `watch` hears how far the work before training has come.
    """
    out, distributed = Path(job.out), init_distributed(job.parallel, job.device)
    created_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        validate_job(job)
        with atomic.lock_folder(out) if distributed.rank == 0 else nullcontext():
            try:
                setup = yield from _set_up_training(job, distributed, resume, on_progress)
            except BaseException:
                if created_folders and distributed.rank == 0:  # what a failed start has made
                    atomic.remove_folder(out)
                    with suppress(OSError):  # others may have put something there
                        for folder in created_folders[1:]:
                            folder.rmdir()
                raise
            yield from _train(job, setup, out, distributed, stop)
    finally:
        distributed.destroy()


@dataclass(frozen=True)
class _TrainingSetup:
    """All that training needs."""

    resolved_job: ResolvedJob
    model: Any
    tokenizers: Tokenizers
    batches: Batches
    valid: Batches | None


def _set_up_training(
    job: TrainJob, distributed: DistributedContext, resume: bool, on_progress: ProgressCallback
) -> Generator[TrainEvent, None, _TrainingSetup]:
    out = Path(job.out)
    has_checkpoints = bool(checkpoint.list_checkpoints(out / CHECKPOINTS_FOLDER))
    if has_checkpoints and not resume:
        raise ValueError(f"{out} holds a run already: add --resume to go on with it, or give another --out")
    if distributed.rank == 0 and not (resume and (out / RESOLVED_FILE).exists()):
        yield from prepare_run(job, out, distributed, on_progress)
    distributed.barrier()
    resolved_job = ResolvedJob.from_json((out / RESOLVED_FILE).read_text("utf-8"))
    if resume:
        resolved_job = apply_changeable(resolved_job, job)
    tokenizers = _load_tokenizers(out)
    batches, valid = _make_batches(job, resolved_job, tokenizers, out, distributed)
    model = initial_model.initial_model(
        job, resolved_job.design, resolved_job.labels, resolved_job.recipe.seed
    ).to(distributed.device)
    if distributed.rank == 0:
        yield from _describe_validation(job, batches, valid)
        num_parameters, steps = sum(p.numel() for p in model.parameters()), resolved_job.recipe.steps
        yield (
            f"{job.task}: {num_parameters:,} weights, {steps:,} {'step' if steps == 1 else 'steps'} of about {batches.tokens:,} "
            f"tokens, {resolved_job.recipe.optimizer}, on {distributed.world_size} × {distributed.device.type}"
        )
        if resolved_job.accumulate % distributed.world_size:
            yield (
                f"note: a step has {resolved_job.accumulate} micro-batches for {distributed.world_size} processes, so some wait for others: "
                "give batch.tokens and batch.micro_tokens so that they divide"
            )
        if job.audit and not has_checkpoints:
            yield audit_before_training(model)
    return _TrainingSetup(resolved_job, model, tokenizers, batches, valid)


def audit_before_training(model: Model) -> str:
    """Audit the model for leaks of the future, padding or other rows, before a step is spent on it.

    Returns one line for the log. Raises ValueError with the findings if there are any.
    """
    report = audit(model, claim=causal if model.design.decoder is not None else full, budget="quick")
    if report.findings:
        raise ValueError(
            "the model was audited before its first step, and is not as it should be (--no-audit trains it all "
            f"the same)\n{report.text()}"
        )
    summary = (
        f"audit: {', '.join(report.checked) or 'nothing'} {'is' if len(report.checked) < 2 else 'are'} clean"
    )
    unchecked = "".join(f"; not checked: {line}" for line in report.blocked)
    return f"{summary} ({report.calls} calls, {report.seconds:.1f} s){unchecked}"


def _describe_validation(job: TrainJob, batches: Batches, valid: Batches | None) -> Iterator[str]:
    """What is measured on."""
    if valid is None:
        yield "validation: nothing is held out of so few texts, so no one sees how it does on new ones: give some with --valid"
        return
    is_running_text = job.task == "lm" and not job.tokenizer.documents
    field = batches.objective.fields[0]
    num_heldout, num_train = (
        len(side.store[field].tokens) if is_running_text else len(side.store) for side in (valid, batches)
    )
    unit = "tokens of running text" if is_running_text else "record" if num_heldout == 1 else "records"
    is_small = num_heldout < (MIN_RELIABLE_TOKENS if is_running_text else MIN_RELIABLE_RECORDS)
    yield (
        f"validation: {num_heldout:,} {unit}"
        + ("" if job.valid is not None else f" held out, {num_train:,} are left to learn from")
        + (
            "; measures on so few are rough" + ("" if job.valid is not None else " (--valid takes more)")
            if is_small
            else ""
        )
    )


def _load_tokenizers(out: Path) -> Tokenizers:
    target = read_tokenizer(out / "tokenizer.json")
    source_path = out / "source_tokenizer.json"
    return Tokenizers(target, read_tokenizer(source_path) if source_path.exists() else target)


def _make_batches(
    job: TrainJob,
    resolved_job: ResolvedJob,
    tokenizers: Tokenizers,
    out: Path,
    distributed: DistributedContext,
) -> tuple[Batches, Batches | None]:
    batch_objective = objective(job.task, tokenizers.target)
    is_running_text = job.task == "lm" and not job.tokenizer.documents
    store = TokenStore.open(out / "data" / "train")
    heldout: TokenStore | None = (
        TokenStore.open(out / "data" / "valid") if (out / "data" / "valid").exists() else None
    )
    if heldout is None:
        if is_running_text:
            parts = store.split_tail(
                min(0.05, MAX_HELDOUT_TOKENS / len(store[batch_objective.fields[0]].tokens))
            )
            if len(parts[1][batch_objective.fields[0]].tokens) > resolved_job.max_length:
                store, heldout = parts
        elif len(store) >= 2 * HOLDOUT_INTERVAL:
            store, heldout = store.split_random(
                min(len(store) // HOLDOUT_INTERVAL, MAX_HELDOUT_RECORDS), resolved_job.recipe.seed
            )
    layout: BucketedLayout | PackedLayout | WindowLayout = BucketedLayout(
        resolved_job.pad_to_multiple_of, fixed_height=resolved_job.pad_to_multiple_of > 1
    )
    if is_running_text:
        layout = WindowLayout(resolved_job.max_length)
    elif resolved_job.pack:
        layout = PackedLayout(max(resolved_job.max_length, min(128, resolved_job.micro_tokens)))
    training = Batches(
        store,
        batch_objective,
        layout,
        resolved_job.micro_tokens,
        resolved_job.accumulate,
        resolved_job.recipe.seed,
        rank=distributed.rank,
        world_size=distributed.world_size,
    )
    return training, None if heldout is None else replace(
        training, store=heldout, accumulate=1, shuffle=False, rank=0, world_size=1
    )


def _train(
    job: TrainJob, setup: _TrainingSetup, out: Path, distributed: DistributedContext, stop: Callable[[], bool]
) -> Iterator[TrainEvent]:
    resolved_job = setup.resolved_job
    tokenizers = setup.tokenizers
    batches = setup.batches
    valid = setup.valid
    if distributed.rank == 0:
        yield TrainingStarted(resolved_job.recipe.steps)
    valid_batches = list(valid.one_epoch()) if valid is not None else []

    def measure(current_model: nn.Module) -> dict[str, float]:
        measures = likelihood(
            current_model, valid_batches, label_smoothing=resolved_job.recipe.label_smoothing
        )
        if resolved_job.recipe.metric in ("bleu", "chrf", "exact"):
            measures |= translation_metrics(current_model, tokenizers, valid, 500)
        return measures

    batch_order = PrefetchedBatches(
        batches, max(1, job.batch.prefetch), pin=distributed.device.type == "cuda"
    )
    metadata = {
        "task": job.task,
        "records": len(batches.store),
        "budget": resolved_job.micro_tokens,
        "accumulate": resolved_job.accumulate,
    }
    folder, last_report = out / CHECKPOINTS_FOLDER, None
    measures: dict[str, float] = {}
    with MetricsLog(out, tensorboard=job.tensorboard and distributed.rank == 0) as metrics:
        for report in train(
            setup.model,
            batch_order,
            resolved_job.recipe,
            folder=folder,
            measure=measure if valid_batches else None,
            stop=stop,
            distributed=distributed,
            metadata=metadata,
        ):
            measures, last_report = report.measures if report.best or not measures else measures, report
            if distributed.rank == 0:
                metrics.add(report)
                yield report
    stopped = (
        last_report is not None
        and last_report.step < resolved_job.recipe.steps
        and not last_report.early_stopped
    )
    if distributed.rank:
        return
    summary = "stopped, and saved: add --resume to go on"
    if not stopped:
        summary = _save_result(job, resolved_job, tokenizers, out, already_finished=last_report is None)
    plot_loss(out)
    yield TrainingFinished(out, summary, stopped, measures)


def _save_result(
    job: TrainJob, resolved_job: ResolvedJob, tokenizers: Tokenizers, out: Path, *, already_finished: bool
) -> str:
    newest = checkpoint.latest(out / CHECKPOINTS_FOLDER)
    assert newest is not None
    model = initial_model.initial_model(
        job, resolved_job.design, resolved_job.labels, resolved_job.recipe.seed
    )
    description = save_model.select_weights(
        model, out / CHECKPOINTS_FOLDER, newest[1]["best_step"], job.average_last
    )
    if job.lora:
        from keepleft.training.lora import merge

        merge(model)
    save_model.write_model_directory(
        model.eval(), tokenizers, resolved_job.labels, job.task, out / save_model.MODEL_FOLDER
    )
    return f"{'this run was finished already: ' if already_finished else ''}{out / save_model.MODEL_FOLDER} holds {description}"


def translation_metrics(
    model: nn.Module, tokenizers: Tokenizers, valid: Batches | None, max_texts: int
) -> dict[str, float]:
    """BLEU and its like on the first texts of a validation store, written greedily."""
    from keepleft.evaluation.translation import translation
    from keepleft.pipelines.text_generation import generate_from_ids

    assert valid is not None
    assert isinstance(model, Model)
    rows = np.arange(min(max_texts, len(valid.store)))
    references = [tokenizers.target.decode(tokens) for tokens in valid.store["tgt"].take(rows).to_lists()]
    sources = valid.store["src"].take(rows)
    return translation(generate_from_ids(model, tokenizers.target, sources), references)
