"""The report of an audit: its findings, what it could not check, and the verdict."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

KINDS = ("future", "padding", "packing", "cache", "batch", "nan", "labels")
CLEAN = "clean"
LEAK = "leak"
UNCHECKED = "unchecked"
WARNING = "warning"  # the severity of a finding that is no leak, but good to know
MAX_LISTED_PATHS = 3  # that were not tried, in the text
MAX_LISTED_LENGTHS = 8
MODEL_COMMENT = "# model: the one that was audited"  # the line of a script where the model is made


class LeakError(AssertionError):
    """The audit found a leak: a model attends where it must not."""


class UncheckedError(RuntimeError):
    """The audit could not be made, so there is no verdict."""


@dataclass(frozen=True)
class Finding:
    """One leak: an influence that the claim does not allow."""

    kind: str  # one of KINDS
    reader: int | None  # the position whose output changed
    source: int | None  # the position that changed it
    size: float  # of the change, at most, relative to the largest output
    path: str  # the code path it was seen on
    module: str  # where it enters: the first module whose output leaks; '' if that is the model itself
    message: str  # one sentence, with a remedy
    probe: str = ""  # the probe that showed it
    line: str = ""  # the line of code, where it is known
    reproduce: str = ""  # a script that shows it
    also: tuple[str, ...] = ()  # further code paths with the same leak
    also_in: tuple[str, ...] = ()  # further modules of the same class, with the same leak in the same line
    severity: str = LEAK  # or WARNING, which leaves the verdict as it is

    def __str__(self) -> str:
        location = f" in {self.module}" if self.module else ""
        return f"{self.kind}{location}: {self.message}"

    @property
    def is_leak(self) -> bool:
        return self.severity == LEAK


@dataclass(frozen=True)
class AuditReport:
    """The findings, and everything that was not checked."""

    subject: str  # what was audited
    claim: str
    budget: str
    findings: tuple[Finding, ...] = ()
    skipped: tuple[str, ...] = ()  # what could not be checked, and why
    notes: tuple[str, ...] = ()  # no leaks, but good to know
    checked: tuple[str, ...] = ()  # the checks that were made
    paths: tuple[str, ...] = ()  # the code paths that were taken
    blocked: tuple[str, ...] = ()  # lines of `skipped` without which there is no verdict
    claimed: tuple[tuple[bool, ...], ...] = ()  # (T, T): may source k influence reader q?
    measured: tuple[tuple[float, ...], ...] = ()  # (T, T): how much it does, relative to the largest output
    seconds: float = 0.0
    model_seconds: float = 0.0  # of these, in the model itself, forward and backward
    calls: int = 0
    about: dict[str, str] = field(default_factory=dict)  # versions, device
    not_tried: tuple[str, ...] = ()  # code paths and lengths that the full budget tries and this one did not

    @property
    def leaks(self) -> tuple[Finding, ...]:
        """The findings without the warnings."""
        return tuple(finding for finding in self.findings if finding.is_leak)

    @property
    def verdict(self) -> str:
        """clean, leak or unchecked: a model that could not be checked is never clean."""
        if self.leaks:
            return LEAK
        return UNCHECKED if self.blocked or not self.checked else CLEAN

    @property
    def ok(self) -> bool:
        """True where the model was checked and nothing was found."""
        return self.verdict == CLEAN

    def raise_for_leaks(self) -> AuditReport:
        """The report itself if it is clean; raises LeakError or UncheckedError otherwise."""
        if self.verdict == LEAK:
            raise LeakError(self.text())
        if self.verdict == UNCHECKED:
            raise UncheckedError(self.text())
        return self

    def with_model(self, code: str) -> AuditReport:
        """The report with scripts that make the model themselves, by this code."""
        findings = tuple(
            replace(finding, reproduce=finding.reproduce.replace(MODEL_COMMENT, code))
            for finding in self.findings
        )
        return replace(self, findings=findings)

    def text(self) -> str:
        """The report for a terminal."""
        headline = {
            CLEAN: f"clean: {self.subject} keeps to its claim, {self.claim}",
            LEAK: f"leak: {self.subject} does not keep to its claim, {self.claim}",
            UNCHECKED: f"unchecked: there is no verdict on {self.subject}",
        }[self.verdict]
        lines = [headline]
        for n, finding in enumerate(self.findings, 1):
            lines.append(f"\n{n}. {'' if finding.is_leak else 'warning: '}{finding}")
            lines.append(
                f"   path: {finding.path}" + (f" (and {len(finding.also)} more)" if finding.also else "")
            )
            if finding.also_in:
                lines.append(f"   also in: {', '.join(finding.also_in)}")
            if finding.line:
                lines.append(f"   line: {finding.line}")
            if finding.reproduce:
                lines += ["   to see it:", finding.reproduce]
        if self.findings:
            lines.append("")
        if self.checked:
            lines.append(
                f"checked: {', '.join(self.checked)}; {len(self.paths)} code paths, {self.calls} calls, "
                f"{self.seconds:.1f} s"
                + (f", {self.model_seconds / self.seconds:.0%} of it in the model" if self.seconds else "")
            )
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"not checked: {line}" for line in self.skipped]
        if self.not_tried:
            lines.append(f"not tried: {self.not_tried_summary()}")
        return "\n".join(lines)

    def not_tried_summary(self) -> str:
        """What the budget left out, in a line: the first few, and how many more."""
        paths = [item for item in self.not_tried if not item.startswith("length ")]
        lengths = [item.removeprefix("length ") for item in self.not_tried if item.startswith("length ")]
        parts = [*paths[:MAX_LISTED_PATHS]]
        if len(paths) > MAX_LISTED_PATHS:
            parts.append(f"{len(paths) - MAX_LISTED_PATHS} more code paths")
        if lengths:
            listed = ", ".join(lengths[:MAX_LISTED_LENGTHS])
            more = len(lengths) - MAX_LISTED_LENGTHS
            parts.append(f"lengths {listed}" + (f" and {more} more" if more > 0 else ""))
        summary = "; ".join(parts)
        return summary if self.budget == "full" else f"{summary} (budget full tries them)"

    def __str__(self) -> str:
        return self.text()

    def dict(self) -> dict[str, Any]:
        """The whole report as plain values."""
        return {"verdict": self.verdict, "ok": self.ok, **asdict(self)}

    def json(self) -> str:
        """The whole report as JSON."""
        return json.dumps(json_safe(self.dict()), indent=2, ensure_ascii=False)

    def html(self) -> str:
        """One HTML page, with plots of claimed against measured influence."""
        from keepleft.auditing.html_report import html_page

        return html_page(self)

    def junit(self) -> str:
        """JUnit XML for CI servers: a test case for each kind of leak."""
        from keepleft.auditing.junit import junit

        return junit([self])

    def sarif(self) -> str:
        """SARIF 2.1.0 for forges: a result for each finding, at its line where that is known."""
        from keepleft.auditing.sarif import sarif

        return sarif([(self, None)])

    def badge(self) -> str:
        """A small SVG picture of the verdict, for a README."""
        from keepleft.auditing.badge import badge

        return badge(self.verdict)


def json_safe(value: Any) -> Any:
    """The same value with None for infinity and NaN, which JSON does not have."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value
