"""Parallel teacher forcing gives the gradients of the step-by-step loop, and only with the mask."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from keepleft.attention.masks import causal, full, prefix, window
from keepleft.cli import main
from keepleft.demo.masking import (
    LOOPS,
    MAX_GRADIENT_DIFFERENCE,
    ExperimentResult,
    MaskTrial,
    PhraseData,
    TrainedSide,
    match_gradients,
)
from keepleft.demo.phrases import corpus

PAIRS = [
    (f"{who} {does}", f"{wer} {tut}")
    for who, wer in (("I", "je"), ("you", "tu"), ("we", "nous"))
    for does, tut in (
        ("run now", "cours maintenant"),
        ("sing", "chante"),
        ("sleep here", "dors ici"),
        ("eat", "mange"),
    )
]


@pytest.fixture(autouse=True)
def one_thread():
    """More only get into each other's way with models as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def few(monkeypatch):
    """A handful of phrases in place of all."""
    monkeypatch.setattr(corpus, "split", lambda language: (PAIRS[:9], PAIRS[9:]))


@pytest.mark.parametrize("mask", [causal, causal & window(3)], ids=str)
def test_one_pass_has_the_gradients_of_both_loops(mask):
    for row in match_gradients([1, 11], mask=mask, measure_time=False):
        assert row.difference.keys() == LOOPS.keys()
        assert max(row.difference.values()) <= MAX_GRADIENT_DIFFERENCE


@pytest.mark.parametrize("mask", [full, causal | prefix(5)], ids=str)
def test_without_the_mask_it_has_not(mask):
    (row,) = match_gradients([13], mask=mask, measure_time=False)
    assert min(row.difference.values()) > 1e-3


def test_times_and_ratios():
    (row,) = match_gradients([5])
    assert row.seconds.keys() == {"one pass", *LOOPS}
    assert all(row.ratio[name] == row.seconds[name] / row.seconds["one pass"] > 0 for name in LOOPS)


def test_two_trials_differ_in_their_mask_alone(few):
    phrases = PhraseData()
    first, second, unmasked = (MaskTrial(mask, phrases, 3) for mask in (causal, causal, full))
    assert all(
        bool((a == b).all())
        for a, b in zip(first.model.parameters(), unmasked.model.parameters(), strict=True)
    )
    for trial in (first, second, unmasked):
        assert [report.step for report in trial.train()] == [1, 2, 3]
    assert first.side.curve == second.side.curve != unmasked.side.curve


def test_with_the_mask_it_makes_no_difference_whether_the_future_is_there(few):
    trial = MaskTrial(causal, PhraseData(), 12)
    list(trial.train())
    side = trial.examine()
    assert side.honest == side.accuracy > 0


def test_the_verdict_asks_for_both():
    (row,) = match_gradients([3], measure_time=False)
    (control,) = match_gradients([3], mask=full, measure_time=False)
    good, bad = TrainedSide("causal", [], exact=0.5), TrainedSide("full", ["leak"], exact=0.1)
    assert ExperimentResult([row], control, good, bad).ok
    assert not ExperimentResult([row], control, bad, good).ok
    assert not ExperimentResult([control], control, good, bad).ok
    assert not ExperimentResult([row], row, good, bad).ok  # a measure that never differs measures nothing
    early = replace(bad, curve=[(20, 1.0)])
    assert ExperimentResult([row], control, early, good).ok  # so few steps say nothing about generation
    assert not ExperimentResult([control], control, early, good).ok


def test_the_command_writes_every_number_and_two_pictures(few, tmp_path, capsys):
    code = main(["compare", "--lengths", "2", "3", "--steps", "4", "--out", str(tmp_path / "out"), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((tmp_path / "out" / "compare.json").read_text("utf-8"))
    assert code == (0 if said["ok"] else 1)
    assert said["equal"]
    assert [row["length"] for row in said["same"]] == [2, 3]
    assert said["masked"]["faults"] == []
    assert said["unmasked"]["faults"][0] == "position 0 sees position 1, its future"
    for side in (said["masked"], said["unmasked"]):
        assert [step for step, _ in side["curve"]] == [1, 2, 3, 4]
        assert 0 <= side["exact"] <= 1
        assert 0 <= side["words"] <= 1
        assert all(sample.keys() == {"english", "french", "written"} for sample in side["samples"])
        assert side["seen"]
    for name in ("speed.svg", "leak.svg"):
        ElementTree.fromstring((tmp_path / "out" / name).read_text("utf-8"))


def test_the_command_says_it_in_words(few, tmp_path, capsys):
    assert main(["compare", "--lengths", "2", "--steps", "1", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "so few steps do not yet show which model generates better text" in said.out
    assert "the same gradients" in said.out
    assert "without it" in said.out
    assert said.err == ""


@pytest.mark.parametrize("wrong", [["--lengths", "0"], ["--steps", "0"]])
def test_wrong_use_is_refused_before_any_work(wrong, tmp_path, capsys):
    assert main(["compare", *wrong, "--out", str(tmp_path)]) == 2
    assert "whole number of at least 1" in capsys.readouterr().err
