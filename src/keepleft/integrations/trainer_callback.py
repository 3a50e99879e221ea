"""The audit in Trainer of transformers, and so in every trainer of TRL."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from keepleft.attention.masks import Mask
from keepleft.auditing.report import AuditReport
from keepleft.integrations.collator import check_loader
from keepleft.integrations.gate import AuditGate, OnUnchecked


class AuditCallback(TrainerCallback):  # type: ignore[misc]
    """Audits the model, and the first batch of the collator, before the first step of `trainer.train()`.

    Raises LeakError there, which ends the script with exit code 1, where one of them leaks. claim: the mask
    that the model says it obeys. on_unchecked: "warn" or "raise" where the model could not be audited.
    check_batches: whether to check what the collator makes. options: further arguments of keepleft.audit.
    """

    def __init__(
        self,
        *,
        claim: Mask | str | None = None,
        budget: str = "quick",
        on_unchecked: OnUnchecked = "warn",
        check_batches: bool = True,
        **options: Any,
    ) -> None:
        self.gate = AuditGate(claim, budget, on_unchecked, options)
        self.check_batches = check_batches
        self.report: AuditReport | None = None  # of the latest audit

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report = self.gate.check(kwargs["model"])
        loader = kwargs.get("train_dataloader")
        if self.check_batches and loader is not None:
            check_loader(kwargs["model"], loader, claim=self.gate.claim).raise_for_findings()
