"""One audit under way: what is claimed, what was found, what was left out, and how much time there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from keepleft.attention.masks import Mask
from keepleft.attention.picture import table
from keepleft.auditing.report import Finding
from keepleft.auditing.seen import Seen
from keepleft.auditing.subject import Call, CallError, Subject
from keepleft.auditing.ways import Budget, Way

Item = TypeVar("Item")
PROBES = ("substitution", "gradient", "length", "magnitude", "poison")


@dataclass
class Inquiry:
    subject: Subject
    claim: Mask
    layers: int | None
    budget: Budget
    checks: tuple[str, ...]
    probes: tuple[str, ...] = PROBES
    began: float = field(default_factory=time.monotonic)
    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    undone: dict[str, str] = field(default_factory=dict)  # a check that applies and could not be made; the line that says so
    checked: list[str] = field(default_factory=list)
    paths: dict[str, None] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    double: bool | None = None   # does it run in float64?
    purity: dict[Way, bool] = field(default_factory=dict)
    quantised: bool = False
    done: int = 0                # comparisons made
    tried: set[Any] = field(default_factory=set)
    recent: list[tuple[Call, Way, Tensor]] = field(default_factory=list)
    refused: int = 1 << 30       # a length that the model does not take, nor any longer one
    tell: Callable[[str], None] = lambda _: None

    @property
    def large(self) -> bool:
        """Is one call slow enough that some of them must do for all?"""
        return self.budget.seconds is not None and self.subject.weights > 3e7

    @property
    def brief(self) -> bool:
        """A large model and little time: the plain path, and what tells most."""
        return self.large and not self.budget.broad

    # -- the claim

    def allowed(self, length: int, row: int = 0) -> Tensor:
        """(T, T): may position q be moved by position k, through all layers? A position keeps itself."""
        step = table(self.claim, length, row=row) | torch.eye(length, dtype=torch.bool)
        out = step
        for _ in range((self.layers or length) - 1):
            further = (out.float() @ step.float()) > 0
            if torch.equal(further, out):
                break
            out = further
        return out

    @property
    def silent(self) -> bool:
        """Does the claim allow everything?"""
        return bool(self.allowed(self.subject.length).all())

    def pure(self, way: Way) -> bool:
        """In float64, is float64 all that this path computes in?"""
        key = Way(way.train, way.implementation, way.flag, way.asked, dtype=torch.float64)
        if key not in self.purity:
            try:
                with self.subject.on(key), Seen() as seen:
                    self.subject.run(self.subject.call(2), key)
                self.purity[key] = not seen.coarse
            except CallError:
                self.purity[key] = False
        return self.purity[key]

    def fine(self, way: Way) -> Way:
        """The same path in float64, where that is not a path of its own and the model runs in it."""
        return way.but(dtype=torch.float64) if self.double and way.dtype is None else way

    def ran(self, call: Call, way: Way) -> Tensor:
        """The output of a call; of the very same call it is not computed again."""
        for known, path, out in self.recent:
            if known is call and path == way:
                return out
        self.recent.append((call, way, self.subject.run(call, way)))
        del self.recent[:-3]
        return self.recent[-1][2]

    def takes(self, way: Way, length: int) -> bool:
        """Does it take a text of this length at all? A table of positions has an end."""
        subject = self.subject
        try:
            with subject.on(way):
                subject.run(subject.call(1, length), way)
        except CallError as error:
            if length > subject.length:
                self.refused = min(self.refused, length)
            self.skip(f"lengths from {length} on" if length > subject.length else f"length {length}", error)
            return False
        return True

    # -- what comes of it

    def add(self, finding: Finding, sort: str = "") -> None:
        """The same leak on another path is one finding."""
        key = (finding.kind, finding.module, sort)
        alike = [known for known in self.findings if known[0] == finding.kind]
        if alike and (finding.kind == "nan" or not finding.module):  # NaN spreads; where it begins was told first
            key = alike[0]
        if key not in self.findings:
            self.findings[key] = finding
            self.tell(str(finding))
        elif finding.path != (first := self.findings[key]).path and finding.path not in first.also:
            self.findings[key] = replace(first, also=(*first.also, finding.path))

    def found(self, *kinds: str) -> bool:
        return any(kind in kinds for kind, _, _ in self.findings)

    def skip(self, what: str, why: object, *, fatal: bool = False) -> None:
        line = f"{what}: {why}"
        if line not in self.skipped:
            self.skipped.append(line)
        if fatal and line not in self.blocked:
            self.blocked.append(line)

    def fail(self, check: str, why: object) -> None:
        """A whole check that applies could not be made: without it there is no verdict."""
        self.skip(check, why)
        self.undone[check] = f"{check}: {why}"

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def took(self, way: Way, batch: int | None = None, length: int | None = None) -> str:
        """Remember a path, and say its name."""
        name = way.named(batch, length)
        self.done += 1
        self.paths[name] = None
        return name

    # -- time

    @property
    def late(self) -> bool:
        return self.budget.seconds is not None and time.monotonic() - self.began > self.budget.seconds

    @property
    def up(self) -> str:
        return f"the time of the {self.budget.name} budget was up; budget='full' has no limit"

    def timely(self, steps: Iterable[Item], what: str) -> Iterator[Item]:
        """Go through steps as long as there is time; say what was left out."""
        for step in steps:
            if self.late:
                self.skip(what, self.up)
                return
            yield step

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """A part of a check on one path: where it cannot be done, that is said, and the audit goes on."""
        try:
            yield
        except CallError as error:
            self.skip(what, error)
