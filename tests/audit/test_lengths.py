"""Leaks that some lengths alone show, and honest models that have a number of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import keepleft as kl
from keepleft.auditing.checks import future
from keepleft.auditing.code_paths import BUDGETS, ESSENTIAL, CodePath, lengths_to_try, nearby_lengths
from keepleft.auditing.model_adapter import ModelAdapter
from keepleft.auditing.session import AuditSession

VOCAB, WIDTH = 23, 14


def reads_all(x: Tensor) -> Tensor:
    return x + x.mean(1, keepdim=True)


def knows_length(x: Tensor) -> Tensor:
    return x * (1 + 1 / x.shape[1])


def mean_so_far(x: Tensor) -> Tensor:
    return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


class Choosing(nn.Module):
    """Two computations, by the length. What chooses is no number among the attributes or in the code."""

    def __init__(self, has_leak: Callable[[int], bool], leak: Callable[[Tensor], Tensor] = reads_all) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.has_leak = has_leak
        self.leak = leak

    def forward(self, tokens):
        x = mean_so_far(self.embed(tokens))
        return self.head(self.leak(x) if self.has_leak(tokens.shape[1]) else x)


class Table(nn.Module):
    """A causal mask for so many positions; what lies beyond is seen by all, or by nothing before it."""

    def __init__(self, beyond: bool, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.register_buffer("visible", torch.ones(size, size, dtype=torch.bool).tril())
        self.beyond = beyond

    def forward(self, tokens):
        length = tokens.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool)
        visible = visible if self.beyond else visible.tril()
        size = min(length, len(self.visible))
        visible[:size, :size] = self.visible[:size, :size]
        x = self.embed(tokens)
        scores = (x @ x.transpose(1, 2)).masked_fill(~visible, float("-inf"))
        return (x + scores.softmax(-1) @ x) @ self.embed.weight.T


def audited(model, **options):
    return kl.audit(model, budget="quick", checks=["future"], **options)


RULES = {
    "a multiple of twelve": lambda length: length % 12 == 0,
    "a power of two": lambda length: length > 2 and length & (length - 1) == 0,
    "thirty-one": lambda length: length == 31,
    "forty": lambda length: length == 40,
    "from sixty-five on": lambda length: length > 64,
    "one hundred and twenty-eight": lambda length: length == 128,
}


@pytest.mark.parametrize("rule", RULES)
def test_a_leak_at_lengths_that_no_number_names_is_found(rule):
    report = audited(Choosing(RULES[rule]))
    assert {finding.kind for finding in report.findings} == {"future"}, report.text()
    length = int(report.findings[0].path.rpartition("length ")[2].partition(",")[0])
    assert RULES[rule](length) or RULES[rule](length - 1)  # the latter of a prefix


@pytest.mark.parametrize("rule", RULES)
def test_another_honest_computation_at_such_lengths_is_clean(rule):
    report = audited(Choosing(RULES[rule], mean_so_far), probes=["substitution"])
    assert report.ok, report.text()


@pytest.mark.parametrize("size", [20, 33, 64, 100, 128])
def test_a_leak_beyond_a_table_is_found_and_its_twin_is_clean(size):
    report = audited(Table(True, size))
    assert {finding.kind for finding in report.findings} == {"future"}, report.text()
    assert audited(Table(False, size)).ok


@pytest.mark.parametrize("length", [60, 61, 62, 63, 123])
def test_lengths_around_a_number_of_the_model_are_tried(length):
    model = Choosing(lambda n: n == length)
    assert audited(model, probes=["substitution"]).ok  # longer than every short length
    model.chunk_size = 61
    report = audited(model, probes=["substitution"])
    assert {finding.kind for finding in report.findings} == {"future"}, report.text()


@pytest.mark.parametrize("size", [145, 160, 200])
def test_a_window_that_is_wider_than_every_other_length_is_tried(size):
    claim = kl.causal & kl.window(size)
    report = audited(Choosing(lambda _: False), claim=claim, layers=1, probes=["substitution"])
    assert {finding.kind for finding in report.findings} == {"future"}, report.text()
    assert kl.audit(nn.Embedding(VOCAB, WIDTH), claim=claim, layers=1, budget="quick", checks=["future"]).ok


def test_the_lengths_near_a_number():
    assert set(nearby_lengths(9, BUDGETS["quick"])) == {8, 9, 10, 11, 19}
    assert set(nearby_lengths(90, BUDGETS["quick"])) == {89, 90, 91, 92, 140}
    assert set(nearby_lengths(1, BUDGETS["quick"])) == {1, 2, 3}  # and none below one


# -- the probe of lengths on other paths -------------------------------------------------------


class WithOption(nn.Module):
    """Depends on the length where an option of the example is left out."""

    def __init__(self, left_out: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.left_out = left_out

    def forward(self, tokens, scale=None):
        x = mean_so_far(self.embed(tokens))
        return (self.left_out(x) if scale is None else x * scale) @ self.embed.weight.T


class WithFlag(WithOption):
    """The same where a flag is off."""

    def __init__(self, left_out: Callable[[Tensor], Tensor]) -> None:
        super().__init__(left_out)
        self.use_fused = True

    def forward(self, tokens):
        return super().forward(tokens, 1.5 if self.use_fused else None)


class InTraining(WithOption):
    """The same in training."""

    def forward(self, tokens):
        return super().forward(tokens, None if self.training else 1.5)


PATHS = {
    WithOption: ({"tokens": torch.randint(VOCAB, (2, 9)), "scale": torch.ones(WIDTH)}, "without scale"),
    WithFlag: (None, "use_fused=False"),
    InTraining: (None, "train"),
}


@pytest.mark.parametrize("model", PATHS)
def test_a_prefix_that_is_another_on_one_path_alone_is_found(model):
    example, path = PATHS[model]
    report = audited(model(knows_length), example=example)
    assert [finding.probe for finding in report.findings] == ["length"], report.text()
    assert path in report.findings[0].path


@pytest.mark.parametrize("model", PATHS)
def test_a_path_that_scales_by_nothing_of_the_sequence_is_clean(model):
    report = audited(model(lambda x: x * 0.7), example=PATHS[model][0])
    assert report.ok, report.text()


# -- which lengths -----------------------------------------------------------------------------


def session_of(model, budget="quick", **changes):
    adapter = ModelAdapter(model.eval(), None, claim=kl.causal)
    session = AuditSession(adapter, kl.causal, 1, BUDGETS[budget], ("future",))
    adapter.run(adapter.make_inputs(2), CodePath())
    return session


@pytest.mark.parametrize(("budget", "power"), [("quick", 128), ("standard", 128), ("full", 256)])
def test_every_short_length_and_powers_of_two_are_among_them_where_asked_for(budget, power):
    session = session_of(Choosing(lambda _: False), budget)
    every = set(lengths_to_try(session, every=True))
    short = set(range(1, BUDGETS[budget].every_length + 1)) - {session.adapter.length}
    assert short <= every
    assert {64, 65, power} <= every
    assert not short <= set(lengths_to_try(session))
    assert max(every) <= BUDGETS[budget].max_length


def test_of_a_large_model_only_the_lengths_of_its_numbers_are_tried():
    session = session_of(Choosing(lambda _: False))
    session.adapter.num_parameters = int(4e7)
    assert set(lengths_to_try(session, every=True)) == set(lengths_to_try(session))
    session.budget = ESSENTIAL
    assert len(lengths_to_try(session)) <= 5


def test_where_a_leak_is_known_no_further_lengths_are_tried():
    session = session_of(Choosing(lambda length: length == 13))
    future.future(session, [CodePath()])
    assert session.has_finding("future")
    calls = session.adapter.num_calls
    future.every_length(session)
    assert session.adapter.num_calls == calls


def test_where_nothing_is_claimed_or_no_time_is_left_no_further_lengths_are_tried():
    session = session_of(Choosing(lambda _: True))
    session.claim = kl.full
    future.every_length(session)
    assert not session.findings
    session.claim = kl.causal
    session.started_at -= 1e6
    future.every_length(session)
    assert not session.findings
    assert any(line.startswith("future, every short length") for line in session.skipped)


def test_every_length_finds_what_its_own_lengths_show():
    session = session_of(Choosing(lambda length: length == 37))
    future.every_length(session)
    assert session.has_finding("future")


def test_lengths_that_the_model_does_not_take_are_left_out():
    model = Choosing(lambda _: False)
    model.has_leak = lambda length: length > 20 and [][length]
    report = audited(model)
    assert report.ok, report.text()
    assert any(line.startswith("lengths from") for line in report.skipped)


def test_the_budget_of_a_round_keeps_its_name_and_its_time():
    budget = BUDGETS["standard"].of_round(BUDGETS["quick"])
    assert budget == replace(BUDGETS["quick"], name="standard", seconds=50.0, large_seconds=44.0)
