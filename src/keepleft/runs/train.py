"""Run a training job, from plain files to a model directory, as a generator of events.

runs/NAME/config.yaml     the job as it was given
runs/NAME/resolved.json   what was chosen from the data: design, recipe, labels
runs/NAME/data/           the token stores
runs/NAME/metrics.jsonl   one line for each report
runs/NAME/checkpoints/    training checkpoints, to resume from
runs/NAME/model/          the result, a model directory
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from keepleft.attention.masks import causal, full
from keepleft.auditing.audit import audit
from keepleft.data.batches import Batches, BucketedLayout, WindowLayout
from keepleft.data.packing import PackedLayout
from keepleft.data.prefetch import PrefetchedBatches
from keepleft.data.token_store import TokenStore
from keepleft.data.tokenizer import SOURCE_TOKENIZER_FILE, load_tokenizer
from keepleft.disk import atomic
from keepleft.disk.regular_file import exists_in
from keepleft.evaluation.likelihood import likelihood
from keepleft.models.transformer import Model
from keepleft.runs import prepare, save_model
from keepleft.runs.data_files import STORE_FOLDER, check_unchanged
from keepleft.runs.dataset import ProgressCallback, Tokenizers, no_progress
from keepleft.runs.job import TrainJob
from keepleft.runs.metrics import MetricsLog, plot_loss, restore_lines
from keepleft.runs.prepare import RESOLVED_FILE, ResolvedJob, apply_changeable, prepare_run
from keepleft.runs.tasks import objective
from keepleft.runs.validate import validate_job
from keepleft.training import checkpoint
from keepleft.training.distributed import DistributedContext, init_distributed
from keepleft.training.loop import TrainReport, train
from keepleft.weights.model_directory import AnyModel

CHECKPOINTS_FOLDER = "checkpoints"
# without validation data, one of 50 records is held out, or the last 5 % of running text; within limits
HOLDOUT_INTERVAL = 50
HOLDOUT_FRACTION = 0.05
MAX_HELDOUT_RECORDS = 4096
MAX_HELDOUT_TOKENS = 1 << 18
# with less validation data than this, metrics are too noisy to rely on
MIN_RELIABLE_RECORDS = 100
MIN_RELIABLE_TOKENS = 10_000
MAX_GENERATED_RECORDS = 500  # of the validation data, for metrics of generated text (BLEU, chrF)


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


TrainEvent = str | TrainingStarted | TrainReport | TrainingFinished  # a str is a line for the log


def run_job(
    job: TrainJob,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_progress: ProgressCallback = no_progress,
) -> Iterator[TrainEvent]:
    """Train a model from a job's data and write it to the run folder `job.out`.

    With `resume`, a run that has checkpoints continues exactly where it stopped. `stop` is called after each
    step; if it returns True, a checkpoint is saved and the run ends. `on_progress` reports the work before
    training. Raises before any data is read if the job is invalid; a start that fails leaves no files behind.
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
                setup = yield from _set_up_training(job, distributed, resume, on_progress)
            except BaseException:
                if created_folders and distributed.rank == 0:  # remove what the failed start has created
                    atomic.remove_folder(out)
                    with suppress(OSError):  # others may have put something there since
                        for folder in created_folders[1:]:
                            folder.rmdir()
                raise
            yield from _train(setup, out, distributed, stop)
    finally:
        distributed.destroy()


@dataclass(frozen=True)
class _TrainingSetup:
    job: TrainJob  # with the commit of init_from, if that is on the hub
    resolved_job: ResolvedJob
    model: AnyModel
    tokenizers: Tokenizers
    batches: Batches
    valid: Batches | None


def _set_up_training(
    job: TrainJob, distributed: DistributedContext, resume: bool, on_progress: ProgressCallback
) -> Generator[TrainEvent, None, _TrainingSetup]:
    """Prepare the run folder, or read it if the run is resumed, and audit a new model."""
    out = Path(job.out)
    has_checkpoints = bool(checkpoint.list_resumable(out / CHECKPOINTS_FOLDER))
    if has_checkpoints and not resume:
        raise ValueError(f"{out} holds a run already: add --resume to go on with it, or give another --out")
    is_prepared = resume and (out / RESOLVED_FILE).exists()
    if distributed.rank == 0 and not is_prepared:
        yield from prepare_run(job, out, distributed, on_progress)
    distributed.barrier()
    resolved_job = ResolvedJob.from_json((out / RESOLVED_FILE).read_text("utf-8"))
    if distributed.rank == 0 and is_prepared:
        yield from check_unchanged(out, resolved_job.data_files, resolved_job.store_files)
        if not has_checkpoints:
            yield f"{out / CHECKPOINTS_FOLDER} holds no checkpoint yet: starting from the first step"
    job = replace(job, init_from=resolved_job.init_from or job.init_from)
    if resume:
        resolved_job = apply_changeable(resolved_job, job)
    tokenizers = _load_tokenizers(out)
    batches, valid = _make_batches(job, resolved_job, tokenizers, out, distributed)
    model = prepare.initial_model(job, resolved_job.design, resolved_job.labels, resolved_job.recipe.seed).to(
        distributed.device
    )
    if distributed.rank == 0:
        yield from _describe_validation(job, batches, valid)
        num_parameters = sum(p.numel() for p in model.parameters())
        steps = resolved_job.recipe.steps
        devices = f"{distributed.world_size} × {distributed.device.type}"
        yield (
            f"{job.task}: {num_parameters:,} parameters, {steps:,} {'step' if steps == 1 else 'steps'} of "
            f"about {batches.tokens:,} tokens, {resolved_job.recipe.optimizer}, on {devices}"
        )
        if resolved_job.accumulate % distributed.world_size:
            yield (
                f"note: a step has {resolved_job.accumulate} micro-batches for {distributed.world_size} "
                "processes, so some wait for others: give batch.tokens and batch.micro_tokens so that they "
                "divide"
            )
        if job.audit and not has_checkpoints:
            yield audit_before_training(model)
    return _TrainingSetup(job, resolved_job, model, tokenizers, batches, valid)


def audit_before_training(model: Model) -> str:
    """Audit the model for leaks (from the future, padding, other rows), before a step is spent on it.

    Returns one line for the log. Raises ValueError with the findings if there are any.
    """
    report = audit(model, claim=causal if model.design.decoder is not None else full, budget="quick")
    if report.findings:
        raise ValueError(
            "the model was audited before its first step, and is not as it should be (--no-audit trains it "
            f"all the same)\n{report.text()}"
        )
    summary = (
        f"audit: {', '.join(report.checked) or 'nothing'} {'is' if len(report.checked) < 2 else 'are'} clean"
    )
    unchecked = "".join(f"; not checked: {line}" for line in report.blocked)
    return f"{summary} ({report.calls} calls, {report.seconds:.1f} s){unchecked}"


def _describe_validation(job: TrainJob, batches: Batches, valid: Batches | None) -> Iterator[str]:
    """A line for the log: how much validation data there is, and whether it is enough to rely on."""
    if valid is None:
        yield (
            "validation: nothing is held out of so few texts, so no one sees how it does on new ones: give "
            "some with --valid"
        )
        return
    is_running_text = job.is_running_text
    field = batches.objective.fields[0]
    num_heldout, num_train = (
        len(side.store[field].tokens) if is_running_text else len(side.store) for side in (valid, batches)
    )
    unit = "tokens of running text" if is_running_text else "record" if num_heldout == 1 else "records"
    is_small = num_heldout < (MIN_RELIABLE_TOKENS if is_running_text else MIN_RELIABLE_RECORDS)
    line = f"validation: {num_heldout:,} {unit}"
    if job.valid is None:
        line += f" held out, {num_train:,} are left to train on"
    if is_small:
        line += "; metrics on so few are rough" + ("" if job.valid is not None else " (--valid takes more)")
    yield line


def _load_tokenizers(out: Path) -> Tokenizers:
    target = load_tokenizer(out)
    if exists_in(out, SOURCE_TOKENIZER_FILE):
        return Tokenizers(target, load_tokenizer(out, SOURCE_TOKENIZER_FILE))
    return Tokenizers(target, target)


def _make_batches(
    job: TrainJob,
    resolved_job: ResolvedJob,
    tokenizers: Tokenizers,
    out: Path,
    distributed: DistributedContext,
) -> tuple[Batches, Batches | None]:
    """The batches of training and of validation.

    Without validation data a part of the training data is held out; None if there is too little of it.
    """
    batch_objective = objective(job.task, tokenizers.target)
    field = batch_objective.fields[0]
    store = TokenStore.open(out / STORE_FOLDER / "train")
    heldout: TokenStore | None = None
    if (out / STORE_FOLDER / "valid").exists():
        heldout = TokenStore.open(out / STORE_FOLDER / "valid")
    elif job.is_running_text:
        head, tail = store.split_tail(min(HOLDOUT_FRACTION, MAX_HELDOUT_TOKENS / len(store[field].tokens)))
        if len(tail[field].tokens) > resolved_job.max_length:
            store, heldout = head, tail
    elif len(store) >= 2 * HOLDOUT_INTERVAL:
        num_heldout = min(len(store) // HOLDOUT_INTERVAL, MAX_HELDOUT_RECORDS)
        store, heldout = store.split_random(num_heldout, resolved_job.recipe.seed)
    layout: BucketedLayout | PackedLayout | WindowLayout
    if job.is_running_text:
        layout = WindowLayout(resolved_job.max_length)
    elif resolved_job.pack:
        layout = PackedLayout(max(resolved_job.max_length, min(128, resolved_job.micro_tokens)))
    else:
        multiple = resolved_job.pad_to_multiple_of
        layout = BucketedLayout(multiple, fixed_height=multiple > 1)
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
    if heldout is None:
        return training, None
    validation = replace(training, store=heldout, accumulate=1, shuffle=False, rank=0, world_size=1)
    return training, validation


def _train(
    setup: _TrainingSetup, out: Path, distributed: DistributedContext, stop: Callable[[], bool]
) -> Iterator[TrainEvent]:
    """Train, log the reports, and write the model directory unless `stop` ended the run."""
    job = setup.job
    resolved_job = setup.resolved_job
    tokenizers = setup.tokenizers
    batches = setup.batches
    valid = setup.valid
    if distributed.rank == 0:
        yield TrainingStarted(resolved_job.recipe.steps)
    valid_batches = list(valid.one_epoch()) if valid is not None else []

    def measure(model: Model) -> dict[str, float]:
        measures = likelihood(model, valid_batches, label_smoothing=resolved_job.recipe.label_smoothing)
        if resolved_job.recipe.metric in ("bleu", "chrf", "exact"):
            measures |= translation_metrics(model, tokenizers, valid, MAX_GENERATED_RECORDS)
        return measures

    depth = max(1, job.batch.prefetch)
    batch_order = PrefetchedBatches(batches, depth, pin=distributed.device.type == "cuda")
    metadata = {
        "task": job.task,
        "records": len(batches.store),
        "budget": resolved_job.micro_tokens,
        "accumulate": resolved_job.accumulate,
    }
    last_report: TrainReport | None = None
    best_measures: dict[str, float] = {}
    with MetricsLog(out, tensorboard=job.tensorboard and distributed.rank == 0) as metrics:
        for report in train(
            setup.model,
            batch_order,
            resolved_job.recipe,
            folder=out / CHECKPOINTS_FOLDER,
            measure=measure if valid_batches else None,
            stop=stop,
            distributed=distributed,
            metadata=metadata,
        ):
            last_report = report
            if report.best or not best_measures:
                best_measures = report.measures
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
    yield TrainingFinished(out, summary, stopped, best_measures)


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
    prefix = "this run was finished already: " if already_finished else ""
    return f"{prefix}{model_folder} holds {description}"


def translation_metrics(
    model: Model, tokenizers: Tokenizers, valid: Batches | None, max_records: int
) -> dict[str, float]:
    """BLEU, chrF and exact match of greedy translations of the first validation records."""
    from keepleft.evaluation.translation import translation
    from keepleft.pipelines.text_generation import generate_from_ids

    assert valid is not None
    rows = np.arange(min(max_records, len(valid.store)))
    references = [tokenizers.target.decode(tokens) for tokens in valid.store["tgt"].take(rows).to_lists()]
    sources = valid.store["src"].take(rows)
    return translation(generate_from_ids(model, tokenizers.target, sources), references)
