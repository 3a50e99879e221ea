"""A gate for lm-evaluation-harness: no scores for a model that sees the answer."""

from __future__ import annotations

from typing import Any, TypeVar

from keepleft.attention.masks import Mask
from keepleft.integrations.gate import AuditGate, OnUnchecked

LM = TypeVar("LM")


def audit_before_evaluation(
    lm: LM,
    *,
    claim: Mask | str | None = None,
    budget: str = "quick",
    on_unchecked: OnUnchecked = "raise",
    **options: Any,
) -> LM:
    """The lm itself, once its model was audited, for `lm_eval.simple_evaluate(model=…)`.

    lm: an lm_eval.models.huggingface.HFLM, or any LM that holds a torch module as `model`. Raises LeakError
    where it leaks: its scores would not be comparable. Raises UncheckedError where it could not be audited,
    unless on_unchecked is "warn". options: further arguments of keepleft.audit.
    """
    model = getattr(lm, "model", None)
    if not callable(model):
        raise ValueError(
            f"{type(lm).__name__} holds no model on this machine, so it cannot be audited: give an HFLM, or "
            "audit the model itself with `keepleft audit`"
        )
    AuditGate(claim, budget, on_unchecked, options).check(model)
    return lm
