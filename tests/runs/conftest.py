"""Runs are tried many times here; that a model is audited before its first step has a test of its own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def unaudited(request, monkeypatch):
    if "audit" not in request.node.name:
        monkeypatch.setattr(
            "keepleft.runs.train.audit_before_training", lambda model: "audit: left out in this test"
        )
