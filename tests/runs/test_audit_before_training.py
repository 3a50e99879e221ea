"""keepleft train audits a model for leaks before the first step."""

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


def train(corpus, *flags):
    paths = ["--train", str(corpus), "--out", str(corpus.parent / "run")]
    options = "--task lm --size tiny --recipe.steps 1 --device cpu".split()
    return main(["train", *paths, *options, *flags])


def test_train_reports_the_audit(corpus, capsys):
    assert train(corpus) == 0
    assert "audit: future" in capsys.readouterr().err


def test_train_without_an_audit_reports_none(corpus, capsys):
    assert train(corpus, "--no-audit") == 0
    assert "audit:" not in capsys.readouterr().err


def test_an_audit_that_finds_something_stops_the_run_and_names_it(corpus, capsys, monkeypatch):
    def leaking_model(*args):
        model = kl.build(kl.presets.small(kl.presets.gpt2), generator=torch.Generator().manual_seed(0))
        model.decoder.masks = (kl.full,)
        return model

    monkeypatch.setattr("keepleft.runs.prepare.initial_model", leaking_model)
    assert train(corpus) == 2
    stderr = capsys.readouterr().err
    assert "decoder.layers.0.self" in stderr
    assert "--no-audit" in stderr
    assert not (corpus.parent / "run").exists()


def test_an_audit_knows_that_an_encoder_is_not_causal():
    assert "padding" in audit_before_training(kl.build(kl.presets.small(kl.presets.bert)))
