"""The audit in a loop of your own: one line before the first step, with or without Accelerate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from keepleft.attention.masks import Mask
from keepleft.auditing.report import AuditReport
from keepleft.integrations.collator import check_batch
from keepleft.integrations.gate import AuditGate, OnUnchecked

logger = logging.getLogger(__name__)


def audit_before_training(
    model: Callable[..., Any],
    *,
    batch: Any = None,
    claim: Mask | str | None = None,
    budget: str = "quick",
    on_unchecked: OnUnchecked = "warn",
    **options: Any,
) -> AuditReport:
    """Audit a model before a step is spent on it, and return the report.

    The model may be wrapped by torch.compile, by DistributedDataParallel or by accelerator.prepare; it is
    unchanged afterwards, and so is the random state. batch: what the data loader yields, to be checked
    against the model too. on_unchecked: "warn" or "raise" where the model could not be audited. options:
    further arguments of keepleft.audit, such as example=, checks= and layers=.

    Raises LeakError, which ends a script with exit code 1, where the model leaks or the batch contradicts
    it; UncheckedError where it could not be audited and on_unchecked is "raise".
    """
    report = AuditGate(claim, budget, on_unchecked, options).check(model)
    if batch is not None:
        for note in check_batch(model, batch, claim=claim).raise_for_findings().notes:
            logger.warning("%s", note)
    return report
