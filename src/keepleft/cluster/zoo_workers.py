"""The audit of a library's classes on the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from keepleft.auditing.zoo.run import ZooRow, run
from keepleft.cluster.workers import Rows, map_on_workers


class ClassAuditor:
    """The actor of a worker. Each class has a process of its own below it, since some crash or hang."""

    def __init__(self, budget: str) -> None:
        self.budget = budget

    def __call__(self, rows: Rows) -> Rows:
        names = [str(name) for name in rows["item"]]
        return {"row": list(run(names, self.budget, start_method="forkserver"))}


def audit_classes(
    names: Sequence[str], budget: str, *, workers: int, address: str | None
) -> Generator[ZooRow, None, None]:
    """Audit classes, and yield a row for each as it finishes. Errors as `map_on_workers`."""
    for row in map_on_workers(
        ClassAuditor, lambda _: {"budget": budget}, names, workers=workers, address=address
    ):
        yield row["row"]
