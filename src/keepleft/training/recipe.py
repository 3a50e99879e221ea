"""How a model is trained, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from keepleft import checks

SCHEDULES = ("constant", "cosine", "inverse_sqrt", "linear", "stable_decay")
OPTIMIZERS = ("adamw", "muon")
# may change in a run
CHANGEABLE = (
    "log_every",
    "eval_every",
    "save_every",
    "keep_checkpoints",
    "metric",
    "patience",
    "compile",
    "activation_checkpointing",
    "cuda_graph",
)
PRECISIONS = ("auto", "bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All numbers of a training run but those of the data and of the model.

    Args:
        steps: how often the weights change
        lr: the highest learning rate
        warmup: steps until it is reached
        schedule: what follows: inverse_sqrt is that of 2017, stable_decay stays at the peak and falls at the end
        min_lr_ratio: the last learning rate, as a share of the highest (cosine, linear, stable_decay)
        decay: the share of the steps in which stable_decay falls
        optimizer: adamw, or muon (for matrices; adamw for the rest)
        betas: how long AdamW remembers gradients and their squares
        weight_decay: how far weights shrink at each step, times the learning rate; norms and biases do not
        max_grad_norm: the largest norm of all gradients together; 0: any
        label_smoothing: how much of each target is spread over the whole vocabulary
        ema_decay: keep a moving average of the weights with this decay (0.999), and evaluate and save that; 0: none
        precision: of the matrix products; auto is bfloat16 on a GPU that has it, float32 elsewhere
        activation_checkpointing: keep fewer activations and compute them again going back: less memory, a third more time
        compile: translate the model for the device; None: where it pays
        cuda_graph: capture the kernels of a step once as a CUDA graph and replay it (one GPU, batches of one shape); None: where it can be done
        log_every: steps between reports
        eval_every: steps between evaluations; None: only at the end (`keepleft train` takes a tenth of the steps)
        save_every: steps between checkpoints; None: only at the end (`keepleft train` takes a tenth of the steps)
        keep_checkpoints: how many checkpoints stay; the best one stays besides
        metric: which measure is the best one chosen by
        patience: evaluations without a better one until training stops; None: never
        seed: of dropout, of the order of the data and of fresh weights

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
    ema_decay: float = 0.0
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    activation_checkpointing: bool = False
    compile: bool | None = None
    cuda_graph: bool | None = None
    log_every: int = 10
    eval_every: int | None = None
    save_every: int | None = None
    keep_checkpoints: int = 3
    metric: str = "loss"
    patience: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # YAML has lists only
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
        for name in (
            "min_lr_ratio",
            "decay",
            "label_smoothing",
            "ema_decay",
            "weight_decay",
            "max_grad_norm",
        ):
            checks.check_number(name, getattr(self, name))
        for name in ("min_lr_ratio", "decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: it is a share, from 0 to 1")
        for name in ("label_smoothing", "ema_decay", *(f"betas[{n}]" for n in range(2))):
            value = self.betas[int(name[6])] if name.startswith("betas") else getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} is {value}: it must be at least 0 and below 1")

    def differences(self, other: Recipe) -> list[str]:
        """What a run that goes on may not change: everything that decides where the weights go next."""
        return [
            f"{f.name} was {getattr(other, f.name)!r} and is {getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name not in CHANGEABLE and getattr(self, f.name) != getattr(other, f.name)
        ]


def higher_is_better(metric: str) -> bool:
    return metric not in ("loss", "plain", "perplexity", "smoothed")


def from_dict(data: dict[str, Any]) -> Recipe:
    """A recipe from plain data; an unknown field is an error that names it."""
    if unknown := sorted(data.keys() - {f.name for f in fields(Recipe)}):
        raise ValueError(
            f"a recipe has no {', '.join(unknown)}: it has {', '.join(f.name for f in fields(Recipe))}"
        )
    return Recipe(**data)
