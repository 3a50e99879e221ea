"""A finding names the module, and the line of code wherever there is one, in words that read well."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import keepleft as kl
from keepleft.auditing import localize

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


class EmptyTagger(Tagger):
    """Copies into new memory, which holds anything until then."""

    def forward(self, tokens):
        x = self.embed(tokens)
        copied = torch.empty_like(x)
        copied[..., 8:].copy_(x[..., 8:])
        copied[..., :8].copy_(x[..., :8])
        return self.out(copied.flip(1))


def test_memory_that_nothing_was_written_to_is_not_where_a_leak_enters():
    model = EmptyTagger()
    probe = localize.Probe(lambda: model(torch.arange(5)[None]), 1, 5, 0, 2)
    records = localize._trace_ops(model, probe, None, with_grad=False)
    written = [op for _, op, value in records if value is not None]
    assert "empty_like" in [op for _, op, _ in records]
    assert "flip" in written
    assert not {"empty_like", "copy_"} & set(written)


def causal_weights(scores):
    """Softmax over the past, right for one pass over a whole text."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


class CachedTagger(Tagger):
    """A step reads the keys of the past, and its mask begins anew."""

    def forward(self, tokens, past_key_values=None):
        x = self.embed(tokens)
        keys = x if past_key_values is None else torch.cat([past_key_values, x], 1)
        weights = causal_weights(x @ keys.transpose(1, 2))
        return self.out(weights @ keys), keys


def test_the_line_of_a_cache_finding_is_in_the_module_whatever_function_it_calls():
    model = CachedTagger()
    (finding,) = kl.audit(model, torch.randint(30, (2, 9)), budget="quick", checks=["cache"]).findings
    assert finding.line.startswith(line_of(model, "weights @ keys"))


class NanTagger(Tagger):
    """The mean of what came before: 0 / 0 at the first position."""

    def forward(self, tokens):
        x = self.embed(tokens)
        count = torch.arange(x.shape[1]).view(1, -1, 1)
        return self.out(torch.cat([0 * x[:, :1], x.cumsum(1)[:, :-1]], 1) / count)


def test_the_line_that_makes_nan_of_numbers_is_named():
    model = NanTagger()
    (finding,) = kl.audit(model, torch.randint(30, (2, 9)), budget="quick", checks=["nan"]).findings
    assert finding.line == f"{line_of(model, '/ count)')}, in div()"


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
