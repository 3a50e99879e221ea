"""The EMA follows its definition, and the average of checkpoints is their mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import keepleft as kl
import tiny_training as tiny
from keepleft.training.ema import EMA, average_checkpoints
from keepleft.training.loop import train


@given(st.floats(0.0, 0.999), st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_an_ema_follows_its_definition(decay, values):
    """a ← d·a + (1 − d)·w, where d grows as (1 + n) / (10 + n) up to the decay."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.data.fill_(0.5)
    ema = EMA(model, decay)
    expected = 0.5
    for step, value in enumerate(values):
        model.weight.data.fill_(value)
        ema.set_decay(step)
        ema.update()
        d = min(decay, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * value
    assert float(ema.weights["weight"]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_weights_come_back_after_average_parameters_even_after_an_error():
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    ema = EMA(model, 0.9)
    ema.weights["weight"].fill_(7.0)

    def fail() -> None:
        with ema.average_parameters():
            assert (model.weight == 7.0).all()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(model.weight, before)
    assert (ema.weights["weight"] == 7.0).all()


def test_only_trainable_weights_are_averaged():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert list(EMA(model, 0.9).weights) == ["weight"]


def test_the_loop_updates_the_ema_after_each_step(tmp_path):
    design = tiny.design()
    model = tiny.model(design)
    weights = []
    expected = model.token.weight.detach().clone()

    def record_and_stop() -> bool:
        weights.append(model.token.weight.detach().clone())
        return len(weights) == 5

    recipe = tiny.recipe(steps=6, ema_decay=0.3)
    list(train(model, tiny.batches(design), recipe, folder=tmp_path, stop=record_and_stop))
    for step, weight in enumerate(weights):
        d = min(0.3, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * weight
    average = tiny.checkpoint_tensors(tmp_path, 5)["average/token.weight"]
    torch.testing.assert_close(average, expected, atol=1e-14, rtol=1e-14)


def test_the_average_of_checkpoints_is_their_mean():
    states = [
        {"w": torch.full((2,), float(n), dtype=torch.bfloat16), "n": torch.tensor(n)} for n in (1, 2, 6)
    ]
    assert torch.equal(average_checkpoints(states)["w"], torch.full((2,), 3.0, dtype=torch.bfloat16))
    assert average_checkpoints(states)["n"].dtype == torch.int64
    model = kl.build(tiny.design())
    assert tiny.equal_tensors(average_checkpoints([model.state_dict()] * 3), model.state_dict())
    with pytest.raises(ValueError, match="a mean of no checkpoints"):
        average_checkpoints([])
    with pytest.raises(ValueError, match="only checkpoints of one model have a mean: 'n' is in some"):
        average_checkpoints([states[0], {"w": states[0]["w"]}])
