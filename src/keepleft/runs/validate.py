"""What can be known to be wrong with a job before any text is read."""

from __future__ import annotations

from importlib import import_module

from keepleft import checks
from keepleft.data.tokenizer import load_tokenizer
from keepleft.runs import defaults, initial_model, metrics
from keepleft.runs.job import TrainJob
from keepleft.runs.tasks import TASKS


def validate_job(job: TrainJob) -> None:
    """Raise what would be raised later; numbers that come from the data are stood in for."""
    _check_numbers(job)
    _check_metric(job)
    if job.tensorboard:
        metrics.tensorboard_writer_class()
    if job.batch.pack and job.task == "classify":
        raise ValueError(
            "batch.pack was asked for, but a classifier has one label for each row: leave it out"
        )
    if job.lora and not job.init_from:
        raise ValueError(
            "lora trains small matrices beside weights that stay as they are, and these would be random: give a "
            "model with --init-from, or leave --lora out"
        )
    for path in (job.tokenizer.path, job.tokenizer.source_path):
        if path is not None:
            load_tokenizer(path)
    vocab = job.tokenizer.size or 1000
    design = defaults.design(
        job,
        vocab,
        None if job.tokenizer.joint else vocab,
        job.batch.max_length or 16,
        labels=2,
        targets=1_000_000,
    )
    defaults.check_design(job, initial_model.initial_design(job, ["no", "yes"]) if job.init_from else design)
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
    generation_metrics = ["bleu", "chrf", "exact"] if TASKS[job.task].fields == ("src", "tgt") else []
    allowed = ["loss", "perplexity", "accuracy", "smoothed", *generation_metrics]
    if metric not in allowed:
        raise ValueError(
            f"the metric {metric!r} is not measured for the task {job.task}: there are {', '.join(allowed)}"
        )
    if metric in ("bleu", "chrf"):
        import_module("keepleft.evaluation.translation").metrics()
