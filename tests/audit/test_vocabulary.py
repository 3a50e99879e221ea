"""How many token ids a model has is seen in the table that it looks the tokens up in."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import keepleft as kl
from keepleft.auditing.code_paths import BUDGETS
from keepleft.auditing.first_calls import smoke_test
from keepleft.auditing.model_adapter import ModelAdapter
from keepleft.auditing.session import AuditSession

VOCAB, WIDTH = 50, 12


class Tabled(nn.Module):
    """Reads ahead where a token has a high id; other tables are smaller."""

    def __init__(self, peeks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds = nn.Embedding(3, WIDTH)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(30, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.peeks = peeks

    def extra(self, tokens):
        return self.places(torch.arange(tokens.shape[1]))

    def forward(self, tokens):
        x = self.embed(tokens) + self.extra(tokens) + self.kinds(torch.zeros_like(tokens))
        x = x + x.cumsum(1)
        if self.peeks:
            is_high = F.pad(tokens[:, 1:] >= 32, (0, 1))
            x = x + is_high[..., None].to(x.dtype)
        return self.head(x)


class ByKind(Tabled):
    """The smallest table is looked up by something made of the tokens."""

    def extra(self, tokens):
        return self.kinds(tokens % 3)


class ByHash(Tabled):
    """Another table is looked up by ids modulo its size."""

    def __init__(self, peeks: bool) -> None:
        super().__init__(peeks)
        self.hashed = nn.Embedding(20, WIDTH)

    def extra(self, tokens):
        return self.hashed(tokens % 20)


class PlacesFirst(Tabled):
    """No table of kinds, and fewer positions than tokens."""

    def __init__(self, peeks: bool) -> None:
        super().__init__(peeks)
        self.places = nn.Embedding(20, WIDTH)

    def extra(self, tokens):
        return self.places(torch.arange(tokens.shape[1]).clamp(max=19))


class Nested(nn.Module):
    """The tables are those of a submodule."""

    def __init__(self, peeks: bool) -> None:
        super().__init__()
        self.inner = Tabled(peeks)

    def forward(self, tokens):
        return {"logits": self.inner(tokens)}


MODELS = [Tabled, ByKind, ByHash, PlacesFirst, Nested]


@pytest.mark.parametrize("model", MODELS)
def test_a_leak_of_high_ids_is_found_beside_smaller_tables(model):
    report = kl.audit(model(True), budget="quick", checks=["future"])
    assert {finding.kind for finding in report.findings} == {"future"}, report.text()


@pytest.mark.parametrize("model", MODELS)
def test_its_honest_twin_is_clean(model):
    report = kl.audit(model(False), budget="quick", checks=["future"])
    assert report.ok, report.text()


def ids_of(model, vocab=None, example=None):
    adapter = ModelAdapter(model.eval(), example, vocab_size=vocab, claim=kl.causal)
    smoke_test(AuditSession(adapter, kl.causal, 1, BUDGETS["quick"], ("future",)))
    return len(adapter.sampler.pool)


@pytest.mark.parametrize("model", MODELS)
def test_the_ids_are_those_of_the_table_of_tokens(model):
    assert ids_of(model(False)) == VOCAB


def test_a_number_that_is_given_counts():
    assert ids_of(Tabled(False), vocab=7) == 7
    assert ids_of(Tabled(False), vocab=40) == 40


def test_of_two_tables_of_tokens_the_smaller_one_counts():
    class TwoTables(Tabled):
        def __init__(self) -> None:
            super().__init__(False)
            self.second = nn.Embedding(41, WIDTH)

        def extra(self, tokens):
            return self.second(tokens)

    assert ids_of(TwoTables()) == 41


def test_a_table_that_is_larger_than_what_the_model_takes_is_not_used():
    class Fewer(Tabled):
        def forward(self, tokens):
            if int(tokens.max()) >= 3:
                raise ValueError("there are three kinds")
            return super().forward(tokens)

    assert ids_of(Fewer(False)) == 3


def test_nothing_is_left_behind_on_the_tables():
    model = Tabled(False)
    ids_of(model)
    assert not model.embed._forward_pre_hooks
