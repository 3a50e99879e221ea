"""Trial steps: they take little time, and leave model and random numbers as they were."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tiny_training as tiny
from keepleft.training import trial
from keepleft.training.distributed import DistributedContext
from keepleft.training.trial import MAX_TRIAL_STEPS, MIN_TRIAL_STEPS, TRIAL_SECONDS, measure_steps

CPU = DistributedContext(device=torch.device("cpu"))


def test_steps_are_measured_on_a_copy(one_thread):
    design = tiny.design("both")
    model = tiny.model(design)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    step_time = measure_steps(model, tiny.batches(design), tiny.recipe(ema_decay=0.9), CPU)
    assert 0 < step_time.seconds < 5
    assert 1 <= step_time.steps <= MAX_TRIAL_STEPS
    assert tiny.equal_tensors(before, model.state_dict())
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(TRIAL_SECONDS / 1000, MAX_TRIAL_STEPS), (TRIAL_SECONDS / 2, MIN_TRIAL_STEPS), (3 * TRIAL_SECONDS, 1)],
)
def test_quick_steps_are_measured_often_and_slow_ones_once(seconds, steps, monkeypatch):
    clock = [0.0]

    def take_step(*args):
        clock[0] += seconds

    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(trial, "make_step", lambda *args, **options: take_step)
    design = tiny.design()
    step_time = measure_steps(tiny.model(design), tiny.batches(design), tiny.recipe(), CPU)
    assert step_time.seconds == pytest.approx(seconds)
    assert step_time.steps == steps


def test_a_step_that_does_not_fit_is_explained_before_training(monkeypatch):
    def run_out_of_memory(*args):
        raise torch.OutOfMemoryError("7 GiB")

    monkeypatch.setattr(trial, "make_step", lambda *args, **options: run_out_of_memory)
    design = tiny.design()
    with pytest.raises(MemoryError, match=r"too little memory for batches of .*halve the tokens"):
        measure_steps(tiny.model(design), tiny.batches(design), tiny.recipe(), CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_memory_of_the_copy_is_given_back_on_a_gpu():
    design = tiny.design()
    gpu = DistributedContext(device=torch.device("cuda", 0))
    model = tiny.model(design, dtype=torch.float32)
    before = torch.cuda.memory_allocated()
    step_time = measure_steps(model, tiny.batches(design), tiny.recipe(), gpu)
    assert step_time.steps >= 1
    assert next(model.parameters()).device.type == "cpu"
    assert torch.cuda.memory_allocated() - before < 1 << 20
