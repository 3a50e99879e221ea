"""Progress of an audit as events: the check that runs, the code path, and what has been found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from keepleft.auditing.report import Finding

ProgressKind = Literal["check", "path", "outcome", "finding"]
CheckOutcome = Literal["clean", "leak", "unchecked", "not applicable"]

REPORT_SECONDS = 0.1  # at most one event of a code path in this time
MAX_FRACTION = 0.99  # until the audit has ended
# of the time of an audit, by the time that each check took for small models; the rest are short
TIME_SHARES = {"future": 0.45, "batch": 0.15, "nan": 0.1, "padding": 0.1, "packing": 0.05, "cache": 0.1}
SHORT_SHARE = 0.05
EARLY_PASS_SHARE = 0.2  # of each pass before the last, which is the longest
HALF_DONE_COMPARISONS = 25  # of one check: how many it will make is not known before


class AuditProgress(str):
    """What an audit is doing: a line of text to print, with the numbers behind it as attributes.

    kind: "check" when a check starts, "path" on a code path (at most ten times a second), "outcome" when a
    check has ended, "finding" for each leak as it is found.
    """

    kind: ProgressKind
    check: str  # one of the seven kinds of leak
    number: int  # of the check, from 1 to num_checks
    num_checks: int
    pass_number: int  # a thorough budget makes all checks twice: on the main paths, then on all
    num_passes: int
    path: str  # the code path and length of the latest comparison
    num_paths: int  # that this check has taken
    calls: int  # of the model, so far
    seconds: float
    fraction: float  # of the audit that is done, an estimate: by the checks, and by the time of the budget
    outcome: CheckOutcome | None  # with "outcome"
    reason: str  # why a check was not made
    finding: Finding | None  # with "finding"

    def __new__(
        cls,
        text: str,
        *,
        kind: ProgressKind = "check",
        check: str = "",
        number: int = 0,
        num_checks: int = 0,
        pass_number: int = 1,
        num_passes: int = 1,
        path: str = "",
        num_paths: int = 0,
        calls: int = 0,
        seconds: float = 0.0,
        fraction: float = 0.0,
        outcome: CheckOutcome | None = None,
        reason: str = "",
        finding: Finding | None = None,
    ) -> AuditProgress:
        progress = super().__new__(cls, text)
        progress.kind = kind
        progress.check = check
        progress.number = number
        progress.num_checks = num_checks
        progress.pass_number = pass_number
        progress.num_passes = num_passes
        progress.path = path
        progress.num_paths = num_paths
        progress.calls = calls
        progress.seconds = seconds
        progress.fraction = fraction
        progress.outcome = outcome
        progress.reason = reason
        progress.finding = finding
        return progress


class ProgressReporter:
    """Turns what the checks do into events. An exception that the callback raises ends the audit."""

    def __init__(
        self,
        on_progress: Callable[[AuditProgress], None] | None = None,
        *,
        seconds: float | None = None,
        count_calls: Callable[[], int] = lambda: 0,
    ) -> None:
        self.on_progress = on_progress
        self.checks: tuple[str, ...] = ()  # in the order in which they are made
        self.seconds = seconds  # of the budget
        self.count_calls = count_calls
        self.started_at = time.monotonic()
        self.reported_at = float("-inf")
        self.num_passes = 1
        self.pass_number = 0
        self.check = ""
        self.path = ""
        self.paths: dict[str, set[str]] = {}  # by check
        self.num_comparisons = 0  # of this check in this pass
        self.highest_fraction = 0.0

    @property
    def is_last_pass(self) -> bool:
        return self.pass_number == self.num_passes

    def start_pass(self, checks: Sequence[str]) -> None:
        self.checks = tuple(checks)
        self.pass_number += 1

    def start_check(self, check: str) -> None:
        self.check = check
        self.path = ""
        self.num_comparisons = 0
        self._report("check", check)

    def report_path(self, path: str) -> None:
        """Count a comparison; an event only now and then."""
        self.path = path
        self.num_comparisons += 1
        self.paths.setdefault(self.check, set()).add(path)
        if time.monotonic() - self.reported_at >= REPORT_SECONDS:
            self._report("path", f"{self.check}: {path}")

    def report_finding(self, finding: Finding) -> None:
        self._report("finding", str(finding), finding=finding)

    def end_check(self, outcome: CheckOutcome, reason: str = "") -> None:
        """The last pass of the check has ended."""
        num_paths = len(self.paths.get(self.check, ()))
        details = f": {reason}" if reason else f" ({num_paths} path{'' if num_paths == 1 else 's'})"
        self._report("outcome", f"{self.check}: {outcome}{details}", outcome=outcome, reason=reason)

    def _report(
        self,
        kind: ProgressKind,
        text: str,
        *,
        outcome: CheckOutcome | None = None,
        reason: str = "",
        finding: Finding | None = None,
    ) -> None:
        if self.on_progress is None:
            return
        self.reported_at = time.monotonic()
        seconds = self.reported_at - self.started_at
        self.highest_fraction = max(self.highest_fraction, self._fraction(seconds, ended=kind == "outcome"))
        self.on_progress(
            AuditProgress(
                text,
                kind=kind,
                check=self.check,
                number=self.checks.index(self.check) + 1 if self.check in self.checks else 0,
                num_checks=len(self.checks),
                pass_number=self.pass_number,
                num_passes=self.num_passes,
                path=self.path,
                num_paths=len(self.paths.get(self.check, ())),
                calls=self.count_calls(),
                seconds=seconds,
                fraction=self.highest_fraction,
                outcome=outcome,
                reason=reason,
                finding=finding,
            )
        )

    def _fraction(self, seconds: float, *, ended: bool) -> float:
        """An audit ends when its checks are made, or its time is up: what is nearer counts."""
        if self.check not in self.checks:
            return 0.0
        shares = [TIME_SHARES.get(check, SHORT_SHARE) for check in self.checks]
        position = self.checks.index(self.check)
        share_of_check = (
            1.0 if ended else self.num_comparisons / (self.num_comparisons + HALF_DONE_COMPARISONS)
        )
        fraction_of_pass = (sum(shares[:position]) + shares[position] * share_of_check) / sum(shares)
        fraction = fraction_of_pass
        num_early = self.num_passes - 1
        if self.pass_number > num_early:
            fraction *= 1 - num_early * EARLY_PASS_SHARE
        else:
            fraction *= EARLY_PASS_SHARE
        fraction += min(self.pass_number - 1, num_early) * EARLY_PASS_SHARE
        fraction_of_time = 0.0 if self.seconds is None else seconds / self.seconds
        return min(MAX_FRACTION, max(fraction, fraction_of_time))
