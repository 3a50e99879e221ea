"""Small matrices beside frozen ones: nothing changes until they learn, and nothing when they are folded in."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
import tiny_training as tiny
from keepleft.training.loop import train
from keepleft.training.lora import TARGET_MODULES, LoRALinear, add_lora, merge


def scores(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        tokens = torch.arange(3, 15).view(2, 6)
        return model.eval()(tokens, tokens) if isinstance(model, kl.EncoderDecoder) else model.eval()(tokens)


def taught(kind: str, folder=None, **recipe) -> torch.nn.Module:
    design = tiny.design(kind)
    model = tiny.model(design)
    add_lora(model, 3, dropout=0.1)
    list(train(model, tiny.batches(design), tiny.recipe(**recipe), folder=folder))
    return model


@pytest.mark.parametrize("kind", ["decoder", "both"])
def test_before_training_nothing_has_changed(kind):
    model = tiny.model(tiny.design(kind))
    before, names = scores(model), model.state_dict()
    found = add_lora(model, 3)
    assert torch.equal(scores(model), before)
    assert names.keys() < model.state_dict().keys()
    assert {name.split(".", 3)[-1] for name in found} == {
        end for end in TARGET_MODULES if kind == "both" or "cross" not in end
    }


@pytest.mark.parametrize("kind", ["decoder", "both"])
def test_only_the_small_matrices_learn(kind):
    fresh = tiny.model(tiny.design(kind)).state_dict()
    model = taught(kind)
    for name, tensor in model.state_dict().items():
        if name in fresh:
            assert torch.equal(tensor, fresh[name]), name
        else:
            assert name.endswith((".down", ".up"))
            assert tensor.abs().max() > 0
    assert {name.rsplit(".", 1)[1] for name, p in model.named_parameters() if p.requires_grad} == {
        "down",
        "up",
    }


@pytest.mark.parametrize("kind", ["decoder", "both"])
def test_folded_in_is_the_same_model_under_its_own_names(kind, tmp_path):
    fresh = tiny.model(tiny.design(kind))
    model = taught(kind)
    before = scores(model)
    assert not torch.allclose(before, scores(fresh))
    layers = merge(model)
    assert len(layers) == (4 if kind == "decoder" else 11)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    assert list(model.state_dict()) == list(fresh.state_dict())
    assert [type(module) for module in model.modules()] == [type(module) for module in fresh.modules()]
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(scores(model), before, atol=1e-12, rtol=1e-12)
    kl.save(model, None, tmp_path)
    torch.testing.assert_close(
        scores(kl.load(tmp_path, dtype=torch.float64)[0]), before, atol=1e-12, rtol=1e-12
    )
    assert merge(model) == []


def test_a_run_goes_on_with_them(tmp_path):
    whole = taught("both", tmp_path / "whole", ema_decay=0.9)
    design = tiny.design("both")
    model = tiny.model(design)
    add_lora(model, 3, dropout=0.1)
    asked = iter([False] * 6 + [True])
    list(
        train(
            model,
            tiny.batches(design),
            tiny.recipe(ema_decay=0.9),
            folder=tmp_path / "broken",
            stop=lambda: next(asked),
        )
    )
    assert tiny.equal_tensors(
        taught("both", tmp_path / "broken", ema_decay=0.9).state_dict(), whole.state_dict()
    )
    assert tiny.equal_tensors(
        tiny.checkpoint_tensors(tmp_path / "broken", 12), tiny.checkpoint_tensors(tmp_path / "whole", 12)
    )


def test_a_checkpoint_without_them_is_refused(tmp_path):
    design = tiny.design()
    list(train(tiny.model(design), tiny.batches(design), tiny.recipe(steps=2), folder=tmp_path))
    model = tiny.model(design)
    add_lora(model, 3)
    with pytest.raises(ValueError, match=r"is of another model or optimizer: .*down.down' is not in it"):
        list(train(model, tiny.batches(design), tiny.recipe(steps=2), folder=tmp_path))


def test_what_else_learns_can_be_said():
    model = tiny.model(tiny.design(norm=kl.LayerNorm()))
    assert add_lora(model, 2, target_modules=("self.qkv",), modules_to_save=("head", "norm_feed")) == [
        "decoder.layers.0.self.qkv"
    ]
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {
        "head.weight",
        "decoder.layers.0.norm_feed.weight",
        "decoder.layers.0.norm_feed.bias",
        "decoder.layers.0.self.qkv.down",
        "decoder.layers.0.self.qkv.up",
    }


def test_the_same_seed_gives_the_same_matrices_and_half_precision_stays():
    a, b, c = (
        kl.build(tiny.design(), dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
        for _ in range(3)
    )
    for model, seed in ((a, 0), (b, 0), (c, 1)):
        add_lora(model, 2, seed=seed)
    assert tiny.equal_tensors(a.state_dict(), b.state_dict())
    assert not tiny.equal_tensors(a.state_dict(), c.state_dict())
    assert {p.dtype for p in a.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"target_modules": ("self.query",)}, "no layer of the model is called 'self.query'"),
        ({"target_modules": ("cross.q",)}, "no layer of the model ends in cross.q"),
        ({"modules_to_save": ("tail",)}, "no weight of the model is called 'tail'"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_touched(choices, words):
    model = tiny.model(tiny.design())
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=words):
        add_lora(model, **choices)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    add_lora(model)
    with pytest.raises(ValueError, match="adapted already"):
        add_lora(model)
