"""Training runs skip their audit, which takes time; tests with "audit" in their name do not."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def skip_audit(request, monkeypatch):
    if "audit" not in request.node.name:
        monkeypatch.setattr(
            "keepleft.runs.train.audit_before_training", lambda model: "audit: left out in this test"
        )
