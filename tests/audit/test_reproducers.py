"""The script of a finding runs as it is printed, shows the leak, and is silent about an honest model."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import keepleft as kl
from audit import test_cache as caches
from audit import test_interfaces as interfaces
from audit.planted import labels
from audit.planted_reports import PLANTED, planted_report
from thinned import thinned

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))
from audit_set.case import CASES as SET_CASES  # noqa: E402
from audit_set.prove import load  # noqa: E402

load()
pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDING = 1e-3  # of a loss in float32, of which one label is a small part


def shown_numbers(report: kl.AuditReport, **names: Any) -> list[float]:
    """What the scripts of all findings print."""
    numbers = []
    for finding in report.findings:
        assert finding.reproduce, report.text()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(finding.reproduce, dict(names))
        numbers.append(float(printed.getvalue()))
    return numbers


def assert_shown(report: kl.AuditReport, **names: Any) -> None:
    numbers = shown_numbers(report, **names)
    assert numbers, report.text()
    assert all(number > 0 for number in numbers), report.text()


@pytest.mark.parametrize("case", thinned(PLANTED, 2))
def test_every_script_of_a_planted_leak_shows_it(case):
    report, names = planted_report(case)
    assert_shown(report, **names)


# leaks of the unseen set, each with its honest twin where it has one
SET_PAIRS = {
    "scores_under_autocast": None,
    "embeddings_instead_of_ids": None,
    "labels_change_the_mask": None,
    "scale_of_the_batch": "scale_of_the_token",
    "rows_put_back_by_order": "rows_put_back",
    "memory_without_its_mask": None,
    "scan_resets_conv_does_not": "scan_and_conv_restart",
    "loss_of_the_row": "loss_inside_texts",
    "queries_from_zero": "keys_rotated_when_read",
    "window_one_slot_short": "window_less_the_new_token",
    "beams_without_conv": "private_state",
    "conv_state_shifted": "conv_and_scan_state",
    "int8_scale_grows": "int8_scale_per_token",
    "slots_of_the_prompt_before": "start_pos_reference",
    "ring_overwritten_by_chunk": None,
    "static_slots_unwritten": None,
    "memory_of_the_input_before": None,
    "zeros_after_the_softmax": "zeros_after_filled_scores",
    "online_softmax": "online_softmax_shifted",
    "mean_of_nothing": None,
    "smoothing_over_ignored": None,
    "micro_batch_means": "micro_batch_sums",
    "decoder_reads_its_labels": "labels_behind_a_start_token",
}


@pytest.mark.parametrize("name", thinned(list(SET_PAIRS), 2))
def test_every_script_of_the_unseen_set_shows_its_leak_and_is_silent_about_the_twin(name):
    builds = {case.name: case.build for case in SET_CASES}
    report = kl.audit(**builds[name](), budget="quick")
    arguments = builds[name]()
    assert_shown(report, **{**arguments, "model": arguments["target"]})
    twin = SET_PAIRS[name]
    if twin is not None:
        arguments = builds[twin]()
        numbers = shown_numbers(report, **{**arguments, "model": arguments["target"]})
        assert all(number < ROUNDING for number in numbers), report.text()


@pytest.mark.parametrize("model", thinned(list(interfaces.CASES), 2, lambda model: model.__name__))
def test_the_script_knows_each_interface_and_is_silent_about_the_twin(model):
    example = interfaces.CASES[model]
    report = kl.audit(model(True), example, vocab=interfaces.VOCAB, budget="quick")
    assert_shown(report, model=model(True))
    assert all(number < 1e-6 for number in shown_numbers(report, model=model(False)))


@pytest.mark.parametrize("model", caches.CASES, ids=lambda model: model.__name__)
def test_the_script_knows_each_cache_and_is_silent_about_the_twin(model):
    report = caches.audited(model(True))
    assert_shown(report, model=model(True))
    assert all(number < 1e-12 for number in shown_numbers(report, model=model()))


class LabelsInADict(labels.LabelsModel):
    """The twin of labels.InputsForLabels."""

    def forward(self, input_ids, labels=None):
        logits = self.model(input_ids)
        return {"loss": None if labels is None else self.loss(logits, labels), "logits": logits}


LABEL_TWINS = {
    labels.NotShifted: labels.LabelsModel,
    labels.ShiftedTwice: labels.LabelsModel,
    labels.AcrossRows: labels.LabelsModel,
    labels.Rolled: labels.LabelsModel,
    labels.IgnoredCounted: labels.LabelsModel,
    labels.TrainingNotShifted: labels.LabelsModel,
    labels.InputsForLabels: LabelsInADict,
    labels.CountIgnored: labels.AccumulationModel,
    labels.SummedNotShifted: labels.AccumulationModel,
}


@pytest.mark.parametrize("model", LABEL_TWINS, ids=lambda model: model.__name__)
def test_the_script_of_a_wrong_loss_is_silent_about_a_right_one_and_its_line_is_named(model):
    torch.manual_seed(0)
    report = kl.audit(model(), checks=["labels"], budget="quick")
    assert_shown(report, model=model())
    assert all(finding.line.startswith("labels.py:") for finding in report.findings)
    torch.manual_seed(0)
    numbers = shown_numbers(report, model=LABEL_TWINS[model]())
    assert all(number < ROUNDING for number in numbers), report.text()


def test_the_script_calls_a_model_by_the_adapter_that_the_audit_was_given():
    tokens = torch.randint(interfaces.VOCAB, (2, 9))
    adapter = kl.AuditAdapter(
        call=lambda model, tokens: model.play(tokens.tolist()), read=lambda out: torch.stack(out, 1)
    )
    report = kl.audit(
        interfaces.Listed(True), tokens, vocab=interfaces.VOCAB, adapter=adapter, budget="quick"
    )
    assert_shown(report, model=interfaces.Listed(True), adapter=adapter)
    assert not any(shown_numbers(report, model=interfaces.Listed(False), adapter=adapter))


# -- one bug, one finding ----------------------------------------------------------------------


class Mixer(nn.Module):
    """Attention whose mask depends on the mode: it is missing in training, in eval mode, or never."""

    def __init__(self, open_in: bool | None) -> None:
        super().__init__()
        self.open_in = open_in
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=self.training is not self.open_in)


class OtherMixer(Mixer):
    """The same leak in a line of its own."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=self.training is not self.open_in)


class Stack(nn.Module):
    def __init__(self, *mixers):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 16)
        self.mixers = nn.ModuleList(mixers)
        self.head = nn.Linear(16, 30)

    def forward(self, tokens, labels=None):
        x = self.embed(tokens)
        for mixer in self.mixers:
            x = mixer(x)
        logits = self.head(x)
        return logits if labels is None else (self.loss(logits, labels), logits)

    def loss(self, logits, labels):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class TwoFaults(Stack):
    """The loss is wrong in two ways: in eval mode it counts -100, in training labels are not shifted."""

    def loss(self, logits, labels):
        if self.training:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none").mean()


def quick_findings(model: nn.Module) -> tuple[kl.Finding, ...]:
    return kl.audit(model, torch.randint(30, (2, 9)), budget="quick").findings


def test_the_same_line_in_two_modules_is_one_finding():
    (finding,) = quick_findings(Stack(Mixer(False), Mixer(True)))
    assert (finding.module, finding.also_in) == ("mixers.0", ("mixers.1",))
    assert "also in: mixers.1" in kl.audit(Stack(Mixer(False), Mixer(True)), vocab=30, budget="quick").text()


def test_two_leaks_are_two_findings():
    findings = quick_findings(Stack(Mixer(False), OtherMixer(True)))
    assert {(finding.kind, finding.module) for finding in findings} == {
        ("future", "mixers.0"),
        ("future", "mixers.1"),
    }
    assert not any(finding.also_in for finding in findings)


def test_two_faults_of_a_loss_are_two_findings():
    findings = quick_findings(TwoFaults(Mixer(None)))
    assert [finding.kind for finding in findings] == ["labels", "labels"]
    assert len({finding.line for finding in findings}) == 2


def test_a_leak_and_a_wrong_loss_are_two_findings():
    findings = quick_findings(TwoFaults(Mixer(False)))
    assert {finding.kind for finding in findings} == {"future", "labels"}
