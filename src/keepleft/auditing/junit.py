"""A report for build servers: JUnit XML, a suite for each report and a test case for each kind of leak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from keepleft.auditing.report import KINDS, UNCHECKED, Finding, Report
from keepleft.disk.svg import said

PASSED, FAILED, SKIPPED, ERROR = "passed", "failure", "skipped", "error"


def junit(reports: Sequence[Report]) -> str:
    """A failure for each kind that leaks, a skip for each that was not checked; errors alone where there is no verdict."""
    counts = Counter(outcome(report, kind)[0] for report in reports for kind in KINDS)
    head = _tag("testsuites", name="keepleft audit", **_numbers(counts, sum(report.seconds for report in reports)))
    return "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', head, *map(_suite, reports), "</testsuites>\n"])


def outcome(report: Report, kind: str) -> tuple[str, str]:
    """What came of one kind, and what there is to say about it."""
    found = [finding for finding in report.findings if finding.kind == kind]
    left = [line for line in report.skipped if line.startswith((f"{kind}: ", f"{kind} "))]
    if found:
        return FAILED, "\n\n".join(map(_told, found))
    if report.verdict == UNCHECKED:  # what was looked at in part is not known either
        return ERROR, "\n".join(dict.fromkeys([*report.blocked, *left])) or "nothing was checked"
    if kind in report.checked:
        return PASSED, "\n".join(left)
    return SKIPPED, "\n".join(left) or f"{kind}: it was not asked for"


def _suite(report: Report) -> str:
    cases = [(kind, *outcome(report, kind)) for kind in KINDS]
    counts = Counter(state for _, state, _ in cases)
    facts = {"verdict": report.verdict, "claim": report.claim, "budget": report.budget, "calls": str(report.calls),
             **report.about}
    return "\n".join([_tag("testsuite", name=report.subject, **_numbers(counts, report.seconds)), "<properties>",
                      *(_tag("property", end="/", name=name, value=value) for name, value in facts.items()), "</properties>",
                      *(_case(report, *case) for case in cases),
                      f"<system-out>{said(report.text())}</system-out>", "</testsuite>"])


def _case(report: Report, kind: str, state: str, told: str) -> str:
    first = told.partition("\n")[0]
    names = {"classname": report.subject, "name": kind, "time": "0"}
    if state == PASSED:
        if not told:
            return _tag("testcase", end="/", **names)
        inner = f"<system-out>{said(f'not checked of it: {told}')}</system-out>"
    elif state == SKIPPED:
        inner = _tag("skipped", end="/", message=told)
    else:
        inner = f"{_tag(state, type=f'keepleft.{kind}', message=first)}{said(told)}</{state}>"
    return f"{_tag('testcase', **names)}{inner}</testcase>"


def _told(finding: Finding) -> str:
    """One finding, as long as it needs to be."""
    out = [str(finding), f"path: {finding.path}", *(f"also: {path}" for path in finding.also)]
    if finding.line:
        out.append(f"line: {finding.line}")
    return "\n".join([*out, *(["to see it:", finding.reproduce] if finding.reproduce else [])])


def _numbers(counts: Mapping[str, int], seconds: float) -> dict[str, str]:
    return {"tests": str(sum(counts.values())), "failures": str(counts[FAILED]), "errors": str(counts[ERROR]),
            "skipped": str(counts[SKIPPED]), "time": f"{seconds:.3f}"}


def _tag(element: str, /, end: str = "", **attributes: str) -> str:
    told = "".join(f' {name}="{_quoted(value)}"' for name, value in attributes.items())
    return f"<{element}{told}{end}>"


def _quoted(value: str) -> str:
    """In an attribute, where a line break would be read as a blank."""
    return said(value).replace('"', "&quot;").replace("\n", "&#10;").replace("\t", "&#9;").replace("\r", "&#13;")
