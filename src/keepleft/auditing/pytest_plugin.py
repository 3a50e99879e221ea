"""Audits in pytest: `def test_mine(audit): audit(model)`.

It is loaded in every run of pytest, so it imports nothing heavy.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from keepleft.auditing.report import AuditReport

MARKER = "audit"
MAX_NAME_LENGTH = 120  # letters of a test's name in the name of a page


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("keepleft", "audits: does a model look where it says it looks?")
    group.addoption(
        "--audit-budget",
        choices=("quick", "standard", "full"),
        default="quick",
        help="how much an audit tries where its test says nothing else: quick (the default), standard or full",
    )
    group.addoption(
        "--audit-html", metavar="DIR", default=None, help="a folder for a page on each audited model"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(budget=..., claim=..., checks=...): arguments of keepleft.audit that the "
        "fixture audit is given unless the test says otherwise",
    )


class Auditor:
    """What the fixture gives: called like keepleft.audit, it raises where a model leaks or cannot be audited."""

    def __init__(self, defaults: dict[str, Any], name: str, folder: Path | None) -> None:
        self.defaults = defaults
        self.name = name
        self.folder = folder
        self.reports: list[AuditReport] = []

    def __call__(self, target: Any, *example: Any, **options: Any) -> AuditReport:
        """The report, if it is clean."""
        __tracebackhide__ = True  # of interest is the line that called this
        from keepleft.auditing.audit import audit
        from keepleft.auditing.report import LeakError, UncheckedError

        defaults = {name: value for name, value in self.defaults.items() if name != "example" or not example}
        report = audit(target, *example, **(defaults | options))
        self.reports.append(report)
        if self.folder is not None:
            self._write(report, self.folder)
        try:
            return report.raise_for_leaks()
        except (LeakError, UncheckedError) as error:
            raise error.with_traceback(None) from None

    def _write(self, report: AuditReport, folder: Path) -> None:
        from keepleft.disk import atomic

        folder.mkdir(parents=True, exist_ok=True)
        suffix = f"-{len(self.reports)}" if len(self.reports) > 1 else ""
        atomic.write_text(folder / f"{report_filename(self.name)}{suffix}.html", report.html())


def report_filename(name: str) -> str:
    """The name of a test as that of a file; what was changed or cut is told apart by a checksum."""
    stem = name.replace("::", "-").replace("/", ".")
    sanitized = re.sub(r"[^\w.-]+", "_", stem, flags=re.ASCII)
    return (
        sanitized
        if sanitized == stem and len(sanitized) <= MAX_NAME_LENGTH
        else f"{sanitized[:MAX_NAME_LENGTH]}-{zlib.crc32(name.encode()):08x}"
    )


@pytest.fixture
def audit(request: pytest.FixtureRequest) -> Auditor:
    """Audit a model as keepleft.audit does, and fail where it leaks or cannot be audited; the report comes
    back.
    """
    defaults: dict[str, Any] = {"budget": request.config.getoption("--audit-budget")}
    for marker in reversed(list(request.node.iter_markers(MARKER))):  # the closest comes last
        if marker.args:
            pytest.fail(
                f"pytest.mark.audit was given {marker.args[0]!r} without a name: write "
                "pytest.mark.audit(budget='standard')",
                pytrace=False,
            )
        defaults |= marker.kwargs
    folder = request.config.getoption("--audit-html")
    return Auditor(
        defaults,
        request.node.nodeid,
        None if folder is None else request.config.invocation_params.dir / folder,
    )
