"""Every class audited in a process of its own, with a time limit: a crash or a hang costs one row of the table."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

LEAK, CLEAN, SKIPPED = "leak", "clean", "skipped"


@dataclass(frozen=True)
class Row:
    """What came of one class."""

    name: str
    verdict: str                            # clean, leak or skipped
    why: str = ""                           # it was skipped
    findings: tuple[dict[str, Any], ...] = ()
    checked: tuple[str, ...] = ()
    left: tuple[str, ...] = ()              # what was not checked of it
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    weights: int = 0
    about: dict[str, str] = field(default_factory=dict)


def audited(name: str, budget: str) -> Row:
    """One class, here and now."""
    import torch

    from keepleft.auditing.audit import audit
    from keepleft.auditing.zoo.tiny import UnbuildableError, tiny

    began = time.monotonic()
    torch.set_num_threads(1)
    try:
        model, example = tiny(name)
    except UnbuildableError as error:
        return Row(name, SKIPPED, str(error))
    except Exception as error:
        return Row(name, SKIPPED, f"it could not be built: {type(error).__name__}: {str(error)[:200]}")
    try:
        report = audit(model, example, budget=budget)
    except Exception as error:
        return Row(name, SKIPPED, f"it could not be audited: {type(error).__name__}: {str(error)[:200]}")
    told = report.dict()
    verdict = {"clean": CLEAN, "leak": LEAK}.get(report.verdict, SKIPPED)
    return Row(name, verdict, "; ".join(report.blocked), tuple(told["findings"]), report.checked, report.skipped, report.notes,
               round(time.monotonic() - began, 1), sum(p.numel() for p in model.parameters()), report.about)


def run(names: Sequence[str], budget: str = "standard", limit: float = 240.0, workers: int = 1) -> Iterator[Row]:
    """A row for each class, as they come."""
    import torch

    torch.set_num_threads(1)  # before any work here, so that what is forked finds no threads missing
    ways = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in ways else "spawn")
    waiting, busy = list(reversed(names)), dict[str, tuple[Any, Any, float]]()
    while waiting or busy:
        while waiting and len(busy) < workers:
            name = waiting.pop()
            inward, outward = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(name, budget, outward), daemon=True)  # type: ignore[attr-defined]
            process.start()
            outward.close()
            busy[name] = (process, inward, time.monotonic())
        for name, (process, inward, began) in list(busy.items()):
            row = None
            if inward.poll(0.05 / max(1, len(busy))):
                try:
                    row = inward.recv()
                except EOFError:
                    process.join(5)
                    row = Row(name, SKIPPED, f"its process died (exit code {process.exitcode})")
            elif time.monotonic() - began > limit:
                row = Row(name, SKIPPED, f"it took longer than {limit:g} s")
            if row is not None:
                process.kill()
                process.join()
                inward.close()
                del busy[name]
                yield row


def _child(name: str, budget: str, out: Any) -> None:
    import os
    import warnings

    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    out.send(audited(name, budget))
    out.close()
