"""What an audit found, what it could not check, and what that comes to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = ("future", "padding", "packing", "cache", "batch", "nan", "labels")
CLEAN = "clean"
LEAK = "leak"
UNCHECKED = "unchecked"


class LeakError(AssertionError):
    """A model looks where it must not."""


class UncheckedError(RuntimeError):
    """A model could not be audited."""


@dataclass(frozen=True)
class Finding:
    """One influence that the claim does not allow."""

    kind: str  # one of KINDS
    reader: int | None  # the position whose output moved
    source: int | None  # the position that moved it
    size: float  # by how much, at most, relative to the largest output
    path: str  # the code path it was seen on
    module: str  # the first module whose output already leaks; '' if it is the whole
    message: str  # one sentence, with a remedy
    probe: str = ""  # what showed it
    line: str = ""  # the line of code, where it could be told
    reproduce: str = ""  # a few lines of Python that show it
    also: tuple[str, ...] = ()  # further code paths that show the same

    def __str__(self) -> str:
        location = f" in {self.module}" if self.module else ""
        return f"{self.kind}{location}: {self.message}"


@dataclass(frozen=True)
class AuditReport:
    """Findings, and everything that was not checked."""

    subject: str  # what was audited
    claim: str
    budget: str
    findings: tuple[Finding, ...] = ()
    skipped: tuple[str, ...] = ()  # what could not be checked, and why
    notes: tuple[str, ...] = ()  # what is no leak, but good to know
    checked: tuple[str, ...] = ()  # the checks that were made
    paths: tuple[str, ...] = ()  # the code paths that were taken
    blocked: tuple[str, ...] = ()  # those of `skipped` without which there is no verdict
    claimed: tuple[tuple[bool, ...], ...] = ()  # (T, T): who may move whom
    measured: tuple[tuple[float, ...], ...] = ()  # (T, T): who moved whom, and by how much
    seconds: float = 0.0
    calls: int = 0
    about: dict[str, str] = field(default_factory=dict)  # versions, device

    @property
    def verdict(self) -> str:
        """clean, leak or unchecked: what could not be checked is never clean."""
        if self.findings:
            return LEAK
        return UNCHECKED if self.blocked or not self.checked else CLEAN

    @property
    def ok(self) -> bool:
        """Was it checked, and nothing found?"""
        return self.verdict == CLEAN

    def raise_for_leaks(self) -> AuditReport:
        """The report again if it is clean; an error otherwise."""
        if self.verdict == LEAK:
            raise LeakError(self.text())
        if self.verdict == UNCHECKED:
            raise UncheckedError(self.text())
        return self

    def text(self) -> str:
        """To read in a terminal."""
        headline = {
            CLEAN: f"clean: {self.subject} keeps to its claim, {self.claim}",
            LEAK: f"leak: {self.subject} does not keep to its claim, {self.claim}",
            UNCHECKED: f"unchecked: there is no verdict on {self.subject}",
        }[self.verdict]
        lines = [headline]
        for n, finding in enumerate(self.findings, 1):
            lines.append(f"\n{n}. {finding}")
            lines.append(
                f"   path: {finding.path}" + (f" (and {len(finding.also)} more)" if finding.also else "")
            )
            if finding.line:
                lines.append(f"   line: {finding.line}")
            if finding.reproduce:
                lines += ["   to see it:", *(f"       {line}" for line in finding.reproduce.splitlines())]
        if self.findings:
            lines.append("")
        if self.checked:
            lines.append(
                f"checked: {', '.join(self.checked)}; {len(self.paths)} code paths, {self.calls} calls, "
                f"{self.seconds:.1f} s"
            )
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"not checked: {line}" for line in self.skipped]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {"verdict": self.verdict, "ok": self.ok, **asdict(self)}

    def json(self) -> str:
        """All of it as JSON."""
        return json.dumps(json_safe(self.dict()), indent=2, ensure_ascii=False)

    def html(self) -> str:
        """A page with a picture: claimed against measured influence, side by side."""
        from keepleft.auditing.html_report import html_page

        return html_page(self)

    def junit(self) -> str:
        """For build servers: a test case for each check."""
        from keepleft.auditing.junit import junit

        return junit([self])


def json_safe(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value
