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

from keepleft.training import checkpoint, meter
from keepleft.training.average import Average
from keepleft.training.optimizer import memory
from keepleft.training.parallel import Team
from keepleft.training.recipe import Recipe, higher_is_better
from keepleft.training.recipe import read as read_recipe
from keepleft.training.schedule import rate
from keepleft.training.step import set_up

Place = tuple[int, int]  # epoch, and steps of it that are done


class Batches(Protocol):
    """An order of batches that can be taken up anywhere."""

    def steps(self, place: Any = ...) -> Iterator[tuple[Place, list[Any]]]: ...


@dataclass
class Report:
    """What happened since the last report."""

    step: int                    # steps done
    after: int                   # those of the last report, or where the run went on from
    epoch: int
    loss: float                  # per target, label-smoothed as it was trained on
    plain: float                 # the cross-entropy itself
    accuracy: float              # the share of targets that had the highest score
    rate: float                  # the learning rate of the last step
    norm: float                  # of the gradients in the last step, before clipping
    tokens: int                  # targets learned from since the last report
    speed: float                 # targets a second, without evaluation and saving
    share: float | None          # of the device's matrix-product rate, measured
    measures: dict[str, float] = field(default_factory=dict)  # of an evaluation, if there was one
    best: bool = False           # and it was the best so far
    saved: str | None = None     # the checkpoint that was written
    notes: list[str] = field(default_factory=list)
    tired: bool = False          # there was no better evaluation for so long that training stops
    last: bool = False           # there will be no further report

    def record(self) -> dict[str, Any]:
        """As plain data, without what is absent."""
        absent = lambda value: value is None or value is False or value in ({}, [])
        return {name: value for name, value in asdict(self).items() if not absent(value)}


@dataclass
class _Run:
    """Everything that changes while a model is trained."""

    model: nn.Module
    chosen: list[torch.optim.Optimizer]
    average: Average | None
    step: int = 0
    place: Place = (0, 0)
    best: float | None = None
    best_step: int | None = None
    waited: int = 0  # evaluations since the best one

    def tensors(self) -> dict[str, Tensor]:
        out = {f"weights/{name}": tensor for name, tensor in self.model.state_dict().items()}
        out |= memory(self.model, self.chosen)
        if self.average is not None:
            out |= {f"average/{name}": tensor for name, tensor in self.average.weights.items()}
        return out

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "place": list(self.place), "best": self.best, "best_step": self.best_step,
                "waited": self.waited}

    def restore(self, found: Mapping[str, Any]) -> None:
        self.step, self.place = int(found["step"]), (int(found["place"][0]), int(found["place"][1]))
        self.best, self.best_step, self.waited = found["best"], found["best_step"], int(found["waited"])


def train(model: nn.Module, batches: Batches | Iterable[Any], recipe: Recipe, *, folder: str | Path | None = None,
          measure: Callable[[nn.Module], dict[str, float]] | None = None, stop: Callable[[], bool] = lambda: False,
          team: Team | None = None, about: Mapping[str, Any] | None = None) -> Iterator[Report]:
    """Train a model in place, and say how it goes. At the end it holds the average of its weights, if there is one.

    `batches` is an order of batches (kl.Batches), or a plain list of batches, one for each step, gone through again and again.
    `folder` is where checkpoints are kept: if it holds some, the run goes on from the newest whole one, exactly as if it had
    never stopped. `measure` says how good the model is. `stop` is asked after each step: if it says so, a checkpoint is written
    and training ends. `about` is kept in the checkpoints and must be the same when a run goes on.
    """
    team = team or Team(device=next(model.parameters()).device)
    order = batches if hasattr(batches, "steps") else Repeated(list(batches))  # type: ignore[arg-type]
    work = meter.Work(model)
    once = set_up(model, recipe, team, tokens=int(getattr(batches, "tokens", 0)), wide=getattr(batches, "fixed", None))
    run = _Run(model, once.chosen, once.average)
    folder, told = None if folder is None else Path(folder), json.loads(json.dumps(dict(about or {})))  # as it is kept
    notes = [] if folder is None else _go_on(run, folder, recipe, told, team)
    tally: list[Tensor] = []
    names: list[str] = []
    asked, arithmetic, before, began = 0, 0.0, run.step, time.perf_counter()
    if run.step >= recipe.steps or (recipe.patience is not None and run.waited >= recipe.patience):
        return
    for place, step in order.steps(run.place):  # type: ignore[union-attr]
        now = rate(recipe, run.step)
        counted = team.total(torch.tensor([float(sum(batch.tokens for batch in step))], dtype=torch.float64, device=team.device
                             if team.world > 1 else "cpu"))
        total = max(1.0, float(counted))
        names.append(step[0].identity if step else "")
        look = partial(_look, names[-1], run.step) if team.device.type == "cpu" else _pass  # a GPU would have to be waited for
        try:
            tally.append(once(step, total, now, run.step, look))
        except torch.OutOfMemoryError as error:
            raise MemoryError(_knobs(step, error)) from error
        arithmetic += sum(work(batch.inputs, batch.tokens) for batch in step)
        asked += int(total)
        run.step, run.place = run.step + 1, tuple(place)  # type: ignore[assignment]
        done = run.step >= recipe.steps
        ending = done or team.any(stop())
        due = lambda every: every is not None and run.step % every == 0
        if not (ending or due(recipe.report) or due(recipe.evaluate) or due(recipe.save)):
            continue
        means = team.total(torch.stack(tally)).double().cpu()
        _check(list(means), names, run.step - len(names))
        loss, plain, right, _ = means.mean(0).tolist()
        norm = float(means[-1, 3])
        seconds = max(1e-9, time.perf_counter() - began)
        peak = meter.matmul_rate(team.device, torch.bfloat16 if once.half else torch.float32) if arithmetic else None
        report = Report(run.step, before, run.place[0], loss, plain, right, now, norm, asked, asked / seconds,
                        arithmetic / seconds / peak if peak else None, notes=notes)
        notes = []
        if measure is not None and (done or due(recipe.evaluate)):
            report.measures = _measured(run, measure, team, once.pupil)
            report.best = _better(run, recipe, report.measures, team)
            tired = recipe.patience is not None and run.waited >= recipe.patience
            if tired and not done:
                report.notes.append(f"no better {recipe.metric} in {run.waited} evaluations: stopped")
            report.tired = tired and not done
            ending = ending or tired
        if folder is not None and (ending or due(recipe.save) or report.best):
            report.saved = str(_saved(run, folder, recipe, told, team))
        report.last = ending
        if (done or report.tired) and run.average is not None:
            run.average.settle()  # the weights themselves are in the checkpoint, to go on from
        yield report
        if ending:
            return
        tally, names, asked, arithmetic, before, began = [], [], 0, 0.0, run.step, time.perf_counter()


class Repeated:
    """A list of batches as an order: one for each step, from the front again when it is through."""

    def __init__(self, batches: list[Any]) -> None:
        if not batches:
            raise ValueError("there is nothing to train on: the list of batches is empty")
        self.batches = batches

    def steps(self, place: Place = (0, 0)) -> Iterator[tuple[Place, list[Any]]]:
        for epoch in count(place[0]):
            for n, batch in enumerate(self.batches):
                if (epoch, n) >= tuple(place):
                    yield (epoch, n + 1), batch if isinstance(batch, list) else [batch]


def _look(name: str, step: int, found: Tensor) -> None:
    _check([found], [name], step)


def _pass(found: Tensor) -> None:
    pass


def _check(losses: list[Tensor], names: list[str], first: int) -> None:
    """Neither a loss nor the norm of its gradients, which all processes share, may be anything but a number."""
    for n, row in enumerate(losses):
        for what, value in (("loss", float(row[0])), ("norm of the gradients", float(row[3]))):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the {what} of step {first + n} is {value} ({names[n]}): lower the peak learning rate, lengthen the "
                    "warm-up, clip gradients, or look at these records; the last checkpoint is from before this step")


def _knobs(step: list[Any], error: Exception) -> str:
    shapes = {name: tuple(tensor.shape) for name, tensor in step[0].inputs.items()} if step else {}
    return (f"the device has too little memory for batches of {shapes}: halve the tokens of a micro-batch (batch.micro), set "
            f"recipe.recompute, leave out longer texts (batch.longest), choose bfloat16, or shard with fsdp ({error})")


def _measured(run: _Run, measure: Callable[[nn.Module], dict[str, float]], team: Team, pupil: nn.Module) -> dict[str, float]:
    run.model.eval()
    try:
        with torch.no_grad(), run.average.inside() if run.average is not None else nullcontext(), team.whole(pupil):
            return measure(run.model)
    finally:
        run.model.train()


def _better(run: _Run, recipe: Recipe, measures: dict[str, float], team: Team) -> bool:
    if recipe.metric not in measures:
        raise ValueError(f"the metric {recipe.metric!r} is not measured: there are {', '.join(measures)}")
    value = team.first(measures[recipe.metric])
    sign = 1.0 if higher_is_better(recipe.metric) else -1.0
    if not math.isnan(value) and (run.best is None or sign * value > sign * run.best):
        run.best, run.best_step, run.waited = value, run.step, 0
        return True
    run.waited += 1
    return False


def _saved(run: _Run, folder: Path, recipe: Recipe, about: dict[str, Any], team: Team) -> Path:
    trouble: OSError | None = None
    if team.rank == 0 or team.way == "fsdp":
        state = {**run.state(), "recipe": asdict(recipe), "about": about, "world": team.world, "torch": str(torch.__version__)}
        try:
            checkpoint.save(folder, run.step, run.tensors(), state, rank=team.rank, sharded=team.way == "fsdp")
            if team.rank == 0:
                checkpoint.tidy(folder, run.step, recipe.keep, run.best_step)
        except OSError as error:
            trouble = error
    place = checkpoint.named(folder, run.step)
    if team.any(trouble is not None):  # all wait here for the first one
        raise trouble or OSError(f"the checkpoint {place} could not be written by another process: see what it says")
    return place


def _go_on(run: _Run, folder: Path, recipe: Recipe, about: dict[str, Any], team: Team) -> list[str]:
    """Take up the newest whole checkpoint, if there is one; what is wrong with newer ones is told."""
    found = checkpoint.latest(folder)
    if found is None:
        return []
    place, state, damaged = found
    old = read_recipe(state["recipe"])
    changed = recipe.differs(old)
    changed += [f"{name} was {state['about'].get(name)!r} and is {about.get(name)!r}"
                for name in sorted(state["about"].keys() | about.keys()) if state["about"].get(name) != about.get(name)]
    if changed:
        raise ValueError(f"the run in {folder} cannot go on, because it has changed: {'; '.join(changed)}. Change it back, or "
                         "start a new run in another folder")
    checkpoint.load(place, run.tensors(), sharded=bool(state["sharded"]), distributed=team.way == "fsdp")
    run.restore(state)
    if team.rank == 0 and not damaged:  # a crash between saving and tidying up leaves one too many
        checkpoint.tidy(folder, run.step, recipe.keep, run.best_step)
    if recipe.metric != old.metric:
        run.best, run.best_step, run.waited = None, None, 0
    return [*(f"{trouble}; going on from {place.name}" for trouble in damaged), f"going on from {place.name}"]
