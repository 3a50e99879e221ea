"""The audit in Trainer of Lightning."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

from keepleft.attention.masks import Mask
from keepleft.auditing.report import AuditReport
from keepleft.integrations.gate import AuditGate, OnUnchecked

if TYPE_CHECKING or find_spec("lightning") is not None:
    from lightning.pytorch import Callback, LightningModule
else:  # the same library under its other name
    from pytorch_lightning import Callback, LightningModule


class LightningAuditCallback(Callback):  # type: ignore[misc]
    """Audits the model before the first step of `trainer.fit()`, and before Lightning's own sanity check.

    Raises LeakError, which ends the script with exit code 1, where it leaks. module: the name of the part to
    audit, such as "model" or "net.decoder"; if not given, the LightningModule itself if it has a forward of
    its own, otherwise its only submodule with weights. claim, budget, on_unchecked and options are those of
    the other integrations: see `audit_before_training`.
    """

    def __init__(
        self,
        *,
        module: str | None = None,
        claim: Mask | str | None = None,
        budget: str = "quick",
        on_unchecked: OnUnchecked = "warn",
        **options: Any,
    ) -> None:
        super().__init__()
        self.gate = AuditGate(claim, budget, on_unchecked, options)
        self.module = module
        self.report: AuditReport | None = None  # of the latest audit

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.report = self.gate.check(select_module(pl_module, self.module))


def select_module(lightning_module: Any, name: str | None) -> nn.Module:
    """The part of a LightningModule to audit. Raises ValueError where that is not clear."""
    parts = dict(lightning_module.named_modules())
    if name is not None:
        if name not in parts:
            raise ValueError(
                f"{type(lightning_module).__name__} has no module {name!r}: it has "
                f"{', '.join(list(parts)[1:6]) or 'none'}"
            )
        return parts[name]
    if type(lightning_module).forward is not LightningModule.forward:
        return lightning_module
    children = {
        name: child
        for name, child in lightning_module.named_children()
        if any(True for _ in child.parameters())
    }
    if len(children) != 1:
        raise ValueError(
            f"{type(lightning_module).__name__} has no forward, and {len(children)} modules with weights"
            + (f" ({', '.join(children)})" if children else "")
            + ": say which one to audit, as in LightningAuditCallback(module='model')"
        )
    return next(iter(children.values()))
