"""The loop: a generator of reports. Whoever iterates trains; whoever stops iterating stops."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from keepleft.training import checkpoint, mfu
from keepleft.training.distributed import DistributedContext
from keepleft.training.ema import EMA
from keepleft.training.lr_schedule import learning_rate
from keepleft.training.optimizer import named_state
from keepleft.training.recipe import Recipe, higher_is_better
from keepleft.training.recipe import from_dict as read_recipe
from keepleft.training.step import make_step

CursorTuple = tuple[int, int]  # epoch, and steps of it that are done
# the fields of a report that metrics.jsonl has under other names
METRICS_KEYS = {
    "cross_entropy": "plain",
    "lr": "rate",
    "grad_norm": "norm",
    "tokens_per_second": "speed",
    "mfu": "share",
    "early_stopped": "tired",
}


class BatchOrder(Protocol):
    """An order of batches that can be taken up anywhere."""

    def steps(self, cursor: Any = ...) -> Iterator[tuple[CursorTuple, list[Any]]]: ...


@dataclass
class TrainReport:
    """What happened since the last report."""

    step: int  # steps done
    after: int  # those of the last report, or where the run went on from
    epoch: int
    loss: float  # per target, label-smoothed as it was trained on
    cross_entropy: float  # the cross-entropy itself
    accuracy: float  # the share of targets that had the highest score
    lr: float  # the learning rate of the last step
    grad_norm: float  # of the gradients in the last step, before clipping
    tokens: int  # targets learned from since the last report
    tokens_per_second: float  # targets a second, without evaluation and saving
    mfu: float | None  # of the device's matrix-product rate, measured
    measures: dict[str, float] = field(default_factory=dict)  # of an evaluation, if there was one
    best: bool = False  # and it was the best so far
    saved: str | None = None  # the checkpoint that was written
    notes: list[str] = field(default_factory=list)
    early_stopped: bool = False  # there was no better evaluation for so long that training stops
    last: bool = False  # there will be no further report

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without what is absent."""
        is_absent = lambda value: value is None or value is False or value in ({}, [])
        return {
            METRICS_KEYS.get(name, name): value
            for name, value in asdict(self).items()
            if not is_absent(value)
        }


@dataclass
class _TrainState:
    """Everything that changes while a model is trained."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    ema: EMA | None
    step: int = 0
    cursor: CursorTuple = (0, 0)
    best: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0  # evaluations since the best one

    def tensors(self) -> dict[str, Tensor]:
        out = {f"weights/{name}": tensor for name, tensor in self.model.state_dict().items()}
        out |= named_state(self.model, self.optimizers)
        if self.ema is not None:
            out |= {f"average/{name}": tensor for name, tensor in self.ema.weights.items()}
        return out

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "place": list(self.cursor),
            "best": self.best,
            "best_step": self.best_step,
            "waited": self.evals_since_best,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        self.cursor = (int(state["place"][0]), int(state["place"][1]))
        self.best = state["best"]
        self.best_step = state["best_step"]
        self.evals_since_best = int(state["waited"])


def train(
    model: nn.Module,
    batches: BatchOrder | Iterable[Any],
    recipe: Recipe,
    *,
    folder: str | Path | None = None,
    measure: Callable[[nn.Module], dict[str, float]] | None = None,
    stop: Callable[[], bool] = lambda: False,
    distributed: DistributedContext | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Iterator[TrainReport]:
    """Train a model in place, and say how it goes.

    At the end it holds the average of its weights, if there is one.

    `batches` is an order of batches (kl.Batches), or a plain list of batches, one for each step, gone through
    again and again. `folder` is where checkpoints are kept: if it holds some, the run goes on from the newest
    whole one, exactly as if it had never stopped. `measure` says how good the model is. `stop` is asked after
    each step: if it says so, a checkpoint is written and training ends. `about` is kept in the checkpoints
    and must be the same when a run goes on.
    """
    distributed = distributed or DistributedContext(device=next(model.parameters()).device)
    batch_order = batches if hasattr(batches, "steps") else RepeatedBatches(list(batches))  # type: ignore[arg-type]
    flop_counter = mfu.FlopCounter(model)
    train_step = make_step(
        model,
        recipe,
        distributed,
        tokens_per_step=int(getattr(batches, "tokens", 0)),
        row_length=getattr(batches, "fixed_width", None),
    )
    train_state = _TrainState(model, train_step.optimizers, train_step.ema)
    folder = None if folder is None else Path(folder)
    stored_metadata = json.loads(json.dumps(dict(metadata or {})))  # as it is kept
    notes = [] if folder is None else _resume(train_state, folder, recipe, stored_metadata, distributed)
    step_stats: list[Tensor] = []
    batch_ids: list[str] = []
    num_targets = 0
    flops = 0.0
    last_report_step = train_state.step
    start_time = time.perf_counter()
    if train_state.step >= recipe.steps or (
        recipe.patience is not None and train_state.evals_since_best >= recipe.patience
    ):
        return
    for cursor, micro_batches in batch_order.steps(train_state.cursor):  # type: ignore[union-attr]
        lr = learning_rate(recipe, train_state.step)
        target_count = distributed.all_reduce(
            torch.tensor(
                [float(sum(batch.tokens for batch in micro_batches))],
                dtype=torch.float64,
                device=distributed.device if distributed.world_size > 1 else "cpu",
            )
        )
        total_targets = max(1.0, float(target_count))
        batch_ids.append(micro_batches[0].identity if micro_batches else "")
        # a GPU would have to be waited for
        check_stats = (
            partial(_check_step, batch_ids[-1], train_state.step)
            if distributed.device.type == "cpu"
            else _skip_check
        )
        try:
            step_stats.append(train_step(micro_batches, total_targets, lr, train_state.step, check_stats))
        except torch.OutOfMemoryError as error:
            raise MemoryError(_out_of_memory_hint(micro_batches, error)) from error
        flops += sum(flop_counter(batch.inputs, batch.tokens) for batch in micro_batches)
        num_targets += int(total_targets)
        train_state.step = train_state.step + 1
        train_state.cursor = tuple(cursor)  # type: ignore[assignment]
        done = train_state.step >= recipe.steps
        stopping = done or distributed.any_rank(stop())
        due = lambda every: every is not None and train_state.step % every == 0
        if not (stopping or due(recipe.log_every) or due(recipe.eval_every) or due(recipe.save_every)):
            continue
        means = distributed.all_reduce(torch.stack(step_stats)).double().cpu()
        _check_finite(list(means), batch_ids, train_state.step - len(batch_ids))
        loss, cross_entropy, accuracy, _ = means.mean(0).tolist()
        grad_norm = float(means[-1, 3])
        seconds = max(1e-9, time.perf_counter() - start_time)
        peak_flops = (
            mfu.peak_matmul_flops(
                distributed.device, torch.bfloat16 if train_step.mixed_precision else torch.float32
            )
            if flops
            else None
        )
        report = TrainReport(
            train_state.step,
            last_report_step,
            train_state.cursor[0],
            loss,
            cross_entropy,
            accuracy,
            lr,
            grad_norm,
            num_targets,
            num_targets / seconds,
            flops / seconds / peak_flops if peak_flops else None,
            notes=notes,
        )
        notes = []
        if measure is not None and (done or due(recipe.eval_every)):
            report.measures = _evaluate(train_state, measure, distributed, train_step.loss_module)
            report.best = _update_best(train_state, recipe, report.measures, distributed)
            out_of_patience = recipe.patience is not None and train_state.evals_since_best >= recipe.patience
            if out_of_patience and not done:
                report.notes.append(
                    f"no better {recipe.metric} in {train_state.evals_since_best} evaluations: stopped"
                )
            report.early_stopped = out_of_patience and not done
            stopping = stopping or out_of_patience
        if folder is not None and (stopping or due(recipe.save_every) or report.best):
            report.saved = str(_save_checkpoint(train_state, folder, recipe, stored_metadata, distributed))
        report.last = stopping
        if (done or report.early_stopped) and train_state.ema is not None:
            train_state.ema.copy_to_model()  # the weights themselves are in the checkpoint, to go on from
        yield report
        if stopping:
            return
        step_stats = []
        batch_ids = []
        num_targets = 0
        flops = 0.0
        last_report_step = train_state.step
        start_time = time.perf_counter()


class RepeatedBatches:
    """A list of batches as an order: one for each step, from the front again when it is through."""

    def __init__(self, batches: list[Any]) -> None:
        if not batches:
            raise ValueError("there is nothing to train on: the list of batches is empty")
        self.batches = batches

    def steps(self, cursor: CursorTuple = (0, 0)) -> Iterator[tuple[CursorTuple, list[Any]]]:
        for epoch in count(cursor[0]):
            for n, batch in enumerate(self.batches):
                if (epoch, n) >= tuple(cursor):
                    yield (epoch, n + 1), batch if isinstance(batch, list) else [batch]


def _check_step(batch_id: str, step: int, stats: Tensor) -> None:
    _check_finite([stats], [batch_id], step)


def _skip_check(stats: Tensor) -> None:
    pass


def _check_finite(step_stats: list[Tensor], batch_ids: list[str], first_step: int) -> None:
    """Neither a loss nor the norm of its gradients, which all processes share, may be anything but a number."""
    for n, row in enumerate(step_stats):
        for quantity, value in (("loss", float(row[0])), ("norm of the gradients", float(row[3]))):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the {quantity} of step {first_step + n} is {value} ({batch_ids[n]}): lower the learning rate (lr), lengthen the "
                    "warm-up, clip gradients, or look at these records; the last checkpoint is from before this step"
                )


def _out_of_memory_hint(micro_batches: list[Any], error: Exception) -> str:
    shapes = (
        {name: tuple(tensor.shape) for name, tensor in micro_batches[0].inputs.items()}
        if micro_batches
        else {}
    )
    return (
        f"the device has too little memory for batches of {shapes}: halve the tokens of a micro-batch (batch.micro_tokens), set "
        f"recipe.activation_checkpointing, leave out longer texts (batch.max_length), choose bfloat16, or shard with fsdp ({error})"
    )


def _evaluate(
    train_state: _TrainState,
    measure: Callable[[nn.Module], dict[str, float]],
    distributed: DistributedContext,
    loss_module: nn.Module,
) -> dict[str, float]:
    train_state.model.eval()
    try:
        with (
            torch.no_grad(),
            train_state.ema.average_parameters() if train_state.ema is not None else nullcontext(),
            distributed.unsharded(loss_module),
        ):
            return measure(train_state.model)
    finally:
        train_state.model.train()


def _update_best(
    train_state: _TrainState, recipe: Recipe, measures: dict[str, float], distributed: DistributedContext
) -> bool:
    if recipe.metric not in measures:
        raise ValueError(f"the metric {recipe.metric!r} is not measured: there are {', '.join(measures)}")
    value = distributed.broadcast(measures[recipe.metric])
    sign = 1.0 if higher_is_better(recipe.metric) else -1.0
    if not math.isnan(value) and (train_state.best is None or sign * value > sign * train_state.best):
        train_state.best = value
        train_state.best_step = train_state.step
        train_state.evals_since_best = 0
        return True
    train_state.evals_since_best += 1
    return False


def _save_checkpoint(
    train_state: _TrainState,
    folder: Path,
    recipe: Recipe,
    metadata: dict[str, Any],
    distributed: DistributedContext,
) -> Path:
    failure: OSError | None = None
    if distributed.rank == 0 or distributed.strategy == "fsdp":
        state = {
            **train_state.state(),
            "recipe": asdict(recipe),
            "about": metadata,
            "world": distributed.world_size,
            "torch": str(torch.__version__),
        }
        try:
            checkpoint.save(
                folder,
                train_state.step,
                train_state.tensors(),
                state,
                rank=distributed.rank,
                sharded=distributed.strategy == "fsdp",
            )
            if distributed.rank == 0:
                checkpoint.prune(folder, train_state.step, recipe.keep_checkpoints, train_state.best_step)
        except OSError as error:
            failure = error
    directory = checkpoint.step_folder(folder, train_state.step)
    if distributed.any_rank(failure is not None):  # all wait here for the first one
        raise failure or OSError(
            f"the checkpoint {directory} could not be written by another process: see what it says"
        )
    return directory


def _resume(
    train_state: _TrainState,
    folder: Path,
    recipe: Recipe,
    metadata: dict[str, Any],
    distributed: DistributedContext,
) -> list[str]:
    """Take up the newest whole checkpoint, if there is one; what is wrong with newer ones is told."""
    newest = checkpoint.latest(folder)
    if newest is None:
        return []
    directory, state, errors = newest
    stored_recipe = read_recipe(state["recipe"])
    changes = recipe.differences(stored_recipe)
    changes += [
        f"{name} was {state['about'].get(name)!r} and is {metadata.get(name)!r}"
        for name in sorted(state["about"].keys() | metadata.keys())
        if state["about"].get(name) != metadata.get(name)
    ]
    if changes:
        raise ValueError(
            f"the run in {folder} cannot go on, because it has changed: {'; '.join(changes)}. Change it back, or "
            "start a new run in another folder"
        )
    checkpoint.load(
        directory,
        train_state.tensors(),
        sharded=bool(state["sharded"]),
        distributed=distributed.strategy == "fsdp",
    )
    train_state.restore(state)
    if distributed.rank == 0 and not errors:  # a crash between saving and tidying up leaves one too many
        checkpoint.prune(folder, train_state.step, recipe.keep_checkpoints, train_state.best_step)
    if recipe.metric != stored_recipe.metric:
        train_state.best = None
        train_state.best_step = None
        train_state.evals_since_best = 0
    return [
        *(f"{message}; going on from {directory.name}" for message in errors),
        f"going on from {directory.name}",
    ]
