"""Quick audits of planted leaks, each made once for all tests of a process."""

from __future__ import annotations

from typing import Any

import keepleft as kl
from audit.planted import batch, cache, future, labels, nan, packing, padding
from audit.planted.case import Planted

PLANTED = [case for room in (future, padding, packing, cache, batch, nan, labels) for case in room.PLANTED]
_REPORTS: dict[str, tuple[kl.AuditReport, dict[str, Any]]] = {}


def planted_report(case: Planted) -> tuple[kl.AuditReport, dict[str, Any]]:
    """The report, and what its scripts know: the model, and the callables that the audit was given."""
    if str(case) not in _REPORTS:
        target, example, *more = case.build()
        options = {**case.options, **(more[0] if more else {})}
        claim = kl.causal if case.claim is None else case.claim
        report = kl.audit(target, example, claim=claim, budget="quick", **options)
        _REPORTS[str(case)] = report, {"model": target, **options}
    return _REPORTS[str(case)]
