"""State that a model keeps from call to call: in buffers, in attributes, on purpose and by mistake."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

import keepleft as kl
from keepleft.auditing import module_state

VOCAB, WIDTH = 23, 12


class Memory(nn.Module):
    """Adds nothing."""

    def forward(self, x):
        return x


class Attribute(Memory):
    """The last text, in an attribute."""

    last = None

    def forward(self, x):
        before, self.last = self.last, x.mean((0, 1)).detach()
        return x if before is None else x + before


class Listed(Memory):
    """All texts so far, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[torch.Tensor] = []

    def forward(self, x):
        out = x + sum(self.texts) if self.texts else x
        self.texts.append(x.mean((0, 1)).detach())
        return out


class Queued(Memory):
    """The last three, in a deque in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"texts": deque(maxlen=3)}

    def forward(self, x):
        out = x + sum(self.state["texts"]) if self.state["texts"] else x
        self.state["texts"].append(x.mean((0, 1)).detach())
        return out


class Buffer(Memory):
    """A running mean in a buffer, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        out = x + self.mean
        self.mean.lerp_(x.mean((0, 1)).detach(), 0.5)
        return out


class BoundAnew(Buffer):
    """The same, bound anew."""

    def forward(self, x):
        out = x + self.mean
        self.mean = 0.5 * self.mean + 0.5 * x.mean((0, 1)).detach()
        return out


class Resettable(Attribute):
    def reset_state(self):
        self.last = None


class Clearable(BoundAnew):
    def clear_cache(self):
        self.mean = torch.zeros(WIDTH)


class DetachedHidden(Listed):
    def detach_hidden(self):
        self.texts.clear()


class Counter(Memory):
    """Another factor in each call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Forgetting(Attribute):
    """Begins anew in each call."""

    def forward(self, x):
        self.last = None
        return super().forward(x)


class Statistics(Buffer):
    """Counts tokens in a buffer that nothing reads."""

    def forward(self, x):
        self.mean = self.mean + x.shape[1]
        return x


class InTraining(Buffer):
    """A running mean that training reads and binds anew."""

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean((0, 1)).detach()
            return x + self.mean.detach() * 0 + self.calls_before()
        return x

    def calls_before(self):
        return 0.0


class ReadInTraining(InTraining):
    """What is read is the mean of earlier calls."""

    def forward(self, x):
        before = self.mean
        super().forward(x)
        return x + before


class Model(nn.Module):
    def __init__(self, memory: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.memory = memory
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.memory(x + x.cumsum(1)))


def audited(memory, **options):
    return kl.audit(Model(memory()), budget="quick", **options)


@pytest.mark.parametrize("memory", [Attribute, Listed, Queued, Buffer, BoundAnew])
def test_an_earlier_call_that_moves_a_later_one_is_found_in_its_module(memory):
    report = audited(memory)
    found, *others = report.findings
    assert found.kind == "batch", report.text()
    assert "an earlier call moves this one" in found.message
    assert found.module == "memory"
    assert "after another call" in found.path
    assert not others, report.text()


@pytest.mark.parametrize(
    ("memory", "method"),
    [(Resettable, "reset_state"), (Clearable, "clear_cache"), (DetachedHidden, "detach_hidden")],
)
def test_a_model_with_a_method_to_forget_is_clean_with_a_note(memory, method):
    report = audited(memory)
    assert report.ok, report.text()
    assert any(f"has {method} to forget it" in note for note in report.notes), report.text()


@pytest.mark.parametrize("memory", [Memory, Forgetting, Statistics, InTraining, ReadInTraining])
def test_what_moves_no_later_call_is_clean(memory):
    report = audited(memory)
    assert report.ok, report.text()
    assert "batch" in report.checked


def test_what_counts_calls_has_no_verdict():
    for checks in (None, ["batch"]):
        report = audited(Counter, checks=checks)
        assert report.verdict == "unchecked", report.text()
        assert "keeps state between calls" in " ".join(report.blocked)


def test_without_the_batch_check_earlier_calls_are_not_looked_at():
    for memory in (Attribute, Buffer, BoundAnew):
        report = audited(memory, checks=["future", "nan"])
        assert report.ok, report.text()


def test_buffers_that_calls_change_are_restored_and_noted():
    for memory in (Buffer, BoundAnew, Statistics):
        model = Model(memory())
        buffer = model.memory.mean
        report = kl.audit(model, budget="quick")
        assert model.memory.mean is buffer
        assert not buffer.any()
        assert any("calls change its buffers" in note for note in report.notes)


@pytest.mark.parametrize("memory", [Attribute, Listed, Queued, Counter])
def test_attributes_are_afterwards_what_they_were(memory):
    model = Model(memory())
    kl.audit(model, budget="quick")
    if memory is Queued:
        assert not model.memory.state["texts"]
    elif memory is Listed:
        assert model.memory.texts == []
    else:
        assert not {"last", "calls"} & set(vars(model.memory))


# -- buffers, one by one -----------------------------------------------------------------------


def test_a_buffer_that_is_bound_anew_is_restored_and_said_to_have_changed():
    memory = Buffer()
    original = memory.mean
    snapshot = module_state.snapshot_buffers(memory)
    assert not module_state.restore_state(snapshot)
    memory.mean = torch.ones(WIDTH)
    assert module_state.restore_state(snapshot)
    assert memory.mean is original
    assert not module_state.restore_state(snapshot)


def test_a_buffer_that_is_bound_anew_and_written_has_its_old_values():
    memory = Buffer()
    snapshot = module_state.snapshot_buffers(memory)
    memory.mean.add_(2.0)
    memory.mean = torch.ones(WIDTH)
    assert module_state.restore_state(snapshot)
    assert not memory.mean.any()


class Growing(nn.Module):
    """A table of positions that grows, and a number that says how far it goes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.covered = 4

    def forward(self, tokens):
        length = tokens.shape[1]
        if length > self.covered:
            self.table = torch.arange(float(length))
            self.covered = length
        return self.embed(tokens) + self.table[:length, None].to(self.embed.weight)


class GrowsByTheLast(Growing):
    """What it grows by is the text that is being read."""

    def forward(self, tokens):
        out = super().forward(tokens)
        if self.covered == tokens.shape[1]:
            return out + self.embed(tokens).mean(1, keepdim=True)
        return out


def test_a_table_that_has_grown_stays():
    model = Growing()
    snapshot = module_state.snapshot_buffers(model)
    model(torch.zeros(1, 9, dtype=torch.long))
    assert not module_state.restore_state(snapshot)
    assert len(model.table) == model.covered == 9


def test_a_model_with_a_table_that_grows_is_clean():
    report = kl.audit(Growing(), budget="quick")
    assert report.ok, report.text()
    assert not any(line.startswith("length") for line in report.skipped), report.text()


def test_a_leak_of_a_model_with_a_table_that_grows_is_found():
    report = kl.audit(GrowsByTheLast(), budget="quick")
    assert "future" in {finding.kind for finding in report.findings}, report.text()
