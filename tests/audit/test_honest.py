"""No findings on honest models, and the right kinds of findings on those that are almost honest."""

from __future__ import annotations

import pytest

import keepleft as kl
from audit.honest import peers, plain
from thinned import thinned


def audited(case, budget="quick"):
    target, example, *more = case.build()
    claim = kl.causal if case.claim is None else case.claim
    return kl.audit(target, example, claim=claim, budget=budget, **case.options, **(more[0] if more else {}))


def test_there_are_many_honest_models():
    assert len(plain.HONEST) >= 40
    assert len(peers.HONEST) >= 20


@pytest.mark.parametrize("case", thinned(plain.HONEST, 2, lambda case: case.name))
def test_an_honest_model_is_clean(case):
    report = audited(case)
    assert report.ok, report.text()


@pytest.mark.parametrize("case", thinned(peers.HONEST, 3, lambda case: case.name))
def test_an_honest_class_of_transformers_is_clean(case):
    report = audited(case)
    assert report.ok, report.text()


def test_attention_implementations_that_are_not_tried_are_named():
    llama = next(case for case in peers.HONEST if case.name == "llama")
    report = kl.audit(*llama.build()[:2], checks=["batch"], budget="quick")
    skipped = {line.partition(":")[0] for line in report.skipped}
    assert {"flash_attention_2 attention", "flex_attention attention"} <= skipped, report.text()


@pytest.mark.parametrize("name", ["falcon", "mamba", "rwkv"])
def test_a_class_that_leaks_on_one_path_is_told_by_the_right_word(name):
    case, kinds, _ = peers.NEARLY[name]
    found = {finding.kind for finding in audited(case).findings}
    assert found
    assert found <= kinds
