"""What all integrations share: names that cost nothing until they are used, and the claim they assume."""

from __future__ import annotations

import subprocess
import sys

import pytest

import keepleft as kl
from integration_models import TinyModel
from keepleft import integrations
from keepleft.integrations.gate import ASSUMED_CLAIM

pytestmark = pytest.mark.usefixtures("one_thread")


def test_no_library_is_imported_before_its_integration_is_used():
    libraries = ("torch", "transformers", "lightning", "accelerate", "trl", "lm_eval", "pydantic")
    code = f"import sys, keepleft.integrations; print([name for name in {libraries} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_names_are_sorted_and_an_unknown_one_is_an_error():
    assert integrations.__all__ == sorted(integrations.__all__) == dir(integrations)
    with pytest.raises(AttributeError, match="has no 'AuditCalback': it has AuditCallback"):
        integrations.AuditCalback  # noqa: B018


def test_a_claim_that_was_assumed_is_told():
    with pytest.raises(kl.LeakError) as caught:
        integrations.audit_before_training(TinyModel(False), checks=["future"])
    assert str(caught.value).endswith(ASSUMED_CLAIM)
    with pytest.raises(kl.LeakError) as caught:
        integrations.audit_before_training(TinyModel(False), checks=["future"], claim=kl.causal)
    assert ASSUMED_CLAIM not in str(caught.value)
    report = integrations.audit_before_training(TinyModel(False), checks=["batch"], claim="full")
    assert (report.verdict, report.claim) == ("clean", "full")
