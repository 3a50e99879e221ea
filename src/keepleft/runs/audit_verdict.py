"""The audit of a run's model, and its verdict as audit.json in the run folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from keepleft.attention.masks import causal, full
from keepleft.auditing.audit import audit
from keepleft.auditing.report import AuditReport
from keepleft.disk import atomic
from keepleft.models.transformer import Model

AUDIT_FILE = "audit.json"


@dataclass(frozen=True)
class AuditVerdict:
    """What an audit found, without what differs between two audits of one model."""

    verdict: str  # clean, leak or unchecked
    claim: str
    checked: list[str]
    unchecked: list[str]

    @classmethod
    def of(cls, report: AuditReport) -> AuditVerdict:
        return cls(report.verdict, report.claim, list(report.checked), unchecked_kinds(report))

    def write(self, folder: Path) -> None:
        atomic.write_text(folder / AUDIT_FILE, json.dumps(asdict(self), indent=1) + "\n")


def read_verdict(folder: Path) -> AuditVerdict | None:
    """The verdict in a run folder, if it has one."""
    try:
        return AuditVerdict(**json.loads((folder / AUDIT_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def audit_quickly(model: Model) -> AuditReport:
    """Audit a model for leaks (from the future, padding, other rows) within seconds."""
    return audit(model, claim=causal if model.design.decoder is not None else full, budget="quick")


def audit_before_training(model: Model) -> AuditReport:
    """Audit a model before a step is spent on it. Raises ValueError with the findings if there are any."""
    report = audit_quickly(model)
    if report.leaks:
        raise ValueError(
            "the model was audited before its first step, and is not as it should be (--no-audit trains it "
            f"all the same)\n{report.text()}"
        )
    return report


def describe_audit(report: AuditReport, model_folder: Path) -> Iterator[str]:
    """Lines for the log: what is clean, and how to check what was not checked."""
    checked = ", ".join(report.checked) or "nothing"
    is_are = "is" if len(report.checked) < 2 else "are"
    yield f"audit: {checked} {is_are} clean ({report.calls} calls, {report.seconds:.1f} s)"
    if unchecked := unchecked_kinds(report):
        yield (
            f"audit: not checked within seconds: {', '.join(unchecked)}. When training is done, this tries "
            "everything:"
        )
        yield f"  keepleft audit {model_folder} --budget full"


def unchecked_kinds(report: AuditReport) -> list[str]:
    """The kinds of leak without which there is no verdict; each line of the report starts with one."""
    return list(dict.fromkeys(line.partition(":")[0] for line in report.blocked))
