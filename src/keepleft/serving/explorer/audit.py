"""Background audit: does the model keep to its claim? It takes a while, and other questions do not wait."""

from __future__ import annotations

import threading
import time
from copy import deepcopy
from dataclasses import asdict
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch

from keepleft.attention.masks import Mask
from keepleft.auditing.audit import audit
from keepleft.auditing.code_paths import BUDGETS
from keepleft.auditing.progress import AuditProgress
from keepleft.auditing.report import KINDS, AuditReport, Finding, json_safe
from keepleft.inference.int8_linear import PrepackedLinear
from keepleft.models.transformer import Model
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.params import Params

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

MAX_WAIT_SECONDS = 1.0  # of one question: no other is answered meanwhile
MAX_PARAMETERS = 1 << 29  # of a model that is copied for an audit
MAX_AUDIT_SECONDS = 600.0  # then others may have theirs
ABANDONED_SECONDS = 90.0  # without a question about it; a browser lets a hidden page ask once a minute
MAX_CLIENTS = 256  # that watch one audit
MAX_CLIENT_CHARACTERS = 64  # of a client's name
ACTIONS = ("poll", "start", "stop")


class AuditStoppedError(Exception):
    """Nobody waits for this audit any more, or it has taken too long."""


class AuditRun:
    """One audit with one budget, in a thread of its own. It runs on a copy: the model stays free.

    `patience`: seconds without a question after which it ends, since all who asked have left.
    """

    def __init__(self, model: Model, budget: str, patience: float) -> None:
        self.budget = budget
        self.patience = patience
        self.report: AuditReport | None = None
        self.error: str | None = None
        self.stopped = threading.Event()
        self.clients: dict[str, float] = {}  # when each asked last
        self.latest: AuditProgress | None = None
        self.outcomes: dict[str, AuditProgress] = {}  # of the checks that have ended
        self.findings: list[Finding] = []
        self.started_at = time.monotonic()
        self.duration = 0.0
        self.thread = threading.Thread(
            target=self._run, args=(deepcopy(model),), name="keepleft audit", daemon=True
        )

    @property
    def state(self) -> str:
        if self.report is not None:
            return "done"
        if not self.thread.is_alive() and self.thread.ident is not None:
            return "stopped"
        return "stopping" if self.stopped.is_set() else "running"

    @property
    def seconds(self) -> float:
        return self.duration or time.monotonic() - self.started_at

    def add_client(self, client: str) -> None:
        self.clients.pop(client, None)
        self.clients[client] = time.monotonic()
        if len(self.clients) > MAX_CLIENTS:
            del self.clients[next(iter(self.clients))]

    def remove_client(self, client: str) -> None:
        """The audit ends when the last one has left."""
        self.clients.pop(client, None)
        if not self.clients:
            self.stopped.set()

    def _run(self, model: Model) -> None:
        try:
            with torch.enable_grad():
                self.report = audit(
                    model, claim=claim(model), budget=self.budget, on_progress=self._on_progress
                )
        except AuditStoppedError as error:
            self.error = str(error) or None
        except Exception as error:  # reported with the next question
            self.error = f"the audit broke off: {type(error).__name__}: {error}"
        finally:
            self.duration = time.monotonic() - self.started_at

    def _on_progress(self, progress: AuditProgress) -> None:
        """Keep what the page shows. What is raised here ends the audit."""
        now = time.monotonic()
        if self.stopped.is_set() or now - max([self.started_at, *self.clients.values()]) > self.patience:
            raise AuditStoppedError
        if now - self.started_at > MAX_AUDIT_SECONDS:
            raise AuditStoppedError(
                f"the audit was ended after {MAX_AUDIT_SECONDS / 60:.0f} minutes: choose a smaller budget, "
                f"or run `keepleft audit --budget {self.budget}` by itself"
            )
        if progress.outcome is not None:
            self.outcomes[progress.check] = progress
        if progress.finding is not None:
            self.findings.append(progress.finding)
        self.latest = progress

    def progress(self) -> dict[str, Any]:
        """What has been checked, what is being checked, and the findings so far."""
        latest = self.latest or AuditProgress("")
        findings = list(self.findings) if self.report is None else self.report.findings
        return {
            "fraction": 1.0 if self.state == "done" else latest.fraction,
            "check": latest.check,
            "path": latest.path,
            "pass_number": latest.pass_number,
            "num_passes": latest.num_passes,
            "calls": latest.calls if self.report is None else self.report.calls,
            "checks": [
                self._check_status(check, {finding.kind for finding in findings if finding.is_leak})
                for check in KINDS
            ],
            "findings": [asdict(finding) for finding in findings] if self.report is None else [],
        }

    def _check_status(self, check: str, leaking: set[str]) -> dict[str, Any]:
        ended = self.outcomes.get(check)
        status = "waiting" if ended is None else str(ended.outcome)
        if ended is None and self.latest is not None and self.latest.check == check:
            status = "running"
        return {
            "name": check,
            "status": "leak" if check in leaking else status,  # as soon as it is found
            "num_paths": 0 if ended is None else ended.num_paths,
            "reason": "" if ended is None else ended.reason,
        }


class BackgroundAudit:
    """The audits of one model: one at a time, and the last of each budget is kept."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.runs: dict[str, AuditRun] = {}  # by budget

    @property
    def running(self) -> AuditRun | None:
        return next((run for run in self.runs.values() if run.thread.is_alive()), None)

    def start(self, budget: str, client: str = "", patience: float = ABANDONED_SECONDS) -> AuditRun | None:
        """The audit with this budget, started unless it runs or is done; None while another one runs.

        Raises ValueError for a model that cannot be copied.
        """
        if reason := not_auditable_reason(self.model):
            raise ValueError(reason)
        run = self.runs.get(budget)
        if run is None or run.state in ("stopping", "stopped"):
            if self.running is not None:
                return None
            run = self.runs[budget] = AuditRun(self.model, budget, patience)
            run.add_client(client)
            run.thread.start()
        run.add_client(client)
        return run


def audit_status(explorer: Explorer, params: Params) -> dict[str, Any]:
    """Start an audit, see how far it is, or leave it: the report once it is done.

    `client`: a page, by a name of its own. An audit ends when all pages that watch it have left.
    """
    budget = params.choice("budget", list(BUDGETS), "quick")
    action = params.choice("action", ACTIONS, "poll")
    wait = params.flag("wait", False)
    client = f"{params.tenant} {params.text('client', '', MAX_CLIENT_CHARACTERS)}"
    audits = explorer.audit
    run = audits.start(budget, client) if action == "start" else audits.runs.get(budget)
    if run is None:
        other = audits.running if action == "start" else None
        return {
            "state": "none" if other is None else "waiting",
            "budget": budget,
            "seconds": 0.0,
            "running_budget": None if other is None else other.budget,
        }
    if action == "stop":
        run.remove_client(client)
    elif action == "poll":
        run.add_client(client)
    if wait:
        run.thread.join(MAX_WAIT_SECONDS)
    if run.error is not None:
        raise ValueError(run.error)
    answer: dict[str, Any] = {
        "state": run.state,
        "budget": budget,
        "seconds": run.seconds,
        "progress": run.progress(),
    }
    if run.report is None:
        return answer
    report = json_safe(run.report.dict())
    claimed, measured = run.report.claimed, run.report.measured
    answer["report"] = {name: value for name, value in report.items() if name not in ("claimed", "measured")}
    answer["report"]["not_tried_summary"] = run.report.not_tried_summary() if run.report.not_tried else ""
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
