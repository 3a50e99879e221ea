"""A slow model: every kind gets a share of the time before any gets more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import keepleft as kl
from audit.complete_model import FAULTS, VOCAB, CompleteModel
from keepleft.auditing.audit import FIRST_ROUND_SHARES
from keepleft.auditing.code_paths import BUDGETS

SECONDS = 4.0  # of the budget; a quick audit of the slow model would take several times as long


@pytest.fixture
def little_time(monkeypatch):
    monkeypatch.setitem(BUDGETS, "quick", replace(BUDGETS["quick"], seconds=SECONDS))


def test_the_shares_leave_something_for_each_kind():
    assert set(FIRST_ROUND_SHARES) < set(FAULTS)
    assert sum(FIRST_ROUND_SHARES.values()) < 1


def test_all_kinds_of_a_slow_model_are_checked(little_time):
    report = kl.audit(CompleteModel(seconds=0.004), budget="quick")
    assert report.ok, report.text()
    assert sorted(report.checked) == sorted(FAULTS), report.text()
    assert any("was up" in line for line in report.skipped)


@pytest.mark.parametrize("fault", ["batch", "labels", "cache"])
def test_a_leak_of_a_slow_model_is_found_whichever_check_it_is_for(fault, little_time):
    report = kl.audit(CompleteModel(fault, seconds=0.004), budget="quick")
    assert fault in {finding.kind for finding in report.findings}, report.text()


def test_the_time_in_the_model_is_part_of_the_time():
    for model in (CompleteModel(), CompleteModel(seconds=0.001), CompleteModel("future")):
        report = kl.audit(model, budget="quick", checks=["batch", "nan"])
        assert 0 < report.model_seconds <= report.seconds
        assert report.model_seconds >= model.seconds * report.calls
    assert f"{report.model_seconds / report.seconds:.0%} of it in the model" in report.text()


class WritesArgument(nn.Module):
    """Changes one of its arguments in place."""

    def __init__(self, name: str, embed: int = VOCAB) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(embed, VOCAB)
        self.written = name

    def forward(self, tokens, attention_mask=None, bias=None):
        x = self.embed(tokens)
        arguments = {"tokens": tokens, "attention_mask": attention_mask, "bias": bias}
        if bias is not None:
            x = x + bias
        if arguments.get(self.written) is not None:
            arguments[self.written].mul_(0)
        return x


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("tokens", "unchecked"), ("attention_mask", "clean"), ("bias", "clean"), ("", "clean")],
)
def test_an_argument_that_is_changed_in_place_is_a_note_unless_it_is_the_tokens(name, verdict):
    example = {
        "tokens": torch.randint(1, VOCAB, (2, 9)),
        "attention_mask": torch.ones(2, 9, dtype=torch.long),
        "bias": torch.ones(VOCAB),
    }
    report = kl.audit(WritesArgument(name), example, budget="quick")
    assert report.verdict == verdict, report.text()
    is_noted = any(f"it changes {name} in place" in note for note in report.notes)
    assert is_noted == (name in ("attention_mask", "bias"))
