"""The plan of a run: data, model, steps, expected time and files, known before the first step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from keepleft.runs import defaults
from keepleft.runs.job import TrainJob
from keepleft.training.recipe import Recipe

MAX_USED_FRACTION = 0.95  # of the time that is left: steps are not all equally long


@dataclass(frozen=True)
class TimeEstimate:
    """How long the parts of a run take, in seconds."""

    step: float
    evaluation: float
    checkpoint: float

    def run_seconds(self, recipe: Recipe, steps_done: int = 0) -> float:
        """From a step to the end: training, evaluating, saving, writing the model directory."""
        steps = recipe.steps - steps_done
        num_evaluations = _count_due(steps, recipe.eval_every)
        num_checkpoints = max(num_evaluations, _count_due(steps, recipe.save_every))
        num_checkpoints += 2  # the last is read and checked, and the model directory written from it
        return steps * self.step + num_evaluations * self.evaluation + num_checkpoints * self.checkpoint


@dataclass(frozen=True)
class TrainingPlan:
    """What a run is about to do."""

    data: str  # how much there is to train on
    validation: str
    model: str
    recipe: Recipe
    tokens_per_step: int
    epochs: float  # 0 if they are not known
    devices: str
    micro_batches: int  # of a step
    num_processes: int
    steps_done: int  # before the run was resumed
    step_seconds: float
    seconds: float  # expected, to the end of the run
    minutes: float | None  # that the number of steps was chosen for
    at_epoch_limit: bool  # more steps would have fitted, but not more epochs
    checkpoints_folder: Path
    model_folder: Path

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        recipe = self.recipe
        steps = f"{recipe.steps:,} {'step' if recipe.steps == 1 else 'steps'}"
        if self.steps_done:
            steps += f" ({self.steps_done:,} are done)"
        epochs = f", {self.epochs:,.1f} epochs" if self.epochs else ""
        duration = f"about {format_duration(self.seconds)}, {format_duration(self.step_seconds)} a step"
        if self.minutes is not None:
            limit = "as many as fit at this speed"
            if self.at_epoch_limit:
                limit = "the most for so little data" + (f" ({self.epochs:,.0f} epochs)" if epochs else "")
            duration += f"; --minutes {self.minutes:g} chose --recipe.steps {recipe.steps}, {limit}"
        saved = [] if recipe.save_every is None else [f"every {_count(recipe.save_every, 'step')}"]
        if recipe.save_minutes:
            saved.append(f"at least every {_count(recipe.save_minutes, 'minute')}")
        yield f"data         {self.data}"
        yield f"validation   {self.validation}"
        yield f"model        {self.model}"
        yield (
            f"training     {steps} of about {self.tokens_per_step:,} tokens{epochs}, {recipe.optimizer}, "
            f"on {self.devices}"
        )
        if self.micro_batches % self.num_processes:
            yield (
                f"             a step has {self.micro_batches} micro-batches for {self.num_processes} "
                "processes, so some wait for others: choose batch.tokens and batch.micro_tokens that divide"
            )
        yield f"time         {duration}"
        yield f"checkpoints  {self.checkpoints_folder}: {', '.join([*saved, 'and at the end'])}"
        yield f"result       {self.model_folder}"


def fit_recipe(job: TrainJob, estimate: TimeEstimate, steps_per_epoch: int, seconds: float) -> Recipe:
    """The recipe of a job with as many steps as fit into so many seconds, its schedule included.

    There are never more than the data are good for (`max_epochs`). Raises ValueError if no step fits.
    """
    used_seconds = MAX_USED_FRACTION * seconds

    def recipe_of(steps: int) -> Recipe:
        job_with_steps = replace(job, recipe=replace(job.recipe, steps=steps))
        return defaults.recipe(job_with_steps, targets=1, steps_per_epoch=steps_per_epoch)

    low = 0  # steps that fit
    high = max_steps(job, steps_per_epoch)
    if estimate.run_seconds(recipe_of(high)) <= used_seconds:
        return recipe_of(high)
    while high - low > 1:
        middle = (low + high) // 2
        if estimate.run_seconds(recipe_of(middle)) <= used_seconds:
            low = middle
        else:
            high = middle
    if low == 0:
        assert job.minutes is not None
        needed = 60 * job.minutes - seconds + estimate.run_seconds(recipe_of(1)) / MAX_USED_FRACTION
        raise ValueError(
            f"--minutes is {job.minutes:g}, too little: to prepare the data, take one step and write "
            f"the model takes about {format_duration(needed)}. Give more, or a smaller model (--size tiny)"
        )
    return recipe_of(low)


def max_steps(job: TrainJob, steps_per_epoch: int) -> int:
    """The most steps that the data are good for."""
    return max(defaults.MIN_STEPS, round(defaults.max_epochs(job) * steps_per_epoch))


def format_duration(seconds: float) -> str:
    """A time in one or two units: 0.28 seconds, 40 seconds, 6 minutes, 2 hours 10 minutes, 3 days 4 hours."""
    if seconds < 90:
        return f"{seconds:.2g} seconds" if seconds < 10 else f"{seconds:.0f} seconds"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} minutes"
    hours = minutes // 60
    if hours < 48:
        return _join_units((hours, "hour"), (minutes % 60, "minute"))
    return _join_units((hours // 24, "day"), (hours % 24, "hour"))


def _join_units(*parts: tuple[int, str]) -> str:
    return " ".join(_count(number, unit) for number, unit in parts if number)


def _count(number: float, unit: str) -> str:
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {unit}{'' if number == 1 else 's'}"


def _count_due(steps: int, every: int | None) -> int:
    """How often something happens that is due at every so many steps and at the end."""
    return math.ceil(steps / every) if every is not None else 1
