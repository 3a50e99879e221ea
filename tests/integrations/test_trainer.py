"""Trainer of transformers and SFTTrainer of TRL: a leaking model is stopped before the first step, an honest
one trains as it would without the audit.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import keepleft as kl
from integration_models import TEXTS, VOCAB, PeekingNorm, tiny_llama
from integration_scripts import assert_stopped_before_the_first_step, import_library
from keepleft import integrations
from keepleft.integrations.gate import UncheckedWarning

import_library("accelerate")
transformers = import_library("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

SCRIPT = """
import torch
from integration_models import TEXTS, tiny_llama
from transformers import Trainer, TrainerCallback, TrainingArguments
from keepleft.integrations import AuditCallback

class Steps(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        print("step", flush=True)

texts = [{"input_ids": torch.tensor(text), "labels": torch.tensor(text)} for text in TEXTS]
args = TrainingArguments(output_dir="out", max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
Trainer(tiny_llama(honest=False), args, train_dataset=texts, callbacks=[Steps(), AuditCallback()]).train()
"""


class StepCounter(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.count = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1


def train(model: Any, folder: Any, callbacks: list[Any], label_shift: int = 0, **options: Any) -> Any:
    labels = [text[label_shift:] + [-100] * label_shift for text in TEXTS]
    texts = [
        {"input_ids": torch.tensor(text), "labels": torch.tensor(label)}
        for text, label in zip(TEXTS, labels, strict=True)
    ]
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model, args, train_dataset=texts, callbacks=callbacks)
    trainer.train()
    return trainer


def test_a_leaking_model_ends_the_script_with_exit_code_1_before_the_first_step(tmp_path):
    assert_stopped_before_the_first_step(SCRIPT, tmp_path)


def test_an_honest_model_trains_to_the_same_weights_as_without_the_audit(tmp_path):
    plain, audited = tiny_llama(True), tiny_llama(True)
    train(plain, tmp_path, [])
    callback = integrations.AuditCallback()
    trainer = train(audited, tmp_path, [callback])
    assert callback.report.verdict == "clean"
    assert trainer.state.global_step == 3
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, audited.state_dict()[name]), name


def test_mixed_precision_is_no_leak(tmp_path):
    model, callback = tiny_llama(True), integrations.AuditCallback()
    trainer = train(model, tmp_path, [callback], bf16=True)
    assert callback.report.verdict == "clean"
    assert trainer.state.global_step == 3


def test_a_leak_under_mixed_precision_is_found(tmp_path):
    steps = StepCounter()
    with pytest.raises(kl.LeakError, match=r"future in model\.norm"):
        train(tiny_llama(False), tmp_path, [steps, integrations.AuditCallback()], bf16=True)
    assert steps.count == 0


def test_labels_that_the_collator_shifted_are_found_before_the_first_step(tmp_path):
    steps = StepCounter()
    with pytest.raises(kl.LeakError, match="labels-shifted-twice"):
        train(tiny_llama(True), tmp_path, [steps, integrations.AuditCallback()], label_shift=1)
    assert steps.count == 0
    train(tiny_llama(True), tmp_path, [steps, integrations.AuditCallback(check_batches=False)], label_shift=1)
    assert steps.count == 3


class Broken(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("it has no weights yet")


@pytest.mark.parametrize("on_unchecked", ["warn", "raise"])
def test_without_a_verdict_it_warns_or_raises(on_unchecked):
    callback = integrations.AuditCallback(on_unchecked=on_unchecked)
    warns = on_unchecked == "warn"
    with pytest.warns(UncheckedWarning) if warns else pytest.raises(kl.UncheckedError) as caught:
        callback.on_train_begin(None, None, None, model=Broken())
    message = str(caught[0].message if warns else caught.value)
    assert message.startswith("unchecked: there is no verdict on Broken")
    assert "give an example" in message


def test_the_claim_and_the_options_are_those_of_the_audit():
    model = tiny_llama(False)
    integrations.AuditCallback(claim="full", checks=["batch"]).on_train_begin(None, None, None, model=model)
    callback = integrations.AuditCallback(claim=kl.causal, checks=["batch"])
    callback.on_train_begin(None, None, None, model=tiny_llama(True))
    assert callback.report.checked == ("batch",)
    with pytest.raises(ValueError, match="there is no budget 'fast': there are quick, standard, full"):
        integrations.AuditCallback(budget="fast")
    with pytest.raises(ValueError, match="there is no check 'past': there are future"):
        integrations.AuditCallback(checks=["past"])
    with pytest.raises(TypeError, match="buget is no argument of"):
        integrations.AuditCallback(buget="quick")
    with pytest.raises(ValueError, match="on_unchecked is 'ignore': it must be 'warn' or 'raise'"):
        integrations.AuditCallback(on_unchecked="ignore")


# -- TRL ---------------------------------------------------------------------------------------

TRL_SCRIPT = """
from datasets import Dataset
from integration_models import TEXTS, tiny_llama, tiny_tokenizer
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer
from keepleft.integrations import AuditCallback

class Steps(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        print("step", flush=True)

SFTTrainer(
    tiny_llama(honest=False),
    args=SFTConfig(output_dir="out", max_steps=2, use_cpu=True, bf16=False, report_to=[], save_strategy="no"),
    train_dataset=Dataset.from_dict({"input_ids": TEXTS}),
    processing_class=tiny_tokenizer(),
    callbacks=[Steps(), AuditCallback()],
).train()
"""


@pytest.fixture
def sft() -> Any:
    return import_library("trl")


def test_sft_of_a_leaking_model_ends_with_exit_code_1_before_the_first_step(sft, tmp_path):
    assert_stopped_before_the_first_step(TRL_SCRIPT, tmp_path)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_sft_of_an_honest_model_trains(sft, tmp_path, packing):
    from datasets import Dataset

    from integration_models import tiny_tokenizer

    callback = integrations.AuditCallback()
    args = sft.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        packing=packing,
        max_length=16,
    )
    trainer = sft.SFTTrainer(
        tiny_llama(True),
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": [text[: 5 + n] for n, text in enumerate(TEXTS)]}),
        processing_class=tiny_tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    assert callback.report.verdict == "clean"
    assert trainer.state.global_step == 2


# -- what an audit leaves behind: nothing ------------------------------------------------------


def test_the_audit_leaves_gradients_modes_and_random_states_alone():
    model = tiny_llama(True).train()
    model.model.norm.eval()
    logits = model(torch.randint(3, VOCAB, (2, 5))).logits
    logits.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    integrations.AuditCallback().on_train_begin(None, None, None, model=model)
    assert [module.training for module in model.modules()] == modes
    assert states[:2] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(states[2], torch.get_rng_state())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in model.state_dict().items())


def test_a_model_whose_weights_are_sharded_is_not_called():
    model = tiny_llama(False)
    model.model.norm = PeekingNorm(model.model.norm)
    next(model.parameters()).ds_id = 0  # as DeepSpeed marks them
    with pytest.warns(UncheckedWarning, match="the weights are sharded by DeepSpeed"):
        integrations.AuditCallback(check_batches=False).on_train_begin(None, None, None, model=model)
