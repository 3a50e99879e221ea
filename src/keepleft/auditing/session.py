"""One audit under way: what is claimed, what was found, what was left out, and how much time there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from keepleft.attention.mask_plot import mask_table
from keepleft.attention.masks import Mask
from keepleft.auditing.code_paths import Budget, CodePath
from keepleft.auditing.model_adapter import CallError, Inputs, ModelAdapter
from keepleft.auditing.op_counter import OpCounter
from keepleft.auditing.report import Finding

Item = TypeVar("Item")
PROBES = ("substitution", "gradient", "length", "magnitude", "poison")


@dataclass
class AuditSession:
    adapter: ModelAdapter
    claim: Mask
    layers: int | None
    budget: Budget
    checks: tuple[str, ...]
    probes: tuple[str, ...] = PROBES
    started_at: float = field(default_factory=time.monotonic)
    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    # a check that applies and could not be made; the line that says so
    unchecked: dict[str, str] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    path_labels: dict[str, None] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    supports_float64: bool | None = None  # does it run in float64?
    float64_purity: dict[CodePath, bool] = field(default_factory=dict)
    quantized: bool = False
    num_comparisons: int = 0  # comparisons made
    visited_paths: set[Any] = field(default_factory=set)
    recent_outputs: list[tuple[Inputs, CodePath, Tensor]] = field(default_factory=list)
    rejected_length: int = 1 << 30  # a length that the model does not take, nor any longer one
    on_progress: Callable[[str], None] = lambda _: None

    @property
    def is_large(self) -> bool:
        """Is one call slow enough that some of them must do for all?"""
        return self.budget.seconds is not None and self.adapter.num_parameters > 3e7

    @property
    def reduced_coverage(self) -> bool:
        """A large model and little time: the plain path, and what tells most."""
        return self.is_large and not self.budget.exhaustive

    # -- the claim

    def allowed_mask(self, length: int, row: int = 0) -> Tensor:
        """(T, T): may position q be moved by position k, through all layers? A position keeps itself."""
        layer_mask = mask_table(self.claim, length, row=row) | torch.eye(length, dtype=torch.bool)
        allowed = layer_mask
        for _ in range((self.layers or length) - 1):
            composed = (allowed.float() @ layer_mask.float()) > 0
            if torch.equal(composed, allowed):
                break
            allowed = composed
        return allowed

    @property
    def claims_nothing(self) -> bool:
        """Does the claim allow everything?"""
        return bool(self.allowed_mask(self.adapter.length).all())

    def is_pure_float64(self, path: CodePath) -> bool:
        """In float64, is float64 all that this path computes in?"""
        float64_path = CodePath(
            path.train, path.implementation, path.flag, path.extra_arguments, dtype=torch.float64
        )
        if float64_path not in self.float64_purity:
            try:
                with self.adapter.on_path(float64_path), OpCounter() as op_counter:
                    self.adapter.run(self.adapter.make_inputs(2), float64_path)
                self.float64_purity[float64_path] = not op_counter.has_low_precision
            except CallError:
                self.float64_purity[float64_path] = False
        return self.float64_purity[float64_path]

    def in_float64(self, path: CodePath) -> CodePath:
        """The same path in float64, where that is not a path of its own and the model runs in it."""
        return path.but(dtype=torch.float64) if self.supports_float64 and path.dtype is None else path

    def cached_run(self, inputs: Inputs, path: CodePath) -> Tensor:
        """The output of a call; of the very same call it is not computed again."""
        for cached_inputs, cached_path, out in self.recent_outputs:
            if cached_inputs is inputs and cached_path == path:
                return out
        self.recent_outputs.append((inputs, path, self.adapter.run(inputs, path)))
        del self.recent_outputs[:-3]
        return self.recent_outputs[-1][2]

    def accepts_length(self, path: CodePath, length: int) -> bool:
        """Does it take a text of this length at all? A table of positions has an end."""
        adapter = self.adapter
        try:
            with adapter.on_path(path):
                adapter.run(adapter.make_inputs(1, length), path)
        except CallError as error:
            if length > adapter.length:
                self.rejected_length = min(self.rejected_length, length)
            self.skip(f"lengths from {length} on" if length > adapter.length else f"length {length}", error)
            return False
        return True

    # -- what comes of it

    def add_finding(self, finding: Finding, variant: str = "") -> None:
        """The same leak on another path is one finding."""
        key = (finding.kind, finding.module, variant)
        same_kind = [other_key for other_key in self.findings if other_key[0] == finding.kind]
        if same_kind and (
            finding.kind == "nan" or not finding.module
        ):  # NaN spreads; where it begins was told first
            key = same_kind[0]
        if key not in self.findings:
            self.findings[key] = finding
            self.on_progress(str(finding))
        elif finding.path != (existing := self.findings[key]).path and finding.path not in existing.also:
            self.findings[key] = replace(existing, also=(*existing.also, finding.path))

    def has_finding(self, *kinds: str) -> bool:
        return any(kind in kinds for kind, _, _ in self.findings)

    def skip(self, item: str, reason: object, *, fatal: bool = False) -> None:
        line = f"{item}: {reason}"
        if line not in self.skipped:
            self.skipped.append(line)
        if fatal and line not in self.blocked:
            self.blocked.append(line)

    def mark_unchecked(self, check: str, reason: object) -> None:
        """A whole check that applies could not be made: without it there is no verdict."""
        self.skip(check, reason)
        self.unchecked[check] = f"{check}: {reason}"

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def record_path(self, path: CodePath, batch: int | None = None, length: int | None = None) -> str:
        """Remember a path, and say its name."""
        path_label = path.label(batch, length)
        self.num_comparisons += 1
        self.path_labels[path_label] = None
        return path_label

    # -- time

    @property
    def out_of_time(self) -> bool:
        return self.budget.seconds is not None and time.monotonic() - self.started_at > self.budget.seconds

    @property
    def out_of_time_message(self) -> str:
        return f"the time of the {self.budget.name} budget was up; budget='full' has no limit"

    def within_budget(self, steps: Iterable[Item], item: str) -> Iterator[Item]:
        """Go through steps as long as there is time; say what was left out."""
        for step in steps:
            if self.out_of_time:
                self.skip(item, self.out_of_time_message)
                return
            yield step

    @contextmanager
    def skip_on_error(self, item: str) -> Iterator[None]:
        """A part of a check on one path: where it cannot be done, that is said, and the audit goes on."""
        try:
            yield
        except CallError as error:
            self.skip(item, error)
