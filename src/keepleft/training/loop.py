"""The training loop, a generator of reports: iterating trains, and to stop iterating stops training."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from keepleft.models.transformer import Model
from keepleft.training import checkpoint, mfu
from keepleft.training.distributed import DistributedContext
from keepleft.training.ema import EMA
from keepleft.training.lr_schedule import learning_rate
from keepleft.training.optimizer import named_state
from keepleft.training.recipe import Recipe, higher_is_better
from keepleft.training.recipe import from_dict as read_recipe
from keepleft.training.step import TrainBatch, make_step

CursorTuple = tuple[int, int]  # epoch, and the steps of it that are done
# names in metrics.jsonl where they differ from the fields of TrainReport
METRICS_KEYS = {
    "cross_entropy": "plain",
    "lr": "rate",
    "grad_norm": "norm",
    "tokens_per_second": "speed",
    "mfu": "share",
    "early_stopped": "tired",
}
UNEQUAL_KEYS = ("speed", "share", "notes")  # of metrics.jsonl, in which equal runs differ


@runtime_checkable
class BatchOrder(Protocol):
    """A deterministic order of batches that can start anywhere, such as `kl.Batches`."""

    def steps(self, cursor: CursorTuple = ...) -> Iterator[tuple[CursorTuple, Sequence[TrainBatch]]]:
        """From a cursor on, endlessly: the cursor after each step, and the micro-batches of the step."""
        ...


@dataclass
class TrainReport:
    """The steps since the last report, and their evaluation and checkpoint, if any."""

    step: int  # steps done
    after: int  # steps done at the last report, or at the checkpoint that the run resumed from
    epoch: int
    loss: float  # per target, label-smoothed, as trained on
    cross_entropy: float  # per target, without label smoothing
    accuracy: float  # the fraction of targets that had the highest score
    lr: float  # of the last step
    grad_norm: float  # of the last step, before clipping
    tokens: int  # trained on since the last report, padding and the source of an encoder-decoder not counted
    tokens_per_second: float  # evaluation and saving not counted
    mfu: float | None  # model FLOPs utilization, of the measured peak; None on a CPU
    measures: dict[str, float] = field(default_factory=dict)  # of the evaluation
    best: bool = False  # the evaluation is the best so far
    saved: str | None = None  # the checkpoint that was written
    notes: list[str] = field(default_factory=list)
    early_stopped: bool = False  # `patience` evaluations in a row were no better: training stops
    last: bool = False  # there will be no further report
    resumed_report: str | None = None  # that of the checkpoint resumed from, as a line of metrics.jsonl

    def to_dict(self) -> dict[str, Any]:
        """As a line of metrics.jsonl, without what is absent."""
        is_absent = lambda value: value is None or value is False or value in ({}, [])
        return {
            METRICS_KEYS.get(name, name): value
            for name, value in asdict(self).items()
            if not is_absent(value) and name != "resumed_report"
        }

    def to_timeless_line(self) -> str:
        """As a line of metrics.jsonl, without what differs between equal runs."""
        return json.dumps({name: value for name, value in self.to_dict().items() if name not in UNEQUAL_KEYS})


@dataclass
class _TrainState:
    """What changes during training, and is saved in checkpoints."""

    model: Model
    optimizers: list[torch.optim.Optimizer]
    ema: EMA | None
    step: int = 0
    cursor: CursorTuple = (0, 0)
    best: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint: weights, optimizer state and EMA (under "average/")."""
        out = {f"weights/{name}": tensor for name, tensor in self.model.state_dict().items()}
        out |= named_state(self.model, self.optimizers)
        if self.ema is not None:
            out |= {f"average/{name}": tensor for name, tensor in self.ema.weights.items()}
        return out

    def state(self) -> dict[str, Any]:
        """The numbers of a checkpoint."""
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


@dataclass
class _Interval:
    """The steps since the last report."""

    first_step: int
    start_time: float = field(default_factory=time.perf_counter)
    stats: list[Tensor] = field(default_factory=list)  # (4,) of each step, as in TrainStep.collect_stats
    batch_ids: list[str] = field(default_factory=list)  # of the first micro-batch of each step
    num_tokens: int = 0
    untimed_tokens: int = 0  # of them, those before the run was resumed
    flops: float = 0.0

    def state(self, distributed: DistributedContext) -> dict[str, Any] | None:
        """For a checkpoint between two reports: the steps so far, of all processes together."""
        if not self.stats:
            return None
        stats = distributed.all_reduce(torch.stack(self.stats))
        return {
            "first_step": self.first_step,
            "stats": stats.double().tolist(),
            "dtype": str(stats.dtype).removeprefix("torch."),
            "batch_ids": self.batch_ids,
            "num_tokens": self.num_tokens,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], distributed: DistributedContext) -> _Interval:
        dtype = getattr(torch, state["dtype"])
        stats = torch.tensor(state["stats"], dtype=dtype, device=distributed.device)
        if distributed.rank:  # the first process has the sums
            stats.zero_()
        return cls(
            int(state["first_step"]),
            stats=list(stats),
            batch_ids=list(state["batch_ids"]),
            num_tokens=int(state["num_tokens"]),
            untimed_tokens=int(state["num_tokens"]),
        )


def train(
    model: Model,
    batches: BatchOrder | Iterable[TrainBatch],
    recipe: Recipe,
    *,
    folder: str | Path | None = None,
    measure: Callable[[Model], dict[str, float]] | None = None,
    stop: Callable[[], bool] = lambda: False,
    distributed: DistributedContext | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Iterator[TrainReport]:
    """Train a model in place, and yield a report every `recipe.log_every` steps.

    At the end of training the model holds the EMA of its weights, if the recipe has one.

    `batches` is an order of batches (kl.Batches), or a list of batches, one for each step, that is repeated.
    `folder` is where checkpoints are saved; if it has some, the run resumes from the newest undamaged one,
    bit for bit as if it had never stopped. `measure` evaluates the model. `stop` is called after each step;
    if it returns True, a checkpoint is saved and training ends. `metadata` is stored in the checkpoints, and
    must be the same when a run is resumed.

    Raises ValueError if the recipe, the metadata or the model has changed since the checkpoint,
    FloatingPointError if the loss or the gradient norm is not finite, MemoryError if the device runs out of
    memory.
    """
    distributed = distributed or DistributedContext(device=next(model.parameters()).device)
    batch_order = batches if isinstance(batches, BatchOrder) else RepeatedBatches(list(batches))
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
    stored_metadata = json.loads(json.dumps(dict(metadata or {})))  # as it is read back: tuples become lists
    notes: list[str] = []
    interval = _Interval(0)
    resumed_report: str | None = None
    if folder is not None and (resumed := _resume(train_state, folder, recipe, stored_metadata, distributed)):
        notes = resumed.notes
        interval = resumed.interval
        resumed_report = resumed.report
    out_of_patience = recipe.patience is not None and train_state.evals_since_best >= recipe.patience
    if train_state.step >= recipe.steps or out_of_patience:
        return
    save_time = time.monotonic()  # of the last checkpoint

    def save(
        *, report: str | None = None, interval: dict[str, Any] | None = None, timed: bool = False
    ) -> None:
        assert folder is not None
        _save_checkpoint(
            train_state,
            folder,
            recipe,
            stored_metadata,
            distributed,
            report=report,
            interval=interval,
            timed=timed,
        )

    for cursor, micro_batches in batch_order.steps(train_state.cursor):
        lr = learning_rate(recipe, train_state.step)
        total_targets, total_tokens = count_step(micro_batches, distributed)
        interval.batch_ids.append(micro_batches[0].identity if micro_batches else "")
        check_stats: Callable[[Tensor], None] = lambda stats: None
        if distributed.device.type == "cpu":  # a GPU would have to be waited for
            check_stats = partial(_check_step, interval.batch_ids[-1], train_state.step)
        try:
            stats = train_step(micro_batches, total_targets, lr, train_state.step, check_stats)
        except torch.OutOfMemoryError as error:
            raise MemoryError(out_of_memory_hint(micro_batches, error)) from error
        interval.stats.append(stats)
        interval.flops += recipe.passes * sum(
            flop_counter(batch.inputs, batch.tokens) for batch in micro_batches
        )
        interval.num_tokens += total_tokens
        train_state.step += 1
        train_state.cursor = (cursor[0], cursor[1])
        done = train_state.step >= recipe.steps
        is_late = recipe.save_minutes > 0 and time.monotonic() - save_time >= 60 * recipe.save_minutes
        stop_requested, timed_save = distributed.any_rank_each(
            stop(), folder is not None and distributed.rank == 0 and is_late
        )
        stopping = done or stop_requested
        due = lambda every: every is not None and train_state.step % every == 0
        if not (stopping or due(recipe.log_every) or due(recipe.eval_every) or due(recipe.save_every)):
            if timed_save:
                save(interval=interval.state(distributed), timed=True)
                save_time = time.monotonic()
            continue
        dtype = torch.bfloat16 if train_step.mixed_precision else torch.float32
        report = _make_report(train_state, interval, lr, notes, distributed, dtype)
        report.resumed_report = resumed_report
        notes = []
        resumed_report = None
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
        report.last = stopping
        if folder is not None and (stopping or due(recipe.save_every) or report.best):
            report.saved = str(checkpoint.step_folder(folder, train_state.step))
            save(report=report.to_timeless_line())
            save_time = time.monotonic()
        elif timed_save:
            save(report=report.to_timeless_line(), timed=True)
            save_time = time.monotonic()
        if (done or report.early_stopped) and train_state.ema is not None:
            train_state.ema.copy_to_model()  # the weights themselves are in the checkpoint, to resume from
        yield report
        if stopping:
            return
        interval = _Interval(train_state.step)


def count_step(micro_batches: Sequence[TrainBatch], distributed: DistributedContext) -> tuple[float, int]:
    """The targets of a step in all processes, at least 1, to divide by; and its tokens.

    A text has fewer targets than tokens where it is classified, or where only masked tokens are predicted.
    """
    device = distributed.device if distributed.world_size > 1 else "cpu"
    num_targets = sum(batch.tokens for batch in micro_batches)
    num_tokens = sum(
        mfu.measure_sequences(batch.inputs, "tokens")[0] if "tokens" in batch.inputs else batch.tokens
        for batch in micro_batches
        if batch.tokens
    )
    counts = torch.tensor([num_targets, num_tokens], dtype=torch.float64, device=device)
    total_targets, total_tokens = distributed.all_reduce(counts).tolist()
    return max(1.0, total_targets), int(total_tokens)


def _make_report(
    train_state: _TrainState,
    interval: _Interval,
    lr: float,
    notes: list[str],
    distributed: DistributedContext,
    dtype: torch.dtype,
) -> TrainReport:
    """The report of an interval, before evaluation and saving. `dtype` is that of the matrix products."""
    stats = distributed.all_reduce(torch.stack(interval.stats)).double().cpu()  # waits for the GPU
    _check_finite(list(stats), interval.batch_ids, interval.first_step)
    loss, cross_entropy, accuracy, _ = stats.mean(0).tolist()
    seconds = max(1e-9, time.perf_counter() - interval.start_time)
    return TrainReport(
        step=train_state.step,
        after=interval.first_step,
        epoch=train_state.cursor[0],
        loss=loss,
        cross_entropy=cross_entropy,
        accuracy=accuracy,
        lr=lr,
        grad_norm=float(stats[-1, 3]),
        tokens=interval.num_tokens,
        tokens_per_second=(interval.num_tokens - interval.untimed_tokens) / seconds,
        mfu=mfu.model_flops_utilization(interval.flops, seconds, distributed.device, dtype),
        notes=notes,
    )


class RepeatedBatches:
    """A list of batches as an order: one for each step, repeated epoch after epoch."""

    def __init__(self, batches: Sequence[TrainBatch]) -> None:
        if not batches:
            raise ValueError("there is nothing to train on: the list of batches is empty")
        self.batches = batches

    def steps(self, cursor: CursorTuple = (0, 0)) -> Iterator[tuple[CursorTuple, Sequence[TrainBatch]]]:
        for epoch in count(cursor[0]):
            for n, batch in enumerate(self.batches):
                if (epoch, n) >= tuple(cursor):
                    yield (epoch, n + 1), batch if isinstance(batch, list) else [batch]


def _check_step(batch_id: str, step: int, stats: Tensor) -> None:
    _check_finite([stats], [batch_id], step)


def _check_finite(step_stats: list[Tensor], batch_ids: list[str], first_step: int) -> None:
    """Raise FloatingPointError, with the step and its batch, if a loss or gradient norm is not finite."""
    for n, row in enumerate(step_stats):
        for quantity, value in (("loss", float(row[0])), ("norm of the gradients", float(row[3]))):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the {quantity} of step {first_step + n} is {value} ({batch_ids[n]}): lower the "
                    "learning rate (lr), lengthen the warm-up, clip gradients, or look at these records; the "
                    "last checkpoint is from before this step"
                )


def out_of_memory_hint(micro_batches: Sequence[TrainBatch], error: Exception) -> str:
    inputs = micro_batches[0].inputs if micro_batches else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    return (
        f"the device has too little memory for batches of {shapes}: halve the tokens of a micro-batch "
        "(batch.micro_tokens), set recipe.activation_checkpointing, leave out longer texts "
        f"(batch.max_length), choose bfloat16, or shard with fsdp ({error})"
    )


def _evaluate(
    train_state: _TrainState,
    measure: Callable[[Model], dict[str, float]],
    distributed: DistributedContext,
    loss_module: Any,
) -> dict[str, float]:
    """Call `measure` in evaluation mode, with the EMA in place of the weights if there is one."""
    train_state.model.eval()
    try:
        with (
            torch.no_grad(),
            train_state.ema.average_parameters() if train_state.ema is not None else nullcontext(),
            distributed.unshard(loss_module),
        ):
            return measure(train_state.model)
    finally:
        train_state.model.train()


def _update_best(
    train_state: _TrainState, recipe: Recipe, measures: dict[str, float], distributed: DistributedContext
) -> bool:
    """Whether this evaluation is the best so far; the first process decides for all."""
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
    *,
    report: str | None = None,
    interval: dict[str, Any] | None = None,
    timed: bool = False,
) -> None:
    """Save a checkpoint, with the report of its step, or with the interval since the last report.

    One that is `timed` is no part of the schedule: it lies elsewhere, until the next one of the schedule.
    """
    save_folder = folder / checkpoint.TIMED_FOLDER if timed else folder
    failure: OSError | None = None
    if distributed.rank == 0 or distributed.strategy == "fsdp":
        state = {
            **train_state.state(),
            "recipe": asdict(recipe),
            "about": metadata,
            "world": distributed.world_size,
            "torch": str(torch.__version__),
            "report": report,
            "interval": interval,
        }
        try:
            checkpoint.save(
                save_folder,
                train_state.step,
                train_state.tensors(),
                state,
                rank=distributed.rank,
                sharded=distributed.strategy == "fsdp",
            )
            if distributed.rank == 0 and timed:
                checkpoint.prune(save_folder, train_state.step, 1, None)
            elif distributed.rank == 0:
                checkpoint.prune(folder, train_state.step, recipe.keep_checkpoints, train_state.best_step)
                checkpoint.remove_timed(folder)
        except OSError as error:
            failure = error
    directory = checkpoint.step_folder(save_folder, train_state.step)
    if distributed.any_rank(failure is not None):  # all wait here for the first process
        raise failure or OSError(
            f"the checkpoint {directory} could not be written by another process: see what it says"
        )


@dataclass(frozen=True)
class _Resumed:
    """What a checkpoint held besides the state of training."""

    notes: list[str]  # from which checkpoint, and which are damaged
    interval: _Interval
    report: str | None


def _resume(
    train_state: _TrainState,
    folder: Path,
    recipe: Recipe,
    metadata: dict[str, Any],
    distributed: DistributedContext,
) -> _Resumed | None:
    """Load the newest undamaged checkpoint, if there is one.

    Raises ValueError if the recipe, the metadata or the model has changed.
    """
    newest = checkpoint.latest(folder)
    if newest is None:
        return None
    directory, state, errors = newest
    stored_recipe = read_recipe(state["recipe"])
    stored_metadata = state["about"]
    changes = recipe.differences(stored_recipe)
    changes += [
        f"{name} was {stored_metadata.get(name)!r} and is {metadata.get(name)!r}"
        for name in sorted(stored_metadata.keys() | metadata.keys())
        if stored_metadata.get(name) != metadata.get(name)
    ]
    if changes:
        raise ValueError(
            f"the run in {folder} cannot go on, because it has changed: {'; '.join(changes)}. Change it "
            "back, or start a new run in another folder"
        )
    checkpoint.load(
        directory,
        train_state.tensors(),
        sharded=bool(state["sharded"]),
        distributed=distributed.strategy == "fsdp",
    )
    train_state.restore(state)
    if distributed.rank == 0 and not errors:  # a crash between saving and pruning leaves one too many
        checkpoint.prune(folder, train_state.step, recipe.keep_checkpoints, train_state.best_step)
        if directory.parent == folder:
            checkpoint.remove_timed(folder)
    if recipe.metric != stored_recipe.metric:
        train_state.best = None
        train_state.best_step = None
        train_state.evals_since_best = 0
    notes = [
        *(f"{message}; going on from {directory.name}" for message in errors),
        f"going on from {directory.name}",
    ]
    interval = _Interval(train_state.step)
    if (interval_state := state.get("interval")) is not None:
        interval = _Interval.restore(interval_state, distributed)
    return _Resumed(notes, interval, state.get("report"))
