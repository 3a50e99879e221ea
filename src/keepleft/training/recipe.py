"""The recipe of a training run: its hyperparameters, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from keepleft import checks

SCHEDULES = ("constant", "cosine", "inverse_sqrt", "linear", "stable_decay")
OPTIMIZERS = ("adamw", "muon")
PRECISIONS = ("auto", "bfloat16", "float32")
CHANGEABLE = (  # fields that may change when a run is resumed
    "log_every",
    "eval_every",
    "save_every",
    "save_minutes",
    "keep_checkpoints",
    "metric",
    "patience",
    "compile",
    "activation_checkpointing",
    "cuda_graph",
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All hyperparameters of a training run except those of the data and of the model.

    Args:
        steps: optimizer steps
        lr: the peak learning rate
        warmup: steps of linear warm-up to the peak
        schedule: what follows the warm-up; inverse_sqrt is that of the 2017 Transformer, stable_decay
            stays at the peak and falls at the end
        min_lr_ratio: the last learning rate, as a fraction of the peak (cosine, linear, stable_decay)
        decay: the fraction of the steps in which stable_decay falls
        optimizer: adamw, or muon (for the matrices inside the layers; adamw for the rest)
        betas: AdamW's decay rates of the mean gradient and of the mean squared gradient
        weight_decay: decoupled weight decay, multiplied by the learning rate; norms and biases have none
        max_grad_norm: gradient clipping: the largest norm of all gradients together; 0: no clipping
        label_smoothing: the probability of each target that is spread over the vocabulary
        r_drop: R-Drop: every batch goes through the model twice, and passes that differ by dropout are pulled
            together with this weight (5 suits small translation data); a step takes twice as long; 0: off
        ema_decay: keep an exponential moving average (EMA) of the weights with this decay (0.999), and
            evaluate and save that; 0: none
        precision: data type of the matrix products; auto is bfloat16 on a GPU that supports it, float32
            elsewhere
        activation_checkpointing: recompute the activations of each layer in the backward pass: less memory, a
            third more time
        compile: compile the model with torch.compile; if not given, where it pays off
        cuda_graph: capture a step as a CUDA graph and replay it (one GPU, batches of one shape); if not
            given, where possible
        log_every: steps between reports
        eval_every: steps between evaluations. In Python, only at the end if not given
        save_every: steps between checkpoints. In Python, only at the end if not given
        save_minutes: minutes after which a checkpoint is saved between those of save_every, so that a crash
            loses no more; it replaces the previous one, and influences no result; 0: none
        keep_checkpoints: how many of the latest checkpoints to keep; the best one is kept as well
        metric: the metric that the best checkpoint is chosen by
        patience: early stopping after this many evaluations without a better one; if not given, never
        seed: the seed of dropout, of the order of the data and of new weights
    """

    steps: int = 1000
    lr: float = 3e-4
    warmup: int = 100
    schedule: Literal["constant", "cosine", "inverse_sqrt", "linear", "stable_decay"] = "cosine"
    min_lr_ratio: float = 0.1
    decay: float = 0.2
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    label_smoothing: float = 0.0
    r_drop: float = 0.0
    ema_decay: float = 0.0
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    activation_checkpointing: bool = False
    compile: bool | None = None
    cuda_graph: bool | None = None
    log_every: int = 10
    eval_every: int | None = None
    save_every: int | None = None
    save_minutes: float = 5.0
    keep_checkpoints: int = 3
    metric: str = "loss"
    patience: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # YAML and JSON have lists only
        for name in ("steps", "log_every", "keep_checkpoints"):
            checks.check_int(name, getattr(self, name))
        for name in ("warmup", "seed"):
            checks.check_int(name, getattr(self, name), minimum=0)
        for name in ("eval_every", "save_every", "patience"):
            if getattr(self, name) is not None:
                checks.check_int(name, getattr(self, name))
        checks.check_number("lr", self.lr, above=0)
        for name, allowed in (("schedule", SCHEDULES), ("optimizer", OPTIMIZERS), ("precision", PRECISIONS)):
            checks.check_choice(name, getattr(self, name), allowed)
        for name in ("save_minutes", "r_drop"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 0")
        numbers = (
            "save_minutes",
            "r_drop",
            "min_lr_ratio",
            "decay",
            "label_smoothing",
            "ema_decay",
            "weight_decay",
            "max_grad_norm",
        )
        for name in numbers:
            checks.check_number(name, getattr(self, name))
        for name in ("min_lr_ratio", "decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: it is a fraction, from 0 to 1")
        for name, value in (
            ("label_smoothing", self.label_smoothing),
            ("ema_decay", self.ema_decay),
            ("betas[0]", self.betas[0]),
            ("betas[1]", self.betas[1]),
        ):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} is {value}: it must be at least 0 and below 1")

    @property
    def passes(self) -> int:
        """How often a batch goes through the model in one step."""
        return 2 if self.r_drop else 1

    def differences(self, other: Recipe) -> list[str]:
        """The changes that forbid resuming a run of recipe `other`: any field that influences the weights."""
        return [
            f"{f.name} was {getattr(other, f.name)!r} and is {getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name not in CHANGEABLE and getattr(self, f.name) != getattr(other, f.name)
        ]


def higher_is_better(metric: str) -> bool:
    """Whether more of this metric is better (accuracy, BLEU), or less (losses)."""
    return metric not in ("loss", "plain", "perplexity", "smoothed")


def from_dict(data: dict[str, Any]) -> Recipe:
    """A recipe from JSON or YAML data. Raises ValueError for an unknown field."""
    if unknown := sorted(data.keys() - {f.name for f in fields(Recipe)}):
        raise ValueError(
            f"a recipe has no {', '.join(unknown)}: it has {', '.join(f.name for f in fields(Recipe))}"
        )
    return Recipe(**data)
