"""Sensible numbers for a task, a size and an amount of data: what a job does not say."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from keepleft.models import presets
from keepleft.models.design import Classes, Design, Masked, Stack, Vocabulary, Xavier
from keepleft.nn.position import Learned, Rotary, Sinusoidal
from keepleft.runs.job import Job
from keepleft.runs.tasks import TASKS
from keepleft.training.recipe import Recipe


@dataclass(frozen=True)
class Scale:
    """One size of model and what goes with it."""

    layers: int
    dim: int
    heads: int
    vocab: int    # the most tokens
    tokens: int   # in a step
    lesson: float  # targets to learn from in all, in millions
    peak: float


SCALES: dict[str, dict[str, Scale]] = {
    "pairs": {"tiny": Scale(2, 128, 4, 4000, 2048, 4.0, 2e-3), "small": Scale(3, 256, 4, 8000, 4096, 20.0, 1e-3),
              "base": Scale(6, 512, 8, 32_000, 16_384, 200.0, 7e-4)},
    "running": {"tiny": Scale(4, 128, 4, 4000, 2048, 4.0, 2e-3), "small": Scale(6, 384, 6, 16_000, 16_384, 40.0, 1e-3),
                "base": Scale(12, 768, 12, 50_257, 65_536, 2500.0, 6e-4)},
    "labelled": {"tiny": Scale(2, 128, 4, 8000, 2048, 1.0, 1e-3), "small": Scale(4, 256, 4, 16_000, 4096, 6.0, 5e-4),
                 "base": Scale(12, 768, 12, 30_000, 16_384, 40.0, 1e-4)},
}
WIDTH = {"tiny": 128, "small": 256, "base": 1024}  # of running text
KIND = {"translate": "pairs", "summarize": "pairs", "classify": "labelled"}


def scale(job: Job) -> Scale:
    return SCALES[KIND.get(job.task, "running")][job.size]


def vocabulary(job: Job, characters: int) -> int:
    """The most tokens: a word must be met often enough to be learned."""
    return job.words.size or min(scale(job).vocab, max(1000, round(characters / 300 / 250) * 250))


def longest(job: Job, usual: int) -> int:
    """The most tokens of a text, from what nearly all texts keep to; running text is broken up anyway."""
    if job.batch.longest:
        return job.batch.longest
    if job.task not in KIND:
        return WIDTH[job.size]
    return int(min(1024 if job.task == "summarize" else 512, max(16, 8 * math.ceil(usual / 8))))


def preset(name: str) -> Design:
    if name not in presets.ALL:
        close = get_close_matches(name, presets.ALL, 3) or list(presets.ALL)
        raise ValueError(f"no preset is called {name!r}: did you mean {' or '.join(close)}?")
    return presets.ALL[name]


def design(job: Job, vocab: int, source_vocab: int | None, length: int, labels: int, targets: int) -> Design:
    """The plan of the model: the preset's, in the size that was asked for, with whatever the job says otherwise."""
    usual = TASKS[job.task].like if source_vocab is None else "marian"  # the one that has two vocabularies elsewhere too
    plan, size = preset(job.like or usual), scale(job)
    wishes = dict(job.design)
    dim = int(wishes.pop("dim", size.dim))
    layers = int(wishes.pop("layers", size.layers))
    width = int(wishes.pop("width", 4 * dim if not plan.feedforward.gated else 8 * round(dim / 3)))
    kind = wishes.pop("activation", plan.feedforward.activation)
    stacks: dict[str, Any] = {name: replace(stack, layers=int(wishes.pop(f"{name}_layers", layers)))
                              for name in ("encoder", "decoder") if isinstance(stack := getattr(plan, name), Stack)}
    position = plan.position
    if isinstance(position, Learned | Sinusoidal | Rotary) and position.length is not None:
        position = replace(position, length=max(length, 8 if job.task == "lm" else 512))
    heads = int(wishes.pop("heads", size.heads if dim == size.dim else max(1, dim // 64)))
    changes: dict[str, Any] = dict(
        vocab=vocab, source_vocab=source_vocab, dim=dim, heads=heads, head_dim=None, kv_heads=None, position=position,
        feedforward=replace(plan.feedforward, width=width, activation=kind), **stacks,
        dropout=0.3 if targets < 1_000_000 else 0.1)
    if TASKS[job.task].fields == ("src", "tgt") and plan.scale_embedding:
        changes["initial"] = Xavier()  # tables of length 1 after scaling: these learn from the first step
    if job.task == "classify":
        changes["head"] = Classes(labels, pool="tanh" if plan.decoder is None else "last")
    known = {f.name for f in fields(Design)}
    if unknown := sorted(wishes.keys() - known):
        raise ValueError(f"a design has no {', '.join(unknown)}: give dim, heads, layers, encoder_layers, decoder_layers, "
                         f"width, activation, or one of {', '.join(sorted(known))}")
    return plan.but(**(changes | wishes))


def recipe(job: Job, targets: int, steps_per_epoch: int) -> Recipe:
    """The recipe: as the job says, and elsewhere by size and amount of data."""
    size, said = scale(job), {name: value for name, value in asdict(job.recipe).items() if value is not None}
    epochs = min(60.0, max(3.0, size.lesson * 1e6 / max(1, targets)))
    if job.task == "classify":
        epochs = min(epochs, 8.0)
    if job.start:
        epochs = min(epochs, 3.0)
    steps = int(said.get("steps", max(20, round(epochs * steps_per_epoch))))
    every = max(1, min(1000, steps // 10))
    chosen: dict[str, Any] = dict(
        steps=steps, peak=size.peak if not job.start else size.peak / 20, warmup=max(1, min(2000, steps // 10)), evaluate=every,
        save=every, smoothing=0.1 if TASKS[job.task].fields == ("src", "tgt") else 0.0, average=0.999 if steps > 3000 else 0.99)
    if job.last:
        said["keep"] = max(job.last, said.get("keep", 0))
    return Recipe(**(chosen | said))


def suits(job: Job, design: Design) -> None:
    """A model that can do the task: with the stacks and the head that it needs."""
    parts = tuple(name for name in ("encoder", "decoder") if getattr(design, name) is not None)
    task = TASKS[job.task]
    if parts not in task.parts:
        raise ValueError(f"the task {job.task} needs a model with {' or '.join(' and '.join(one) for one in task.parts)}, and "
                         f"{job.start or job.like} has {' and '.join(parts)}: choose another, such as --like {task.like}")
    wanted = {"classify": Classes, "mlm": Masked}.get(job.task, Vocabulary)
    if not isinstance(design.head, wanted):
        raise ValueError(f"the task {job.task} needs a {wanted.__name__} head, and {job.start or job.like} has "
                         f"{type(design.head).__name__}: choose another model")
