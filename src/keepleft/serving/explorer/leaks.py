"""Does the model keep to its claim? The audit, beside everything else: it takes seconds, and whoever asks does not wait."""

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
from keepleft.auditing.report import Report, plain
from keepleft.nn.packed import Fixed
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.given import Given

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

WAIT = 1.0         # seconds that one question waits at most: nobody else is answered meanwhile
LARGEST = 1 << 29  # weights of a model that is copied for this


class Audit:
    """One audit of one model, begun when it is first asked for; a copy is audited, so that the model stays free."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.thread: threading.Thread | None = None
        self.report: Report | None = None
        self.trouble: str | None = None
        self.began = self.took = 0.0

    @property
    def state(self) -> str:
        return "none" if self.thread is None else "running" if self.report is None and self.trouble is None else "done"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began if self.state == "running" else self.took

    def begin(self) -> None:
        if self.thread is not None:
            return
        if why := unfit(self.model):
            raise ValueError(why)
        copy = deepcopy(self.model)
        self.began = time.monotonic()
        self.thread = threading.Thread(target=self._run, args=(copy,), name="keepleft audit", daemon=True)
        self.thread.start()

    def wait(self, seconds: float | None) -> None:
        if self.thread is not None:
            self.thread.join(seconds)

    def _run(self, model: Any) -> None:
        try:
            with torch.enable_grad():
                self.report = audit(model, claim=claim(model), budget="quick")
        except Exception as error:  # whoever asks next is told
            self.trouble = f"the audit broke off: {type(error).__name__}: {error}"
        finally:
            self.took = time.monotonic() - self.began


def leaks(explorer: Explorer, given: Given) -> dict[str, Any]:
    found = explorer.audit
    wait = given.flag("wait", False)
    found.begin()
    if wait:
        found.wait(WAIT)
    if found.trouble is not None:
        raise ValueError(found.trouble)
    out: dict[str, Any] = {"state": found.state, "seconds": found.seconds}
    if found.report is None:
        return out
    report = plain(found.report.dict())
    claimed, measured = found.report.claimed, found.report.measured
    out["report"] = {name: value for name, value in report.items() if name not in ("claimed", "measured")}
    if claimed and measured:
        out |= {"claim_bits": wire.bits(torch.tensor(claimed)), "influence_f32": wire.f32(torch.tensor(measured)),
                "rows": len(measured), "columns": len(measured[0])}
    return out


def claim(model: Any) -> Mask:
    """What the design says of the side that writes, or reads: where layers take several masks in turn, any of them."""
    stack = model.design.decoder or model.design.encoder
    return reduce(or_, dict.fromkeys(stack.mask))


def unfit(model: Any) -> str | None:
    """Why a model is not audited here."""
    if any(isinstance(part, Fixed) for part in model.modules()):
        return "a packed model cannot be copied for an audit: audit the model that it was packed from"
    weights = sum(p.numel() for p in model.parameters())
    if weights > LARGEST:
        return f"the model has {weights:,} weights, and an audit needs a copy of it: run `keepleft audit` by itself"
    return None
