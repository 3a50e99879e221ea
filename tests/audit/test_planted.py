"""Every planted leak is found, with the right kind and in the right module, and nothing else is reported."""

from __future__ import annotations

import pytest

from audit.planted_reports import PLANTED, planted_report
from thinned import thinned


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


@pytest.mark.parametrize("case", thinned(PLANTED, 2))
def test_a_planted_leak_is_found(case):
    report, _ = planted_report(case)
    assert report.verdict == "leak", report.text()
    kinds = {finding.kind for finding in report.findings}
    assert case.kind in kinds, report.text()
    assert kinds <= {case.kind, *case.also}, report.text()
    if case.module is not None:
        assert case.module in {finding.module for finding in report.findings if finding.kind == case.kind}, (
            report.text()
        )
