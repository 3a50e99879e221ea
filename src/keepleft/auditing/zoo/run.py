"""Audits each class in a process of its own, with a time limit: a crash or a hang costs one row of the
table.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from keepleft.auditing.report import AuditReport
from keepleft.auditing.zoo.library import TRANSFORMERS, Library

LEAK = "leak"
CLEAN = "clean"
SKIPPED = "skipped"


@dataclass(frozen=True)
class ZooRow:
    """The result for one class."""

    name: str
    verdict: str  # clean, leak or skipped
    why: str = ""  # the reason, where it was skipped
    findings: tuple[dict[str, Any], ...] = ()
    checked: tuple[str, ...] = ()
    left: tuple[str, ...] = ()  # what could not be checked
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    weights: int = 0
    about: dict[str, str] = field(default_factory=dict)
    report: AuditReport | None = None  # of the audit, where there was one

    def text(self) -> str:
        """The report for a terminal."""
        report = self.report or AuditReport(self.name, "", "", skipped=(self.why,), blocked=(self.why,))
        return report.text()


def audit_class(name: str, budget: str, library: Library = TRANSFORMERS) -> ZooRow:
    """Audit one class in this process."""
    import torch

    from keepleft.auditing.audit import audit
    from keepleft.auditing.zoo.tiny_models import UnbuildableError

    started = time.monotonic()
    torch.set_num_threads(1)
    try:
        model, example = library.build(name)
    except UnbuildableError as error:
        return ZooRow(name, SKIPPED, str(error))
    except Exception as error:
        return ZooRow(name, SKIPPED, f"it could not be built: {type(error).__name__}: {str(error)[:200]}")
    try:
        report = audit(model, example, budget=budget)
    except Exception as error:
        return ZooRow(name, SKIPPED, f"it could not be audited: {type(error).__name__}: {str(error)[:200]}")
    # what was audited in its headline, and code that builds the model where it shows a leak
    report = replace(report.with_model(library.build_code(name)), subject=library.describe(name))
    report_dict = report.dict()
    verdict = {"clean": CLEAN, "leak": LEAK}.get(report.verdict, SKIPPED)
    return ZooRow(
        name,
        verdict,
        "; ".join(report.blocked),
        tuple(report_dict["findings"]),
        report.checked,
        report.skipped,
        report.notes,
        round(time.monotonic() - started, 1),
        sum(p.numel() for p in model.parameters()),
        report.about,
        report,
    )


def run(
    names: Sequence[str],
    budget: str = "standard",
    limit: float = 240.0,
    workers: int = 1,
    start_method: Literal["fork", "forkserver"] = "fork",
    library: Library = TRANSFORMERS,
) -> Iterator[ZooRow]:
    """Audit classes in worker processes, and yield a row for each as it finishes. limit: seconds a class.

    `start_method`: fork is quicker, forkserver for a process that has threads; spawn where there is neither.
    """
    import torch

    # before any work here: threads that are running at a fork do not exist in the child
    torch.set_num_threads(1)
    start_methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context(start_method if start_method in start_methods else "spawn")
    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload(["keepleft.auditing.zoo.tiny_models"])
    pending = list(reversed(names))
    running = dict[str, tuple[Any, Any, float]]()
    while pending or running:
        while pending and len(running) < workers:
            name = pending.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(  # type: ignore[attr-defined]
                target=_worker, args=(name, budget, library, sender), daemon=True
            )
            process.start()
            sender.close()
            running[name] = (process, receiver, time.monotonic())
        for name, (process, receiver, started) in list(running.items()):
            row = None
            if receiver.poll(0.05 / max(1, len(running))):
                try:
                    row = receiver.recv()
                except EOFError:
                    process.join(5)
                    row = ZooRow(name, SKIPPED, f"its process died (exit code {process.exitcode})")
            elif time.monotonic() - started > limit:
                row = ZooRow(name, SKIPPED, f"it took longer than {limit:g} s")
            if row is not None:
                process.kill()
                process.join()
                receiver.close()
                del running[name]
                yield row


def _worker(name: str, budget: str, library: Library, sender: Any) -> None:
    """Send the row of one class back, and print nothing."""
    import os
    import warnings

    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    sender.send(audit_class(name, budget, library))
    sender.close()
