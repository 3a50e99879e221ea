"""The audit is silent on honest models, and what is almost honest is told by the right word."""

from __future__ import annotations

import pytest

import keepleft as kl
from audit.honest import peers, plain


def audited(case, budget="quick"):
    target, example, *more = case.build()
    claim = kl.causal if case.claim is None else case.claim
    return kl.audit(target, example, claim=claim, budget=budget, **case.options, **(more[0] if more else {}))


def test_there_are_many_honest_models():
    assert len(plain.HONEST) >= 40
    assert len(peers.HONEST) >= 20


@pytest.mark.parametrize("case", plain.HONEST, ids=lambda case: case.name)
def test_an_honest_model_is_clean(case):
    report = audited(case)
    assert report.ok, report.text()


SHORT = 20  # classes in every test run; `make long` has them all


@pytest.mark.parametrize("case", [
    *(pytest.param(case, id=case.name) for case in peers.HONEST[::2][:SHORT]),
    *(pytest.param(case, id=case.name, marks=pytest.mark.long) for case in [*peers.HONEST[1::2], *peers.HONEST[::2][SHORT:]])])
def test_an_honest_class_of_transformers_is_clean(case):
    report = audited(case)
    assert report.ok, report.text()


@pytest.mark.parametrize("name", ["falcon", "mamba", "rwkv"])
def test_a_class_that_leaks_on_one_path_is_told_by_the_right_word(name):
    case, kinds, _ = peers.NEARLY[name]
    found = {finding.kind for finding in audited(case).findings}
    assert found
    assert found <= kinds
