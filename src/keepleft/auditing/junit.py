"""A report as JUnit XML for CI servers: a suite for each report, a test case for each kind of leak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from keepleft.auditing.report import KINDS, UNCHECKED, AuditReport, Finding
from keepleft.svg import escape_attribute, escape_xml

PASSED = "passed"
FAILED = "failure"
SKIPPED = "skipped"
ERROR = "error"


def junit(reports: Sequence[AuditReport]) -> str:
    """A failure for each kind that leaks, a skip for each that was not checked; nothing but errors where
    there is no verdict.
    """
    counts = Counter(outcome(report, kind)[0] for report in reports for kind in KINDS)
    head = _tag(
        "testsuites",
        name="keepleft audit",
        **_count_attributes(counts, sum(report.seconds for report in reports)),
    )
    return "\n".join(
        ['<?xml version="1.0" encoding="UTF-8"?>', head, *map(_suite, reports), "</testsuites>\n"]
    )


def outcome(report: AuditReport, kind: str) -> tuple[str, str]:
    """PASSED, FAILED, SKIPPED or ERROR for one kind of leak, and the details."""
    findings = [finding for finding in report.leaks if finding.kind == kind]
    warnings = [_describe_finding(finding) for finding in report.findings if not finding.is_leak]
    skipped = [line for line in report.skipped if line.startswith((f"{kind}: ", f"{kind} "))]
    if findings:
        return FAILED, "\n\n".join(map(_describe_finding, findings))
    if report.verdict == UNCHECKED:  # what was checked in part is not known either
        return ERROR, "\n".join(dict.fromkeys([*report.blocked, *skipped])) or "nothing was checked"
    if kind in report.checked:
        return PASSED, "\n".join([*(warnings if kind == "nan" else []), *skipped])
    return SKIPPED, "\n".join(skipped) or f"{kind}: it was not asked for"


def _suite(report: AuditReport) -> str:
    cases = [(kind, *outcome(report, kind)) for kind in KINDS]
    counts = Counter(state for _, state, _ in cases)
    properties = {
        "verdict": report.verdict,
        "claim": report.claim,
        "budget": report.budget,
        "calls": str(report.calls),
        **report.about,
    }
    return "\n".join(
        [
            _tag("testsuite", name=report.subject, **_count_attributes(counts, report.seconds)),
            "<properties>",
            *(_tag("property", end="/", name=name, value=value) for name, value in properties.items()),
            "</properties>",
            *(_case(report, *case) for case in cases),
            f"<system-out>{escape_xml(report.text())}</system-out>",
            "</testsuite>",
        ]
    )


def _case(report: AuditReport, kind: str, state: str, details: str) -> str:
    first_line = details.partition("\n")[0]
    attributes = {"classname": report.subject, "name": kind, "time": "0"}
    if state == PASSED:
        if not details:
            return _tag("testcase", end="/", **attributes)
        inner = f"<system-out>{escape_xml(f'not checked of it: {details}')}</system-out>"
    elif state == SKIPPED:
        inner = _tag("skipped", end="/", message=details)
    else:
        inner = f"{_tag(state, type=f'keepleft.{kind}', message=first_line)}{escape_xml(details)}</{state}>"
    return f"{_tag('testcase', **attributes)}{inner}</testcase>"


def _describe_finding(finding: Finding) -> str:
    lines = [str(finding), f"path: {finding.path}", *(f"also: {path}" for path in finding.also)]
    if finding.also_in:
        lines.append(f"also in: {', '.join(finding.also_in)}")
    if finding.line:
        lines.append(f"line: {finding.line}")
    return "\n".join([*lines, *(["to see it:", finding.reproduce] if finding.reproduce else [])])


def _count_attributes(counts: Mapping[str, int], seconds: float) -> dict[str, str]:
    return {
        "tests": str(sum(counts.values())),
        "failures": str(counts[FAILED]),
        "errors": str(counts[ERROR]),
        "skipped": str(counts[SKIPPED]),
        "time": f"{seconds:.3f}",
    }


def _tag(element: str, /, end: str = "", **attributes: str) -> str:
    attributes_text = "".join(f' {name}="{escape_attribute(value)}"' for name, value in attributes.items())
    return f"<{element}{attributes_text}{end}>"
