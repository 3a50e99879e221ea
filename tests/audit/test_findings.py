"""A finding names the module, and the line of code wherever there is one, in words that read well."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import keepleft as kl

pytestmark = pytest.mark.usefixtures("one_thread")


class Tagger(nn.Module):
    """Embeds, mixes positions without a mask, and projects."""

    def __init__(self, **mixers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.mixers = nn.ModuleDict(mixers)
        self.out = nn.Linear(16, 30)


class RecurrentTagger(Tagger):
    def forward(self, tokens):
        mixed, _ = self.mixers["rnn"](self.embed(tokens))
        return self.out(mixed)


class AttentiveTagger(Tagger):
    def forward(self, tokens):
        x = self.embed(tokens)
        (mixer,) = self.mixers.values()
        return self.out(mixer(x, x, x)[0])


class SoftmaxTagger(Tagger):
    def forward(self, tokens):
        x = self.embed(tokens)
        weights = torch.softmax(self.out(x) @ self.out(x).transpose(1, 2), -1)
        return self.out(torch.einsum("bqk,bkd->bqd", weights, x))


def audit_future(model: nn.Module) -> kl.AuditReport:
    torch.manual_seed(0)
    return kl.audit(model, torch.randint(30, (2, 9)), budget="quick", checks=["future"])


def line_of(model: nn.Module, code: str) -> str:
    """The file and line of `code` in this model's forward."""
    lines, start = inspect.getsourcelines(type(model).forward)
    (offset,) = [n for n, line in enumerate(lines) if code in line]
    return f"test_findings.py:{start + offset}"


@pytest.mark.parametrize("recurrence", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrence_in_both_directions_is_found_with_the_line_that_calls_it(recurrence):
    model = RecurrentTagger(rnn=recurrence(16, 8, bidirectional=True, batch_first=True))
    finding = audit_future(model).findings[0]
    assert finding.module == "mixers.rnn"
    assert "the recurrence of mixers.rnn" in finding.message
    assert finding.line == line_of(model, 'self.mixers["rnn"]')


def test_the_line_that_calls_a_module_of_torch_does_not_name_what_torch_does_inside():
    model = AttentiveTagger(mixer=nn.MultiheadAttention(16, 2, batch_first=True))
    finding = audit_future(model).findings[0]
    assert finding.line == line_of(model, "mixer(x, x, x)")


def test_the_line_names_the_function_that_it_calls():
    model = SoftmaxTagger()
    finding = audit_future(model).findings[0]
    assert finding.line == f"{line_of(model, 'einsum')}, in einsum()"


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("mixer", "through the attention of mixers.mixer: "),
        ("attention", "through mixers.attention: "),
        ("SelfAttention", "through mixers.SelfAttention: "),
    ],
)
def test_a_module_whose_name_says_its_kind_is_not_called_so_again(name, phrase):
    report = audit_future(AttentiveTagger(**{name: nn.MultiheadAttention(16, 2, batch_first=True)}))
    assert phrase in report.findings[0].message


def test_what_is_skipped_because_of_a_leak_says_what_to_fix_first():
    model = AttentiveTagger(mixer=nn.MultiheadAttention(16, 2, batch_first=True))
    report = kl.audit(model, torch.randint(30, (2, 9)), budget="quick")
    assert any(line.endswith("differ: fix that first") for line in report.skipped)


@pytest.mark.parametrize(("count", "phrase"), [(1, "1 weight is all zero"), (2, "2 weights are all zero")])
def test_the_note_on_weights_that_are_all_zero_says_why_they_were_randomised(count, phrase):
    model = AttentiveTagger(mixer=nn.MultiheadAttention(16, 2, batch_first=True, bias=count == 2))
    if count == 1:
        nn.init.zeros_(model.out.weight)
    (note,) = audit_future(model).notes
    pronoun = "it" if count == 1 else "them"
    assert note == f"{phrase} and would hide what lies behind {pronoun}: randomised for the audit"
