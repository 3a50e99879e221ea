"""The gate that every integration puts in front of a training loop: audit, then raise, warn or pass."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import nn

from keepleft.attention.masks import Mask, causal, parse_mask
from keepleft.auditing.audit import audit
from keepleft.auditing.code_paths import BUDGETS
from keepleft.auditing.introspect import unwrap
from keepleft.auditing.report import KINDS, UNCHECKED, AuditReport, LeakError

OnUnchecked = Literal["warn", "raise"]
ASSUMED_CLAIM = (
    "the claim was assumed to be causal; if the model may attend to later tokens, give claim='full'"
)
logger = logging.getLogger("keepleft.integrations")


class UncheckedWarning(UserWarning):
    """The audit could not be made, and training goes on without a verdict."""


@dataclass(frozen=True)
class AuditGate:
    """What an audit before the first step tries, and what follows where there is no verdict.

    claim: a mask, or its text: "causal & window(8)"; causal if it is None. on_unchecked: whether to warn or
    to raise where the model could not be audited. options: further arguments of keepleft.audit.
    """

    claim: Mask | str | None = None
    budget: str = "quick"
    on_unchecked: OnUnchecked = "warn"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.budget not in BUDGETS:
            raise ValueError(f"there is no budget {self.budget!r}: there are {', '.join(BUDGETS)}")
        if self.on_unchecked not in ("warn", "raise"):
            raise ValueError(f"on_unchecked is {self.on_unchecked!r}: it must be 'warn' or 'raise'")
        parameters = inspect.signature(audit).parameters
        for name in self.options:
            if name not in parameters:
                raise TypeError(f"{name} is no argument of keepleft.audit: there are {', '.join(parameters)}")
        checks = self.options.get("checks") or ()
        for check in checks.replace(",", " ").split() if isinstance(checks, str) else checks:
            if check not in KINDS:
                raise ValueError(f"there is no check {check!r}: there are {', '.join(KINDS)}")

    def check(self, model: Callable[..., Any]) -> AuditReport:
        """Audit a model and return the report. Raises LeakError where it leaks, UncheckedError where it could
        not be audited and on_unchecked is "raise"; warns otherwise.

        Every process of a distributed run audits its own copy of the model, so that all of them stop.
        """
        report = self.audit(model)
        if report.verdict == UNCHECKED and self.on_unchecked == "warn":
            warnings.warn(report.text(), UncheckedWarning, stacklevel=2)
            return report
        if self.claim is None and any(finding.kind == "future" for finding in report.findings):
            raise LeakError(f"{report.text()}\n{ASSUMED_CLAIM}")
        report.raise_for_leaks()
        logger.info("%s", report.text())
        return report

    def audit(self, model: Callable[..., Any]) -> AuditReport:
        """The report on a model, without a verdict where the audit breaks off."""
        claim = parse_mask(self.claim) if isinstance(self.claim, str) else self.claim
        if claim is None:
            claim = causal
        module = bare_module(model) if isinstance(model, nn.Module) else model
        reason = ""
        if isinstance(module, nn.Module) and (sharding := find_sharding(model, module)):
            reason = (
                f"the weights are sharded by {sharding}, and calls of one process would wait for the others; "
                "audit the model before it is sharded, or with `keepleft audit`"
            )
        else:
            try:
                with original_forward(module):
                    return audit(module, **{"claim": claim, "budget": self.budget, **self.options})
            except Exception as error:  # no verdict, and on_unchecked says what follows
                reason = f"{type(error).__name__}: {error}"
        line = f"the audit: {reason}"
        name = getattr(module, "__name__", type(module).__name__)
        return AuditReport(name, repr(claim), self.budget, skipped=(line,), blocked=(line,))


def bare_module(model: nn.Module) -> nn.Module:
    """The model without its wrappers: those of parallel training wait for the other processes, and
    torch.compile would compile for every length that the audit tries.
    """
    while True:
        inner = unwrap(model)
        if type(inner).__name__ == "_FabricModule":  # of Lightning Fabric
            inner = cast(nn.Module, inner.module)
        if inner is model:
            return inner
        model = inner


@contextmanager
def original_forward(model: Any) -> Iterator[None]:
    """Mixed precision of Accelerate replaces a model's forward by one with autocast, and rounding would look
    like a leak: for a while the model has its own. The audit tries autocast as a path of its own.
    """
    attributes = vars(model) if isinstance(model, nn.Module) else {}
    if "forward" not in attributes or "_original_forward" not in attributes:
        yield
        return
    wrapped_forward = attributes["forward"]
    attributes["forward"] = attributes["_original_forward"]
    try:
        yield
    finally:
        attributes["forward"] = wrapped_forward


def find_sharding(model: Any, module: nn.Module) -> str:
    """What splits the weights between processes; '' if nothing does."""
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in (model, *module.modules())):
        return "FSDP"
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id"):
            return "DeepSpeed"
        if hasattr(parameter, "full_tensor") and isinstance(parameter, torch.Tensor):
            return "FSDP2 or tensor parallelism"
    return ""
