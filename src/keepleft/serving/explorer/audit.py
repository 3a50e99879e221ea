"""Background audit: does the model keep to its claim? It takes seconds, and other questions do not wait."""

from __future__ import annotations

import threading
import time
from copy import deepcopy
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch

from keepleft.attention.masks import Mask
from keepleft.auditing.audit import audit
from keepleft.auditing.report import AuditReport, json_safe
from keepleft.inference.int8_linear import PrepackedLinear
from keepleft.models.transformer import Model
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.params import Params

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

MAX_WAIT_SECONDS = 1.0  # of one question: no other is answered meanwhile
MAX_PARAMETERS = 1 << 29  # of a model that is copied for an audit


class BackgroundAudit:
    """One audit of one model, started by the first question. It runs on a copy: the model stays free."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.thread: threading.Thread | None = None
        self.report: AuditReport | None = None
        self.error: str | None = None
        self.started_at = 0.0
        self.duration = 0.0

    @property
    def state(self) -> str:
        if self.thread is None:
            return "none"
        return "running" if self.report is None and self.error is None else "done"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_at if self.state == "running" else self.duration

    def start(self) -> None:
        """Start the audit, once; ValueError for a model that cannot be copied."""
        if self.thread is not None:
            return
        if reason := not_auditable_reason(self.model):
            raise ValueError(reason)
        copy = deepcopy(self.model)
        self.started_at = time.monotonic()
        self.thread = threading.Thread(target=self._run, args=(copy,), name="keepleft audit", daemon=True)
        self.thread.start()

    def wait(self, seconds: float | None) -> None:
        if self.thread is not None:
            self.thread.join(seconds)

    def _run(self, model: Model) -> None:
        try:
            with torch.enable_grad():
                self.report = audit(model, claim=claim(model), budget="quick")
        except Exception as error:  # reported with the next question
            self.error = f"the audit broke off: {type(error).__name__}: {error}"
        finally:
            self.duration = time.monotonic() - self.started_at


def audit_status(explorer: Explorer, params: Params) -> dict[str, Any]:
    """Start the audit, or see how far it is: the report once it is done."""
    background_audit = explorer.audit
    wait = params.flag("wait", False)
    background_audit.start()
    if wait:
        background_audit.wait(MAX_WAIT_SECONDS)
    if background_audit.error is not None:
        raise ValueError(background_audit.error)
    answer: dict[str, Any] = {"state": background_audit.state, "seconds": background_audit.seconds}
    if background_audit.report is None:
        return answer
    report = json_safe(background_audit.report.dict())
    claimed, measured = background_audit.report.claimed, background_audit.report.measured
    answer["report"] = {name: value for name, value in report.items() if name not in ("claimed", "measured")}
    if claimed and measured:
        answer |= {
            "claim_bits": wire.bits(torch.tensor(claimed)),
            "influence_f32": wire.f32(torch.tensor(measured)),
            "rows": len(measured),
            "columns": len(measured[0]),
        }
    return answer


def claim(model: Model) -> Mask:
    """The mask that the design claims for the decoder, or the encoder; where layers take turns, the union."""
    stack = model.design.decoder or model.design.encoder
    assert stack is not None
    return reduce(or_, dict.fromkeys(stack.mask))


def not_auditable_reason(model: Model) -> str | None:
    """Why a model cannot be audited here; None if it can."""
    if any(isinstance(module, PrepackedLinear) for module in model.modules()):
        return "a packed model cannot be copied for an audit: audit the model that it was packed from"
    num_parameters = sum(p.numel() for p in model.parameters())
    if num_parameters > MAX_PARAMETERS:
        return (
            f"the model has {num_parameters:,} weights, and an audit needs a copy of it: "
            "run `keepleft audit` by itself"
        )
    return None
