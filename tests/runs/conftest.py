"""Training runs skip their audit, which takes time; tests with "audit" in their name do not."""

from __future__ import annotations

import pytest

from keepleft.auditing.report import AuditReport


@pytest.fixture(autouse=True)
def skip_audit(request, monkeypatch):
    if "audit" not in request.node.name:
        skipped_audit = AuditReport("model", "causal", "quick")
        monkeypatch.setattr("keepleft.runs.train.audit_before_training", lambda model: skipped_audit)
