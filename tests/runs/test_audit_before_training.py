"""keepleft train audits a model for leaks before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import keepleft as kl
from keepleft.auditing.report import AuditReport
from keepleft.cli import main
from keepleft.runs.audit_verdict import audit_before_training, describe_audit, read_verdict


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
    verdict = read_verdict(corpus.parent / "run")
    assert verdict is not None
    assert verdict.verdict == "clean"
    assert "future" in verdict.checked


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
    assert "padding" in audit_before_training(kl.build(kl.presets.small(kl.presets.bert))).checked


def test_the_lines_about_an_audit_are_short_and_name_the_command_for_the_rest():
    reason = "the time of the quick budget was up; " * 9
    blocked = tuple(f"{kind}: {reason}" for kind in ("cache", "labels", "labels"))
    report = AuditReport("model", "causal", "quick", checked=("future", "batch"), blocked=blocked)
    lines = list(describe_audit(report, Path("runs/mine/model")))
    assert lines[0].startswith("audit: future, batch are clean (")
    assert lines[1].startswith("audit: not checked within seconds: cache, labels. ")
    assert lines[2] == "  keepleft audit runs/mine/model --budget full"
    assert max(map(len, lines)) <= 110
