"""keepleft train looks for leaks before the first step."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
from keepleft.cli import main
from keepleft.runs.train import audit_before_training


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(
        "".join(f"the sea is {word} and the sky is not\n" for word in "blue deep cold wide calm".split()) * 8
    )
    return path


def trained(corpus, *more):
    return main(
        [
            "train",
            "--task",
            "lm",
            "--train",
            str(corpus),
            "--out",
            str(corpus.parent / "run"),
            "--size",
            "tiny",
            "--recipe.steps",
            "1",
            "--device",
            "cpu",
            *more,
        ]
    )


def test_train_says_what_the_audit_said(corpus, capsys):
    assert trained(corpus) == 0
    assert "audit: future" in capsys.readouterr().err


def test_train_without_an_audit_says_nothing_of_it(corpus, capsys):
    assert trained(corpus, "--no-audit") == 0
    assert "audit:" not in capsys.readouterr().err


def test_an_audit_that_finds_something_stops_the_run_and_names_it(corpus, capsys, monkeypatch):
    def blind(*given, **named):
        model = kl.build(kl.presets.small(kl.presets.gpt2), generator=torch.Generator().manual_seed(0))
        model.decoder.masks = (kl.full,)
        return model

    monkeypatch.setattr("keepleft.runs.initial_model.initial_model", blind)
    assert trained(corpus) == 2
    told = capsys.readouterr().err
    assert "decoder.layers.0.self" in told
    assert "--no-audit" in told
    assert not (corpus.parent / "run").exists()


def test_an_audit_takes_an_encoder_for_one():
    assert "padding" in audit_before_training(kl.build(kl.presets.small(kl.presets.bert)))
