"""Default design and hyperparameters for a task, a size and an amount of data: what a job leaves open."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from keepleft.models import presets
from keepleft.models.design import ClassificationHead, Design, LMHead, MaskedLMHead, StackDesign, XavierInit
from keepleft.nn.position import LearnedPositions, Rotary, Sinusoidal
from keepleft.runs.job import TrainJob
from keepleft.runs.tasks import TASKS
from keepleft.training.recipe import Recipe


@dataclass(frozen=True)
class SizePreset:
    """A size of model, and the hyperparameters that suit it."""

    layers: int
    dim: int
    heads: int
    vocab: int  # the largest size of the vocabulary
    tokens: int  # in a step
    million_targets: float  # to train on in all
    lr: float  # the peak learning rate


SIZE_PRESETS: dict[str, dict[str, SizePreset]] = {
    "pairs": {
        "tiny": SizePreset(2, 128, 4, 4000, 2048, 4.0, 2e-3),
        "small": SizePreset(3, 256, 4, 8000, 4096, 20.0, 1e-3),
        "base": SizePreset(6, 512, 8, 32_000, 16_384, 200.0, 7e-4),
    },
    "running": {
        "tiny": SizePreset(4, 128, 4, 4000, 2048, 4.0, 2e-3),
        "small": SizePreset(6, 384, 6, 16_000, 16_384, 40.0, 1e-3),
        "base": SizePreset(12, 768, 12, 50_257, 65_536, 2500.0, 6e-4),
    },
    "labelled": {
        "tiny": SizePreset(2, 128, 4, 8000, 2048, 1.0, 1e-3),
        "small": SizePreset(4, 256, 4, 16_000, 4096, 6.0, 5e-4),
        "base": SizePreset(12, 768, 12, 30_000, 16_384, 40.0, 1e-4),
    },
}
MIN_STEPS = 20  # that a run takes by default
CONTEXT_LENGTH = {"tiny": 128, "small": 256, "base": 1024}  # of running text
DATA_KIND = {"translate": "pairs", "summarize": "pairs", "classify": "labelled"}  # all others: "running"


def size_preset(job: TrainJob) -> SizePreset:
    return SIZE_PRESETS[DATA_KIND.get(job.task, "running")][job.size]


def vocabulary(job: TrainJob, characters: int) -> int:
    """The largest size of the vocabulary: a token for every 300 characters, so that each is seen often."""
    rounded = round(characters / 300 / 250) * 250
    return job.tokenizer.size or min(size_preset(job).vocab, max(1000, rounded))


def max_length(job: TrainJob, typical_length: int) -> int:
    """The most tokens of a text, from the length that nearly all keep to; running text is split anyway."""
    if job.batch.max_length:
        return job.batch.max_length
    if job.task not in DATA_KIND:
        return CONTEXT_LENGTH[job.size]
    return int(min(1024 if job.task == "summarize" else 512, max(16, 8 * math.ceil(typical_length / 8))))


def preset(name: str) -> Design:
    """A preset by name. Raises ValueError, with similar names, if there is none."""
    if name not in presets.ALL:
        close = get_close_matches(name, presets.ALL, 3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(presets.ALL)}"
        raise ValueError(f"no preset is called {name!r}: {hint}")
    return presets.ALL[name]


def design(
    job: TrainJob, vocab: int, source_vocab: int | None, length: int, labels: int, targets: int
) -> Design:
    """The design of a new model: the preset in the size of the job, with the overrides of the job.

    `length` is the most tokens of a text, `targets` the number of targets in the training data. Raises
    ValueError for an unknown choice.
    """
    # Marian is the family that has two vocabularies in other programs, too
    default_preset = TASKS[job.task].preset if source_vocab is None else "marian"
    base_design = preset(job.preset or default_preset)
    size = size_preset(job)
    overrides = dict(job.design)
    dim = int(overrides.pop("dim", size.dim))
    layers = int(overrides.pop("layers", size.layers))
    width = int(overrides.pop("width", 4 * dim if not base_design.feedforward.gated else 8 * round(dim / 3)))
    activation = overrides.pop("activation", base_design.feedforward.activation)
    stacks: dict[str, Any] = {
        name: replace(stack, layers=int(overrides.pop(f"{name}_layers", layers)))
        for name in ("encoder", "decoder")
        if isinstance(stack := getattr(base_design, name), StackDesign)
    }
    position = base_design.position
    if isinstance(position, LearnedPositions | Sinusoidal | Rotary):
        position = replace(position, length=max(length, 8 if job.task == "lm" else 512))
    heads = int(overrides.pop("heads", size.heads if dim == size.dim else max(1, dim // 64)))
    changes: dict[str, Any] = dict(
        vocab=vocab,
        source_vocab=source_vocab,
        dim=dim,
        heads=heads,
        head_dim=None,
        kv_heads=None,
        position=position,
        feedforward=replace(base_design.feedforward, width=width, activation=activation),
        **stacks,
        dropout=0.3 if targets < 1_000_000 else 0.1,
    )
    if TASKS[job.task].is_paired and base_design.scale_embedding:
        # embeddings of length 1 after scaling: they learn from the first step
        changes["initial"] = XavierInit()
    if job.task == "classify":
        changes["head"] = ClassificationHead(labels, pool="tanh" if base_design.decoder is None else "last")
    field_names = {f.name for f in fields(Design)}
    if unknown := sorted(overrides.keys() - field_names):
        raise ValueError(
            f"a design has no {', '.join(unknown)}: give dim, heads, layers, encoder_layers, decoder_layers, "
            f"width, activation, or one of {', '.join(sorted(field_names))}"
        )
    return base_design.but(**(changes | overrides))


def max_epochs(job: TrainJob) -> float:
    """How often a text may be seen: more often, a model learns it by heart."""
    if job.init_from:
        return 3.0
    return 8.0 if job.task == "classify" else 60.0


def recipe(job: TrainJob, targets: int, steps_per_epoch: int) -> Recipe:
    """The recipe: the job's own choices, and defaults by size and amount of data for the rest."""
    size = size_preset(job)
    overrides = {name: value for name, value in asdict(job.recipe).items() if value is not None}
    epochs = min(max_epochs(job), max(3.0, size.million_targets * 1e6 / max(1, targets)))
    steps = int(overrides.get("steps", max(MIN_STEPS, round(epochs * steps_per_epoch))))
    interval = max(1, min(1000, steps // 10))
    defaults: dict[str, Any] = dict(
        steps=steps,
        lr=size.lr if not job.init_from else size.lr / 20,
        warmup=max(1, min(2000, steps // 10)),
        eval_every=interval,
        save_every=interval,
        label_smoothing=0.1 if TASKS[job.task].is_paired else 0.0,
        ema_decay=0.999 if steps > 3000 else 0.99,
    )
    if job.average_last:
        overrides["keep_checkpoints"] = max(job.average_last, overrides.get("keep_checkpoints", 0))
    return Recipe(**(defaults | overrides))


def check_design(job: TrainJob, design: Design) -> None:
    """Raise ValueError if a model of this design cannot do the task, for lack of a stack or a head."""
    model_stacks = tuple(name for name in ("encoder", "decoder") if getattr(design, name) is not None)
    task = TASKS[job.task]
    if model_stacks not in task.stacks:
        needed = " or ".join(" and ".join(stacks) for stacks in task.stacks)
        raise ValueError(
            f"the task {job.task} needs a model with {needed}, and {job.init_from or job.preset} has "
            f"{' and '.join(model_stacks)}: choose another, such as --preset {task.preset}"
        )
    head_class = {"classify": ClassificationHead, "mlm": MaskedLMHead}.get(job.task, LMHead)
    if not isinstance(design.head, head_class):
        raise ValueError(
            f"the task {job.task} needs a {head_class.__name__} head, and {job.init_from or job.preset} has "
            f"{type(design.head).__name__}: choose another model"
        )
