"""The events of an audit: in order, complete, and enough to draw a bar; and what a budget left untried."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch
from torch import nn

import keepleft as kl

VOCAB = 23


class Convolution(nn.Module):
    """Causal, unless it is padded on both sides."""

    def __init__(self, left: int = 2, right: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.conv = nn.Conv1d(6, 6, kernel_size=3)
        self.dropout = nn.Dropout(0.1)
        self.sides = (left, right)

    def forward(self, tokens, labels=None):
        features = self.dropout(self.embed(tokens)).mT
        return self.conv(nn.functional.pad(features, self.sides)).mT @ self.embed.weight.T


def events_of(model: nn.Module, **options) -> tuple[list[kl.AuditProgress], kl.AuditReport]:
    events: list[kl.AuditProgress] = []
    report = kl.audit(model, vocab=VOCAB, on_progress=events.append, **options)
    return events, report


@pytest.fixture(scope="module")
def quick():
    torch.manual_seed(1)
    return events_of(Convolution(), budget="quick")


@pytest.fixture(scope="module")
def standard():
    torch.manual_seed(1)
    return events_of(Convolution(), budget="standard")


def test_every_check_starts_and_ends_once_and_its_outcome_is_that_of_the_report(quick):
    events, report = quick
    outcomes = {event.check: event.outcome for event in events if event.kind == "outcome"}
    starts = [event.check for event in events if event.kind == "check"]
    assert list(outcomes) == starts
    assert len(starts) == 7
    assert [event.number for event in events if event.kind == "check"] == list(range(1, 8))
    assert {check for check, outcome in outcomes.items() if outcome == "clean"} == set(report.checked)
    assert outcomes["padding"] == "not applicable"
    (reason,) = [event.reason for event in events if event.kind == "outcome" and event.check == "padding"]
    assert f"padding: {reason}" in report.skipped


def test_a_thorough_budget_makes_every_check_twice_and_tells_the_outcome_after_the_second(standard):
    events, _ = standard
    passes = {event.check: [] for event in events}
    for event in events:
        if event.kind == "check":
            passes[event.check].append(event.pass_number)
    assert set(map(tuple, passes.values())) == {(1, 2)}
    assert {event.pass_number for event in events if event.kind == "outcome"} == {2}
    assert {event.num_passes for event in events} == {2}


@pytest.mark.parametrize("budget", ["quick", "standard"])
def test_numbers_only_grow(budget, request):
    events, report = request.getfixturevalue(budget)
    for name in ("fraction", "calls", "seconds"):
        values = [getattr(event, name) for event in events]
        assert values == sorted(values)
    assert 0 < events[0].fraction < 0.2
    assert 0.9 < events[-1].fraction < 1
    assert events[-1].calls <= report.calls


def test_paths_are_told_as_the_report_names_them_and_not_more_often_than_anyone_can_read(standard):
    events, report = standard
    told = [event for event in events if event.kind == "path"]
    assert {event.path for event in told} <= set(report.paths)
    gaps = [late.seconds - early.seconds for early, late in pairwise(told)]
    assert all(gap > 0.09 for gap in gaps)


def test_a_finding_is_told_as_it_is_found():
    events, report = events_of(Convolution(1, 1), budget="quick")
    (event,) = [event for event in events if event.kind == "finding"]
    assert event.finding.kind == event.check == "future"
    assert report.findings[0].message.startswith(event.finding.message)
    assert event == str(event.finding)
    (outcome,) = [event for event in events if event.kind == "outcome" and event.check == "future"]
    assert outcome.outcome == "leak"
    assert events.index(event) < events.index(outcome)


def test_an_event_is_a_line_for_whoever_takes_strings(quick):
    events, _ = quick
    lines: list[str] = []
    kl.audit(Convolution(), vocab=VOCAB, budget="quick", checks=["batch"], on_progress=lines.append)
    assert lines[0] == "batch"
    assert lines[-1].startswith("batch: clean (")
    assert all("\n" not in line and line[:72] for line in [*lines, *events])
    assert pickle.loads(pickle.dumps(events[3])).check == events[3].check


def test_what_the_callback_raises_ends_the_audit_and_the_model_is_as_it_was():
    class EnoughError(Exception):
        pass

    def stop(progress: kl.AuditProgress) -> None:
        if progress.number == 2:
            raise EnoughError

    model = Convolution().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(EnoughError):
        kl.audit(model, vocab=VOCAB, budget="quick", on_progress=stop)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_report_lists_the_paths_that_its_budget_left_out():
    model = Convolution()
    model.config = type("Config", (), {"max_length": 40})()
    reports = {
        budget: kl.audit(model, vocab=VOCAB, budget=budget, checks=["future"]) for budget in ("quick", "full")
    }
    left_out = reports["quick"].not_tried
    assert "train, labels given, no mask, batch 2" in left_out
    assert not {*left_out} & {path.partition(", length")[0] for path in reports["quick"].paths}
    assert reports["full"].not_tried == ()
    assert "not tried" not in reports["full"].text()
    line = reports["quick"].text().splitlines()[-1]
    assert line.startswith(f"not tried: {left_out[0]}; ")
    assert line.endswith("(budget full tries them)")
    assert reports["quick"].dict()["not_tried"] == left_out


def test_an_encoder_is_held_to_the_same_list():
    reports = [
        kl.audit(Convolution(1, 1), vocab=VOCAB, claim=kl.full, budget=budget) for budget in ("quick", "full")
    ]
    assert "train, labels given, no mask, batch 2" in reports[0].not_tried
    assert reports[1].not_tried == ()


def test_checks_with_paths_of_their_own_leave_nothing_out():
    assert kl.audit(Convolution(), vocab=VOCAB, budget="quick", checks=["nan"]).not_tried == ()
