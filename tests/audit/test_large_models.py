"""The first round over a large model: something of every kind, on the plain path, whatever the time says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

import keepleft as kl
from audit.complete_model import FAULTS, VOCAB, CompleteModel
from keepleft.auditing import reused_outputs
from keepleft.auditing.checks import agreement
from keepleft.auditing.checks.agreement import CallPair, agree
from keepleft.auditing.code_paths import BUDGETS, ESSENTIAL, CodePath
from keepleft.auditing.model_adapter import ModelAdapter
from keepleft.auditing.session import AuditSession


@pytest.fixture
def first_round_only(monkeypatch):
    """Every model is large, and the time is up when the first round has begun."""
    monkeypatch.setattr(AuditSession, "is_large", property(lambda self: self.budget.seconds is not None))
    monkeypatch.setitem(BUDGETS, "quick", replace(BUDGETS["quick"], large_seconds=0.0))


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


def design():
    return kl.build(kl.presets.small(kl.presets.llama), generator=torch.Generator().manual_seed(0)).eval()


# -- what is large -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "budget", "is_large"),
    [(3e7 + 1, "quick", True), (3e7, "quick", False), (3e7 + 1, "full", False)],
)
def test_a_model_is_large_by_its_parameters_and_only_where_time_is_limited(parameters, budget, is_large):
    adapter = ModelAdapter(CompleteModel(), None, claim=kl.causal)
    adapter.num_parameters = parameters
    session = AuditSession(adapter, kl.causal, 1, BUDGETS[budget], ("future",))
    assert session.is_large == is_large
    session.budget = BUDGETS[budget].of_round(ESSENTIAL)
    assert session.essential
    assert session.budget.name == budget
    assert session.seconds == (BUDGETS[budget].large_seconds if is_large else BUDGETS[budget].seconds)
    session.started_at -= 1e6
    assert not session.out_of_time


def test_after_the_first_round_the_time_counts():
    adapter = ModelAdapter(CompleteModel(), None, claim=kl.causal)
    session = AuditSession(adapter, kl.causal, 1, BUDGETS["quick"], ("future",))
    session.started_at -= 1e6
    assert session.out_of_time


# -- all kinds are checked ---------------------------------------------------------------------


@pytest.mark.parametrize("model", [CompleteModel, llama])
def test_all_seven_kinds_are_checked_when_no_time_is_left(model, first_round_only):
    report = kl.audit(model(), budget="quick")
    assert report.ok, report.text()
    assert sorted(report.checked) == sorted(FAULTS), report.text()


@pytest.mark.parametrize("model", [gpt2, design])
def test_whatever_kinds_a_model_offers_are_checked_when_no_time_is_left(model, first_round_only):
    report = kl.audit(model(), budget="quick")
    assert report.ok, report.text()
    assert {"future", "padding", "cache", "batch", "nan"} <= set(report.checked), report.text()


def test_the_first_round_takes_few_calls(first_round_only):
    few = kl.audit(CompleteModel(), budget="quick")
    assert few.calls < 200
    assert any("was up" in line for line in few.skipped)
    assert any("it is large" in note for note in few.notes)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_leak_of_each_kind_is_found_in_the_first_round(fault, first_round_only):
    report = kl.audit(CompleteModel(fault), budget="quick")
    assert fault in {finding.kind for finding in report.findings}, report.text()


@pytest.mark.parametrize("model", [gpt2, llama])
def test_a_class_of_transformers_that_looks_ahead_is_found_in_the_first_round(model, first_round_only):
    class LooksAhead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, input_ids):
            return self.inner(input_ids.roll(-1, 1)).logits

    report = kl.audit(LooksAhead(), vocab=50, budget="quick")
    assert {finding.kind for finding in report.findings} == {"future"}, report.text()


# -- no pair of calls twice --------------------------------------------------------------------


def comparison(row=0):
    adapter = ModelAdapter(CompleteModel().eval(), None, claim=kl.causal)
    session = AuditSession(adapter, kl.causal, 1, BUDGETS["quick"], ("batch",))
    adapter.run(adapter.make_inputs(2), CodePath())
    return session


def call_pair(session, seed, kind="batch"):
    positions = torch.tensor([[0, 0], [0, 1]])
    inputs = [session.adapter.make_inputs(2, seed=seed) for _ in range(2)]
    return CallPair(kind, *inputs, positions, positions, True, lambda *_: "")


def test_a_pair_of_calls_is_compared_once(monkeypatch):
    compared = []
    monkeypatch.setattr(agreement, "_agree", lambda session, path, pair: compared.append(pair) or True)
    session = comparison()
    for _ in range(3):
        assert agree(session, CodePath(), call_pair(session, 5))
    assert len(compared) == 1


@pytest.mark.parametrize("change", ["inputs", "path", "kind", "positions"])
def test_another_pair_is_compared_anew(change, monkeypatch):
    compared = []
    monkeypatch.setattr(agreement, "_agree", lambda session, path, pair: compared.append(pair) or True)
    session = comparison()
    agree(session, CodePath(), call_pair(session, 5))
    other = call_pair(session, 6 if change == "inputs" else 5, "padding" if change == "kind" else "batch")
    if change == "positions":
        other = replace(other, first_positions=torch.tensor([[1, 0], [1, 1]]))
    agree(session, CodePath(train=change == "path"), other)
    assert len(compared) == 2


def test_what_did_not_agree_is_remembered_too(monkeypatch):
    monkeypatch.setattr(agreement, "_agree", lambda *_: False)
    session = comparison()
    assert not agree(session, CodePath(), call_pair(session, 5))
    monkeypatch.setattr(agreement, "_agree", lambda *_: True)
    assert not agree(session, CodePath(), call_pair(session, 5))


# -- outputs used again ------------------------------------------------------------------------


class Counted(nn.Module):
    """Counts its calls."""

    calls = 0

    def forward(self, x, factor=2.0):
        self.calls += 1
        return x * factor


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Counted()
        self.listed = nn.ModuleList([Counted()])

    def forward(self, x, factor=2.0):
        return self.listed[0](self.child(x, factor=factor))


def test_a_submodule_is_called_once_for_equal_inputs():
    model = Parent()
    with reused_outputs.reuse_outputs(model):
        outs = [model(torch.arange(3.0)) for _ in range(3)]
    assert model.child.calls == model.listed[0].calls == 1
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"x": torch.arange(3.0)}, {"x": torch.arange(3.0) + 1}),
        ({"x": torch.arange(3.0)}, {"x": torch.arange(3.0).double()}),
        ({"x": torch.arange(3.0)}, {"x": torch.arange(3.0)[None]}),
        ({"x": torch.arange(3.0)}, {"x": torch.arange(3.0), "factor": 3.0}),
    ],
)
def test_a_submodule_is_called_again_for_other_inputs(first, second):
    model = Parent()
    with reused_outputs.reuse_outputs(model):
        model(**first)
        out = model(**second)
    assert model.child.calls == 2
    assert torch.equal(out, Parent()(**second))
    assert out.dtype == second["x"].dtype


def test_an_input_that_was_changed_in_place_is_another_input():
    model = Parent()
    x = torch.arange(3.0)
    with reused_outputs.reuse_outputs(model):
        model(x)
        x[0] = 7.0
        assert torch.equal(model(x), 4 * x)
    assert model.child.calls == 2


def test_the_outputs_are_used_again_for_a_while_only():
    model = Parent()
    with pytest.raises(TypeError), reused_outputs.reuse_outputs(model):
        model("no tensor", factor=[])
    assert "forward" not in vars(model.child)
    assert "forward" not in vars(model.listed[0])
    for _ in range(2):
        model(torch.arange(3.0))
    assert model.listed[0].calls == 2


def test_the_loss_of_a_large_model_is_checked_without_computing_the_rest_again(first_round_only):
    class Body(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, VOCAB)

        def forward(self, x):
            self.calls += 1
            return self.embed(x)

    class Labelled(nn.Module):
        def __init__(self, shift) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = Body()
            self.shift = shift

        def forward(self, input_ids, labels=None):
            logits = self.body(input_ids)
            if labels is None:
                return {"logits": logits}
            scores = logits[:, : logits.shape[1] - self.shift]
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, self.shift :].flatten())
            return {"loss": loss, "logits": logits}

    honest, leaking = Labelled(1), Labelled(0)
    report = kl.audit(honest, budget="quick", checks=["labels"])
    assert report.ok, report.text()
    assert kl.audit(leaking, budget="quick", checks=["labels"]).findings
    assert honest.body.calls < 0.7 * report.calls
