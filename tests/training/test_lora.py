"""LoRA: adding it changes no output, only it is trained, and merging it changes no output."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
import tiny_training as tiny
from keepleft.training.loop import train
from keepleft.training.lora import TARGET_MODULES, LoRALinear, add_lora, merge


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        tokens = torch.arange(3, 15).view(2, 6)
        return model.eval()(tokens, tokens) if isinstance(model, kl.EncoderDecoder) else model.eval()(tokens)


def train_lora(kind: str, folder=None, **changes) -> torch.nn.Module:
    design = tiny.design(kind)
    model = tiny.model(design)
    add_lora(model, 3, dropout=0.1)
    list(train(model, tiny.batches(design), tiny.recipe(**changes), folder=folder))
    return model


@pytest.mark.parametrize("kind", ["decoder", "both"])
def test_adding_lora_changes_no_output(kind):
    model = tiny.model(tiny.design(kind))
    before = logits_of(model)
    names = model.state_dict().keys()
    layers = add_lora(model, 3)
    assert torch.equal(logits_of(model), before)
    assert names < model.state_dict().keys()
    suffixes = {suffix for suffix in TARGET_MODULES if kind == "both" or "cross" not in suffix}
    assert {name.split(".", 3)[-1] for name in layers} == suffixes


@pytest.mark.parametrize("kind", ["decoder", "both"])
def test_only_the_low_rank_matrices_are_trained(kind):
    initial = tiny.model(tiny.design(kind)).state_dict()
    model = train_lora(kind)
    for name, tensor in model.state_dict().items():
        if name in initial:
            assert torch.equal(tensor, initial[name]), name
        else:
            assert name.endswith((".down", ".up"))
            assert tensor.abs().max() > 0
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {name.rsplit(".", 1)[1] for name in trainable} == {"down", "up"}


@pytest.mark.parametrize("kind", ["decoder", "both"])
def test_merging_changes_no_output_and_restores_layers_and_names(kind, tmp_path):
    initial = tiny.model(tiny.design(kind))
    model = train_lora(kind)
    before = logits_of(model)
    assert not torch.allclose(before, logits_of(initial))
    layers = merge(model)
    assert len(layers) == (4 if kind == "decoder" else 11)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    assert list(model.state_dict()) == list(initial.state_dict())
    assert [type(module) for module in model.modules()] == [type(module) for module in initial.modules()]
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(logits_of(model), before, atol=1e-12, rtol=1e-12)
    kl.save(model, None, tmp_path)
    reloaded, _ = kl.load(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(logits_of(reloaded), before, atol=1e-12, rtol=1e-12)
    assert merge(model) == []


def test_a_run_with_lora_resumes(tmp_path):
    unbroken = train_lora("both", tmp_path / "unbroken", ema_decay=0.9)
    design = tiny.design("both")
    model = tiny.model(design)
    add_lora(model, 3, dropout=0.1)
    answers = iter([False] * 6 + [True])
    recipe = tiny.recipe(ema_decay=0.9)
    list(train(model, tiny.batches(design), recipe, folder=tmp_path / "broken", stop=lambda: next(answers)))
    resumed = train_lora("both", tmp_path / "broken", ema_decay=0.9)
    assert tiny.equal_tensors(resumed.state_dict(), unbroken.state_dict())
    expected = tiny.checkpoint_tensors(tmp_path / "unbroken", 12)
    assert tiny.equal_tensors(tiny.checkpoint_tensors(tmp_path / "broken", 12), expected)


def test_a_checkpoint_without_lora_is_refused(tmp_path):
    design = tiny.design()
    list(train(tiny.model(design), tiny.batches(design), tiny.recipe(steps=2), folder=tmp_path))
    model = tiny.model(design)
    add_lora(model, 3)
    with pytest.raises(ValueError, match=r"is of another model or optimizer: .*down.down' is not in it"):
        list(train(model, tiny.batches(design), tiny.recipe(steps=2), folder=tmp_path))


def test_modules_to_save_are_trained_in_full():
    model = tiny.model(tiny.design(norm=kl.LayerNorm()))
    layers = add_lora(model, 2, target_modules=("self.qkv",), modules_to_save=("head", "norm_feed"))
    assert layers == ["decoder.layers.0.self.qkv"]
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {
        "head.weight",
        "decoder.layers.0.norm_feed.weight",
        "decoder.layers.0.norm_feed.bias",
        "decoder.layers.0.self.qkv.down",
        "decoder.layers.0.self.qkv.up",
    }


def test_the_same_seed_gives_the_same_matrices_and_the_dtype_stays():
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
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"target_modules": ("self.query",)}, "no layer of the model is called 'self.query'"),
        ({"target_modules": ("cross.q",)}, "no layer of the model ends in cross.q"),
        ({"modules_to_save": ("tail",)}, "no weight of the model is called 'tail'"),
    ],
)
def test_wrong_arguments_are_refused_and_the_model_is_unchanged(arguments, message):
    model = tiny.model(tiny.design())
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        add_lora(model, **arguments)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    add_lora(model)
    with pytest.raises(ValueError, match="adapted already"):
        add_lora(model)
