"""Every planted leak is found, with the right kind and in the right module, and nothing else is reported."""

from __future__ import annotations

import pytest

import keepleft as kl
from audit.planted import batch, cache, future, labels, nan, packing, padding
from thinned import thinned

PLANTED = [case for room in (future, padding, packing, cache, batch, nan, labels) for case in room.PLANTED]


def test_there_are_many_of_every_kind():
    assert len(PLANTED) >= 60
    assert {case.kind for case in PLANTED} == {
        "future",
        "padding",
        "packing",
        "cache",
        "batch",
        "nan",
        "labels",
    }


@pytest.mark.parametrize("case", thinned(PLANTED, 2, lambda case: f"{case.kind}: {case.name}"))
def test_a_planted_leak_is_found(case):
    target, example, *more = case.build()
    options = {**case.options, **(more[0] if more else {})}
    report = kl.audit(
        target, example, claim=kl.causal if case.claim is None else case.claim, budget="quick", **options
    )
    assert report.verdict == "leak", report.text()
    kinds = {finding.kind for finding in report.findings}
    assert case.kind in kinds, report.text()
    assert kinds <= {case.kind, *case.also}, report.text()
    if case.module is not None:
        assert case.module in {finding.module for finding in report.findings if finding.kind == case.kind}, (
            report.text()
        )
