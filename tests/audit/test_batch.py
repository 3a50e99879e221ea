"""Batch independence, for any number of rows, on every path, with any padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import keepleft as kl
from keepleft.auditing import rounding
from keepleft.auditing.checks import batch
from keepleft.auditing.code_paths import BUDGETS, CodePath
from keepleft.auditing.model_adapter import ModelAdapter
from keepleft.auditing.session import AuditSession

VOCAB, WIDTH = 37, 12


class Recurrent(nn.Module):
    """A GRU over groups of four rows, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def mixed(self, x):
        return x

    def carried(self, state):
        """The initial state of a group, given the final state of the one before."""
        return

    def forward(self, tokens):
        out, state = [], None
        for rows in tokens.split(4):
            state = self.carried(state) if state is not None and state.shape[1] == len(rows) else None
            x, state = self.gru(self.mixed(self.embed(rows)), state)
            out.append(self.head(x))
        return torch.cat(out)


class Carried(Recurrent):
    """The final state of one group of rows is the initial state of the next."""

    def carried(self, state):
        return state


class LastReadsFirst(Recurrent):
    def mixed(self, x):
        return x if len(x) < 3 else torch.cat([x[:-1], x[-1:] + 0.1 * x[:1]])


class HalfMixes(Recurrent):
    def mixed(self, x):
        return x - x.mean(0, keepdim=True) if x.dtype == torch.bfloat16 else x


class Padded(Recurrent):
    """Takes lengths, and averages the real tokens of each row so far."""

    def real(self, lengths):
        return lengths[:, None, None].float()

    def forward(self, tokens, lengths=None):
        lengths = torch.full((len(tokens),), tokens.shape[1]) if lengths is None else lengths
        x = self.embed(tokens)
        return self.head(self.gru(x)[0] / self.real(lengths).to(x) * lengths[:, None, None].to(x))


class OthersLengths(Padded):
    """Divides by the mean length in the batch."""

    def real(self, lengths):
        return lengths.float().mean().expand(len(lengths))[:, None, None]


def some():
    return torch.randint(1, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "found"),
    [(Recurrent, False), (Carried, True), (LastReadsFirst, True), (Padded, False), (OthersLengths, True)],
)
def test_rows_are_kept_apart(model, found) -> None:
    report = kl.audit(model(), some(), checks=["batch"], budget="quick")
    assert {finding.kind for finding in report.findings} == ({"batch"} if found else set()), report.text()
    assert found or report.ok


@pytest.mark.parametrize(("model", "found"), [(Recurrent, False), (HalfMixes, True)])
def test_each_path_that_is_offered_is_looked_at(model, found) -> None:
    subject = ModelAdapter(model().eval(), some(), claim=kl.causal)
    inquiry = AuditSession(subject, kl.causal, 1, BUDGETS["quick"], ("batch",), float64_support=False)
    with subject.on_path(CodePath()):
        subject.run(subject.make_inputs(2), CodePath())
    batch.batch(inquiry, [], [CodePath(dtype=torch.bfloat16)])
    assert inquiry.has_finding("batch") == found


def test_autocast_may_round_as_much_as_bfloat16() -> None:
    adapter = ModelAdapter(Recurrent().eval(), some(), claim=kl.causal)
    session = AuditSession(adapter, kl.causal, 1, BUDGETS["quick"], ("batch",))
    allowed = [
        rounding.tolerance(session, path)
        for path in (CodePath(autocast=True), CodePath(dtype=torch.bfloat16), CodePath())
    ]
    assert allowed[0] == allowed[1] > allowed[2]
