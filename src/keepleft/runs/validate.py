"""Validation of a job: everything that can be known to be wrong before any data is read."""

from __future__ import annotations

from importlib import import_module

from keepleft import checks
from keepleft.data.tokenizer import load_tokenizer
from keepleft.runs import defaults
from keepleft.runs.job import TrainJob
from keepleft.runs.prepare import initial_design
from keepleft.runs.tasks import TASKS
from keepleft.runs.trackers import check_trackers


def validate_job(job: TrainJob) -> None:
    """Raise the errors that would be raised later; placeholders stand for numbers that come from the data."""
    _check_numbers(job)
    _check_metric(job)
    if job.minutes is not None:
        checks.check_number("minutes", job.minutes, above=0)
        if job.recipe.steps is not None:
            raise ValueError(
                f"--minutes chooses the number of steps, and --recipe.steps is {job.recipe.steps}: give one"
            )
    check_trackers(job.track)
    if job.batch.pack and job.task == "classify":
        raise ValueError(
            "batch.pack was asked for, but a classifier has one label for each row: leave it out"
        )
    if job.lora and not job.init_from:
        raise ValueError(
            "lora trains low-rank matrices beside frozen weights, and these would be random: give a model "
            "with --init-from, or leave --lora out"
        )
    for path in (job.tokenizer.path, job.tokenizer.source_path):
        if path is not None:
            load_tokenizer(path)
    vocab = job.tokenizer.size or 1000
    source_vocab = None if job.tokenizer.joint else vocab
    max_length = job.batch.max_length or 16
    design = defaults.design(job, vocab, source_vocab, max_length, labels=2, targets=1_000_000)
    if job.init_from:
        design = initial_design(job, ["no", "yes"])
    defaults.check_design(job, design)
    try:
        defaults.recipe(job, targets=1_000_000, steps_per_epoch=100)
    except ValueError as error:
        raise ValueError(f"recipe: {error}") from error


def _check_numbers(job: TrainJob) -> None:
    for name in ("tokens", "micro_tokens", "max_length", "pad_to_multiple_of"):
        if getattr(job.batch, name) is not None:
            checks.check_int(f"batch.{name}", getattr(job.batch, name))
    if job.tokenizer.size is not None:
        checks.check_int("tokenizer.size", job.tokenizer.size)
    for name, value in (
        ("batch.prefetch", job.batch.prefetch),
        ("tokenizer.min_frequency", job.tokenizer.min_frequency),
        ("lora", job.lora),
        ("average_last", job.average_last),
    ):
        checks.check_int(name, value, minimum=0)


def _check_metric(job: TrainJob) -> None:
    metric = job.recipe.metric or "loss"
    generation_metrics = ["bleu", "chrf", "exact"] if TASKS[job.task].is_paired else []
    perplexity = [] if job.task == "classify" else ["perplexity"]
    allowed = ["loss", *perplexity, "accuracy", "smoothed", *generation_metrics]
    if metric not in allowed:
        raise ValueError(
            f"the metric {metric!r} is not measured for the task {job.task}: there are {', '.join(allowed)}"
        )
    if metric in ("bleu", "chrf"):
        import_module("keepleft.evaluation.translation").metrics()
