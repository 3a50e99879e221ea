"""A recipe refuses senseless numbers, survives JSON, and knows what a resumed run may change."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from keepleft.training.recipe import Recipe, from_dict, higher_is_better

CHANGEABLE = {
    "log_every": 7,
    "eval_every": 3,
    "save_every": 5,
    "save_minutes": 2.5,
    "keep_checkpoints": 1,
    "metric": "bleu",
    "patience": 2,
    "activation_checkpointing": True,
    "compile": False,
    "cuda_graph": False,
}
FIXED = {
    "steps": 7,
    "lr": 1.0,
    "warmup": 7,
    "schedule": "linear",
    "min_lr_ratio": 0.5,
    "decay": 0.5,
    "optimizer": "muon",
    "betas": (0.5, 0.5),
    "weight_decay": 0.5,
    "max_grad_norm": 0.5,
    "label_smoothing": 0.5,
    "r_drop": 0.5,
    "ema_decay": 0.5,
    "precision": "float32",
    "seed": 7,
}


def test_a_recipe_survives_json():
    recipe = Recipe(**CHANGEABLE, **FIXED)
    assert from_dict(json.loads(json.dumps(asdict(recipe)))) == recipe


@pytest.mark.parametrize("name", FIXED)
def test_fields_that_influence_the_weights_may_not_change(name):
    assert replace(Recipe(), **{name: FIXED[name]}).differences(Recipe()) == [
        f"{name} was {getattr(Recipe(), name)!r} and is {FIXED[name]!r}"
    ]


def test_the_others_may_and_every_field_is_one_or_the_other():
    assert Recipe(**CHANGEABLE).differences(Recipe()) == []
    assert CHANGEABLE.keys() | FIXED.keys() == asdict(Recipe()).keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("steps", 2.5),
        ("warmup", -1),
        ("log_every", 0),
        ("keep_checkpoints", 0),
        ("eval_every", 0),
        ("save_every", 0),
        ("save_minutes", -1.0),
        ("patience", 0),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("schedule", "cosin"),
        ("optimizer", "sgd"),
        ("precision", "float16"),
        ("min_lr_ratio", 1.5),
        ("decay", -0.1),
        ("label_smoothing", 1.0),
        ("ema_decay", 1.0),
        ("betas", (0.9, 1.0)),
        ("max_grad_norm", -1.0),
        ("weight_decay", -0.1),
        ("seed", -1),
    ],
)
def test_senseless_numbers_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        Recipe(**{name: value})


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match=r"a recipe has no learning_rate: it has steps, lr"):
        from_dict({"learning_rate": 1.0})


def test_losses_are_better_when_lower():
    assert not any(map(higher_is_better, ("loss", "plain", "perplexity")))
    assert all(map(higher_is_better, ("accuracy", "bleu")))


def test_r_drop_counts_both_of_its_passes():
    assert Recipe().passes == 1
    assert Recipe(r_drop=1.0).passes == 2
