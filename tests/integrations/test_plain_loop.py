"""A loop of one's own, with Accelerate and without: one line before the first step."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
from integration_models import TEXTS, TinyModel, next_token_loss
from integration_scripts import assert_stopped_before_the_first_step, import_library
from keepleft.integrations import audit_before_training
from keepleft.integrations.gate import UncheckedWarning, find_sharding

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = """
import torch
from integration_models import TEXTS, TinyModel, next_token_loss
from keepleft.integrations import audit_before_training
{setup}
audit_before_training(model)
for batch in torch.tensor(TEXTS).split(2):
    print("step", flush=True)
    optimizer.zero_grad()
    next_token_loss(model(batch), batch).backward()
    optimizer.step()
"""
PLAIN = """
model = TinyModel(honest=False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
ACCELERATE = """
from accelerate import Accelerator
model = TinyModel(honest=False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
"""


def test_a_leaking_model_ends_a_plain_script_with_exit_code_1(tmp_path):
    assert_stopped_before_the_first_step(SCRIPT.format(setup=PLAIN), tmp_path)


def test_a_leaking_model_ends_a_script_of_accelerate_with_exit_code_1(tmp_path):
    import_library("accelerate")
    assert_stopped_before_the_first_step(SCRIPT.format(setup=ACCELERATE), tmp_path)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.filterwarnings("ignore")
def test_an_honest_model_trains_with_accelerate(mixed_precision):
    accelerate = import_library("accelerate")
    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision)
    model = TinyModel(True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    forward = model.forward
    assert audit_before_training(model, on_unchecked="raise").ok
    assert model.forward == forward  # with the mixed precision that prepare() gave it
    batch = torch.tensor(TEXTS)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = next_token_loss(model(batch), batch)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]
    accelerate.state.AcceleratorState._reset_state()


def test_the_wrappers_of_compile_and_parallel_training_are_left_out():
    calls = []

    class Counting(TinyModel):
        def forward(self, tokens):
            calls.append(tokens.shape)
            return super().forward(tokens)

    model = torch.nn.DataParallel(torch.compile(Counting(True), backend="eager"))
    assert audit_before_training(model, checks=["future"]).ok
    assert calls


def test_weights_that_are_split_between_processes_are_known():
    model = TinyModel(True)
    assert find_sharding(model, model) == ""
    wrapper = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
    wrapper.module = model
    assert find_sharding(wrapper, model) == "FSDP"
    with pytest.warns(UncheckedWarning, match="sharded by FSDP"):
        assert audit_before_training(wrapper).verdict == "unchecked"
    with pytest.raises(kl.UncheckedError, match="before it is sharded"):
        audit_before_training(wrapper, on_unchecked="raise")


def test_a_batch_is_checked_too():
    tokens = torch.tensor(TEXTS)
    model = TinyModel(True)
    batch = {"input_ids": tokens, "targets": tokens}
    with pytest.raises(kl.LeakError, match="labels-not-shifted"):
        audit_before_training(model, batch=batch, checks=["future"])
    shifted = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)
    assert audit_before_training(model, batch={"input_ids": tokens, "targets": shifted}, checks=["future"]).ok
