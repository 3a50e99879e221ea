"""MFU is at most 1 and left out on a CPU; FLOPs and tokens are those of the model and of the text."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
import tiny_training as tiny
from keepleft.data.batches import Batches, BucketedLayout
from keepleft.data.objectives import Classification, MaskedToken
from keepleft.data.token_store import TokenStore
from keepleft.training import mfu
from keepleft.training.loop import train
from keepleft.training.lora import add_lora
from keepleft.training.mfu import FlopCounter, model_flops_utilization

TEXTS = [[5, 6, 7, 8, 2], [9, 10, 2], [11, 12, 13, 14, 15, 16, 2]]
NUM_TOKENS = sum(map(len, TEXTS))


def encoder(head) -> kl.Encoder:
    design = kl.presets.small(kl.presets.bert).but(vocab=37, head=head)
    return kl.build(design, generator=torch.Generator().manual_seed(0))


def test_mfu_is_left_out_on_a_cpu():
    assert model_flops_utilization(1e9, 1.0, torch.device("cpu"), torch.float32) is None
    reports = tiny.run(None, recipe=tiny.recipe(steps=2, log_every=1))
    assert [report.mfu for report in reports] == [None, None]
    assert "share" not in reports[0].to_dict()


def test_mfu_is_never_above_one(monkeypatch):
    monkeypatch.setattr(mfu, "peak_matmul_flops", lambda device, dtype: 4e9)
    gpu = torch.device("cuda")
    assert model_flops_utilization(2e9, 1.0, gpu, torch.float32) == 0.5
    assert model_flops_utilization(9e9, 1.0, gpu, torch.float32) == 1.0
    assert model_flops_utilization(0.0, 1.0, gpu, torch.float32) is None


@pytest.mark.parametrize(
    ("objective", "head"),
    [(Classification(), kl.ClassificationHead(2)), (MaskedToken(4, 37), kl.MaskedLMHead("gelu"))],
)
def test_tokens_are_counted_and_not_labels_or_masked_positions(objective, head):
    store = TokenStore.from_lists(text=TEXTS, label=[[0], [1], [0]])
    batches = Batches(store, objective, BucketedLayout(), budget=64)
    (report,) = train(encoder(head), batches, tiny.recipe(steps=2, log_every=2))
    assert report.tokens == 2 * NUM_TOKENS


def test_the_head_of_a_classifier_has_no_vocabulary():
    model = encoder(kl.ClassificationHead(2))
    dim = model.design.dim
    assert FlopCounter(model).target_flops == 6 * (dim * dim + 2 * dim)  # pooler and labels


def test_frozen_weights_cost_two_thirds():
    model = tiny.model(tiny.design())
    inputs = {"tokens": torch.ones(1, 1, dtype=torch.long)}
    before = FlopCounter(model)(inputs, 1)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    attention = 12 * 0.5 * model.design.dim
    assert FlopCounter(model)(inputs, 1) - attention == pytest.approx((before - attention) * 4 / 6)
    add_lora(model, rank=2)
    assert FlopCounter(model)(inputs, 1) < before
