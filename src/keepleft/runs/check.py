"""What can be known to be wrong with a job before any text is read."""

from __future__ import annotations

from importlib import import_module

from keepleft.data.tokenizer import read
from keepleft.nn import sense
from keepleft.runs import metrics, sizes, start
from keepleft.runs.job import Job
from keepleft.runs.tasks import TASKS


def check(job: Job) -> None:
    """Raise what would be raised later; numbers that come from the data are stood in for."""
    _numbers(job)
    _metric(job)
    if job.board:
        metrics.writer()
    if job.batch.pack and job.task == "classify":
        raise ValueError("batch.pack was asked for, but a classifier has one label for each row: leave it out")
    if job.lora and not job.start:
        raise ValueError("lora trains small matrices beside weights that stay as they are, and these would be random: give a "
                         "model to --start from, or leave --lora out")
    for path in (job.words.path, job.words.source_path):
        if path is not None:
            read(path)
    vocab = job.words.size or 1000
    plan = sizes.design(job, vocab, None if job.words.joint else vocab, job.batch.longest or 16, labels=2, targets=1_000_000)
    sizes.suits(job, start.design(job, ["no", "yes"]) if job.start else plan)
    try:
        sizes.recipe(job, targets=1_000_000, steps_per_epoch=100)
    except ValueError as error:
        raise ValueError(f"recipe: {error}") from error


def _numbers(job: Job) -> None:
    for name in ("tokens", "micro", "longest", "multiple"):
        if getattr(job.batch, name) is not None:
            sense.whole(f"batch.{name}", getattr(job.batch, name))
    if job.words.size is not None:
        sense.whole("words.size", job.words.size)
    for name, value in (("batch.ahead", job.batch.ahead), ("words.least", job.words.least), ("lora", job.lora),
                        ("last", job.last)):
        sense.whole(name, value, least=0)


def _metric(job: Job) -> None:
    metric = job.recipe.metric or "loss"
    written = ["bleu", "chrf", "exact"] if TASKS[job.task].fields == ("src", "tgt") else []
    known = ["loss", "perplexity", "accuracy", "smoothed", *written]
    if metric not in known:
        raise ValueError(f"the metric {metric!r} is not measured for the task {job.task}: there are {', '.join(known)}")
    if metric in ("bleu", "chrf"):
        import_module("keepleft.evaluate.translation").metrics()
