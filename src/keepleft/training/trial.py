"""Trial steps: how long a training step takes, measured on a copy of the model before training begins."""

from __future__ import annotations

import gc
import time
from copy import deepcopy
from dataclasses import dataclass

import torch

from keepleft.models.transformer import Model
from keepleft.training.distributed import DistributedContext
from keepleft.training.loop import BatchOrder, count_step, out_of_memory_hint
from keepleft.training.recipe import Recipe
from keepleft.training.step import EAGER_STEPS, TrainStep, make_step

TRIAL_SECONDS = 1.0  # of measuring; a step that takes longer is measured once or twice
MIN_TRIAL_STEPS = 3
MAX_TRIAL_STEPS = 20
CUDA_WARMUP_STEPS = EAGER_STEPS + 2  # eager ones, and those in which CUDA graphs are captured


@dataclass(frozen=True)
class StepTime:
    """The mean of some trial steps."""

    seconds: float
    steps: int  # how many were measured


def measure_steps(
    model: Model,
    batches: BatchOrder,
    recipe: Recipe,
    distributed: DistributedContext,
    *,
    tokens_per_step: int = 0,
    row_length: int | None = None,
) -> StepTime:
    """Time training steps on the first batches. Neither the model nor the random numbers change.

    The arguments are those of `make_step`. Where several processes train, all must call this; they get the
    time of the first. Raises MemoryError if the device has too little memory for a step.
    """
    is_gpu = distributed.device.type == "cuda"
    with torch.random.fork_rng(devices=[distributed.device] if is_gpu else []):
        train_step = make_step(
            deepcopy(model), recipe, distributed, tokens_per_step=tokens_per_step, row_length=row_length
        )
        # on a CPU a step that takes long counts even if it is the first: what it allocates is soon no matter
        max_warmup_seconds = float("inf") if is_gpu or recipe.compile else TRIAL_SECONDS
        num_warmup_steps = CUDA_WARMUP_STEPS if is_gpu else 1
        out = _time_steps(train_step, batches, distributed, num_warmup_steps, max_warmup_seconds)
    if is_gpu:  # give the memory of the copy back before training needs it
        del train_step
        gc.collect()
        torch.cuda.empty_cache()
    return out


def _time_steps(
    train_step: TrainStep,
    batches: BatchOrder,
    distributed: DistributedContext,
    num_warmup_steps: int,
    max_warmup_seconds: float,
) -> StepTime:
    step_seconds: list[float] = []
    for n, (_, micro_batches) in enumerate(batches.steps((0, 0))):
        num_targets, _ = count_step(micro_batches, distributed)
        start_time = time.perf_counter()
        try:
            train_step(micro_batches, num_targets, 0.0, n)
        except torch.OutOfMemoryError as error:
            raise MemoryError(out_of_memory_hint(micro_batches, error)) from error
        if distributed.device.type == "cuda":
            torch.cuda.synchronize(distributed.device)
        # the clock of the first process decides, so that all take the same number of steps
        seconds = distributed.broadcast(time.perf_counter() - start_time)
        if n < num_warmup_steps and seconds < max_warmup_seconds:
            continue
        step_seconds.append(seconds)
        is_enough = sum(step_seconds) >= TRIAL_SECONDS * (1 if len(step_seconds) >= MIN_TRIAL_STEPS else 2)
        if is_enough or len(step_seconds) == MAX_TRIAL_STEPS:
            break
    return StepTime(sum(step_seconds) / len(step_seconds), len(step_seconds))
