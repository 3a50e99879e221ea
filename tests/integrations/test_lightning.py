"""Lightning: a leaking model is stopped before the first step and the sanity check, an honest one trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import keepleft as kl
from integration_models import TEXTS, TinyModel, next_token_loss
from integration_scripts import assert_stopped_before_the_first_step, import_library
from keepleft import integrations

lightning = import_library("lightning.pytorch")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

SCRIPT = """
import torch
from lightning.pytorch import LightningModule, Trainer
from integration_models import TEXTS, TinyModel, next_token_loss
from torch.utils.data import DataLoader
from keepleft.integrations import LightningAuditCallback

class Task(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = TinyModel(honest=False)

    def training_step(self, batch, batch_idx):
        print("step", flush=True)
        return next_token_loss(self.model(batch), batch)

    def validation_step(self, batch, batch_idx):
        print("step", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

batches = DataLoader(torch.tensor(TEXTS), batch_size=2)
trainer = Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                  callbacks=[LightningAuditCallback()])
trainer.fit(Task(), batches, batches)
"""


class WithoutForward(lightning.LightningModule):
    def __init__(self, honest: bool) -> None:
        super().__init__()
        self.model = TinyModel(honest)
        self.num_steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return next_token_loss(self.model(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class WithForward(WithoutForward):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


def fit(task: Any, callback: Any, **options: Any) -> None:
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if callback is None else [callback],
        **options,
    )
    trainer.fit(task, DataLoader(torch.tensor(TEXTS), batch_size=2))


def test_a_leaking_model_ends_the_script_with_exit_code_1_before_the_first_step(tmp_path):
    assert_stopped_before_the_first_step(SCRIPT, tmp_path)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [WithoutForward, WithForward])
def test_an_honest_model_trains_and_a_leaking_one_does_not(kind, precision):
    honest, callback = kind(True), integrations.LightningAuditCallback()
    fit(honest, callback, precision=precision)
    assert callback.report.verdict == "clean"
    assert honest.num_steps == 2
    leaking = kind(False)
    with pytest.raises(kl.LeakError, match="its future"):
        fit(leaking, integrations.LightningAuditCallback(), precision=precision)
    assert leaking.num_steps == 0


def test_the_weights_are_those_of_a_run_without_the_audit():
    torch.manual_seed(1)
    plain = WithoutForward(True)
    audited = WithoutForward(True)
    audited.load_state_dict(plain.state_dict())
    fit(plain, None)
    fit(audited, integrations.LightningAuditCallback())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), audited.parameters(), strict=True))


def test_a_part_is_audited_by_its_name():
    task = WithoutForward(True)
    task.critic = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"2 modules with weights \(model, critic\): say which one to audit"):
        fit(task, integrations.LightningAuditCallback())
    callback = integrations.LightningAuditCallback(module="model")
    fit(task, callback)
    assert callback.report.subject == "TinyModel"
    with pytest.raises(ValueError, match="WithoutForward has no module 'modle'"):
        fit(task, integrations.LightningAuditCallback(module="modle"))
