"""A look at a model before it is trained: what peeks learns nothing that lasts."""

from __future__ import annotations

from keepleft.attention.masks import causal, full
from keepleft.auditing.audit import audit
from keepleft.models.transformer import Model


def audit_before_training(model: Model) -> str:
    """A line that says that it is clean; an error that says where it is not."""
    report = audit(model, claim=causal if model.design.decoder is not None else full, budget="quick")
    if report.findings:
        raise ValueError(
            "the model was audited before its first step, and is not as it should be (--no-audit trains it all "
            f"the same)\n{report.text()}"
        )
    summary = (
        f"audit: {', '.join(report.checked) or 'nothing'} {'is' if len(report.checked) < 2 else 'are'} clean"
    )
    unchecked = "".join(f"; not checked: {line}" for line in report.blocked)
    return f"{summary} ({report.calls} calls, {report.seconds:.1f} s){unchecked}"
