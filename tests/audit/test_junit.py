"""A build server reads it: a suite for each report, a case for each kind, and never green without a
verdict.
"""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from keepleft.auditing.junit import junit
from keepleft.auditing.report import KINDS, AuditReport, Finding

CLEAN = AuditReport(
    "Mine",
    "causal",
    "quick",
    checked=("future", "batch"),
    skipped=(
        "padding: the model takes no mask",
        "cache: the model takes no cache",
        "batch by comparison: it was too long",
    ),
    about={"torch": "2"},
    seconds=1.5,
    calls=7,
)
LEAK = replace(
    CLEAN,
    subject='Yours <&> "x"\0',
    findings=(
        Finding(
            "future",
            0,
            3,
            0.2,
            "eval, batch 2",
            "blocks.1",
            "position 0 reads position 3 <b>;\n mend it.",
            also=("train",),
            line="my.py:3",
            reproduce="model(a) < model(b) & c",
        ),
        Finding("future", 1, 3, 0.1, "train, batch 2", "head", "another one."),
        Finding("cache", None, None, 0.1, "eval", "", "a third one."),
    ),
)
NOTHING = replace(CLEAN, checked=(), skipped=("the audit: it crashes",), blocked=("the audit: it crashes",))


def read(*reports: AuditReport) -> ElementTree.Element:
    return ElementTree.fromstring(junit(reports).encode())


def states(suite: ElementTree.Element) -> dict[str, str]:
    return {
        case.get("name"): next((part.tag for part in case if part.tag != "system-out"), "passed")
        for case in suite.iter("testcase")
    }


def test_there_is_a_suite_for_each_report_and_a_case_for_each_kind():
    found = read(CLEAN, LEAK)
    assert [suite.get("name") for suite in found] == ["Mine", 'Yours <&> "x"\ufffd']
    assert [list(states(suite)) for suite in found] == [list(KINDS)] * 2
    assert (found.get("tests"), found.get("failures"), found.get("errors")) == ("14", "2", "0")


def test_what_was_not_checked_is_skipped_with_its_reason():
    suite = read(CLEAN)[0]
    assert states(suite) == dict.fromkeys(KINDS, "skipped") | {"future": "passed", "batch": "passed"}
    said = {
        case.get("name"): case.find("skipped").get("message")
        for case in suite.iter("testcase")
        if case.find("skipped") is not None
    }
    assert said["padding"] == "padding: the model takes no mask"
    assert said["labels"] == "labels: it was not asked for"
    assert "it was too long" in suite.find("testcase[@name='batch']/system-out").text


def test_a_failure_holds_all_findings_of_its_kind():
    suite = read(LEAK)[0]
    assert states(suite)["future"] == states(suite)["cache"] == "failure"
    failure = suite.find("testcase[@name='future']/failure")
    assert failure.get("message") == "future in blocks.1: position 0 reads position 3 <b>;"
    for told in (
        "path: eval, batch 2",
        "also: train",
        "line: my.py:3",
        "model(a) < model(b) & c",
        "another one.",
    ):
        assert told in failure.text


@pytest.mark.parametrize(
    "report",
    [NOTHING, replace(CLEAN, checked=()), replace(CLEAN, blocked=("the verdict: it changes its input",))],
)
def test_without_a_verdict_every_case_is_an_error(report):
    suite = read(report)[0]
    assert set(states(suite).values()) == {"error"}
    assert suite.get("errors") == "7"
    for error in suite.iter("error"):
        assert all(line in error.text for line in report.blocked)


def test_a_report_gives_its_own():
    assert ElementTree.fromstring(CLEAN.junit().encode())[0].get("name") == "Mine"
    assert read().get("tests") == "0"
