"""Audits in pytest: `def test_mine(audit): audit(model)`.

Every run of pytest loads this plugin, so it imports nothing heavy.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from keepleft.auditing.report import AuditReport

MARKER = "audit"
MAX_NAME_LENGTH = 120  # characters of a test's name in the file name of its report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("keepleft", "audits: does a model look where it says it looks?")
    group.addoption(
        "--audit-budget",
        choices=("quick", "standard", "full"),
        default="quick",
        help="how much an audit tries where its test does not say: quick (the default), standard or full",
    )
    group.addoption(
        "--audit-html", metavar="DIR", default=None, help="a folder for an HTML report on each audited model"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(budget=..., claim=..., checks=...): arguments of keepleft.audit that the fixture audit "
        "takes unless the test gives others",
    )


class Auditor:
    """The value of the fixture: called like keepleft.audit, it raises where a model leaks or cannot be
    audited.
    """

    def __init__(self, defaults: dict[str, Any], name: str, folder: Path | None) -> None:
        self.defaults = defaults
        self.name = name
        self.folder = folder
        self.reports: list[AuditReport] = []

    def __call__(self, target: Callable[..., Any], *example: Any, **options: Any) -> AuditReport:
        """The report, if it is clean; raises LeakError or UncheckedError otherwise."""
        __tracebackhide__ = True  # the line of interest is the caller's
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
    """A test's name as a file name; where characters are replaced or cut off, a checksum keeps it unique."""
    stem = name.replace("::", "-").replace("/", ".")
    sanitized = re.sub(r"[^\w.-]+", "_", stem, flags=re.ASCII)
    if sanitized == stem and len(sanitized) <= MAX_NAME_LENGTH:
        return sanitized
    return f"{sanitized[:MAX_NAME_LENGTH]}-{zlib.crc32(name.encode()):08x}"


@pytest.fixture
def audit(request: pytest.FixtureRequest) -> Auditor:
    """Audit a model as keepleft.audit does, and fail where it leaks or cannot be audited. Returns the
    report.
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
