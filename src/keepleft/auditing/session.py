"""The state of one audit: its claim and budget, what it has found, and what it had to leave out."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from keepleft.attention.masks import Mask, mask_table
from keepleft.auditing.code_paths import MAX_PARAMETERS_FOR_EVERY_LENGTH, Budget, CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.interventions import OpCounter
from keepleft.auditing.model_adapter import CallError, ModelAdapter
from keepleft.auditing.progress import CheckOutcome, ProgressReporter
from keepleft.auditing.report import Finding

Item = TypeVar("Item")
PROBES = ("substitution", "gradient", "length", "magnitude", "poison")
MAX_RECENT_OUTPUTS = 3
MAX_FLOAT64_BYTES = 4 << 30  # weights of a model up to this size are copied to float64
LeakKey = tuple[str, str, str]  # kind, module, variant
# kind → variants that one fault shows: what padding holds moves a token, so its amount does too
SAME_CAUSE: dict[str, tuple[set[str], ...]] = {
    "padding": ({"", "amount"},),
    "future": ({"", "length"},),
    "batch": ({"", "alone"}, {"", "masks"}, {"alone", "masks"}),
}


@dataclass
class RunCache:
    """What earlier calls of the model showed, so that they need not be repeated."""

    recent_outputs: list[tuple[Inputs, CodePath, Tensor]] = field(default_factory=list)  # oldest first
    float64_purity: dict[CodePath, bool] = field(default_factory=dict)
    visited: set[Hashable] = field(default_factory=set)
    agreements: dict[Hashable, bool] = field(default_factory=dict)  # pairs of calls that were compared
    accepted_lengths: set[tuple[CodePath, int]] = field(default_factory=set)
    rows_move_each_other: bool = False  # seen while something else was looked for
    rejected_length: int = 1 << 30  # the model takes no sequence of this length or longer

    def first_visit(self, key: Hashable) -> bool:
        """True the first time that this key is given."""
        is_new = key not in self.visited
        self.visited.add(key)
        return is_new

    def keep_longest(self, inputs: Inputs) -> None:
        """Drop the output of this call last: many others are compared with it."""
        self.recent_outputs.sort(key=lambda entry: entry[0] is inputs)


@dataclass
class AuditSession:
    """Handed to every check, which reports to it through add_finding, skip, mark_unchecked and note."""

    adapter: ModelAdapter
    claim: Mask
    layers: int | None  # how often the claim is applied in turn; None until the first calls show it
    budget: Budget
    checks: tuple[str, ...]
    probes: tuple[str, ...] = PROBES
    progress: ProgressReporter = field(default_factory=ProgressReporter)
    started_at: float = field(default_factory=time.monotonic)
    # what the first calls show
    float64_support: bool | None = None  # None: not tried yet
    quantized: bool = False
    num_randomized: int = 0  # weights that were all zero
    num_granted: int = 0  # comparisons that are made whatever the time
    check_ends_at: float = math.inf  # by the clock: what is left of a check then is left out
    # further lengths to try
    lengths: list[int] = field(default_factory=list)
    # what becomes the report
    findings: dict[LeakKey, Finding] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)  # check → why it could not be made
    checked: list[str] = field(default_factory=list)
    path_labels: dict[str, None] = field(default_factory=dict)
    tried_paths: set[CodePath] = field(default_factory=set)
    tried_lengths: set[int] = field(default_factory=set)
    num_comparisons: int = 0
    run_cache: RunCache = field(default_factory=RunCache)

    @property
    def is_large(self) -> bool:
        """Is one call so slow that a sample of them must do?"""
        max_parameters = 3e7 if self.adapter.device.type == "cpu" else 1e9
        return self.budget.seconds is not None and self.adapter.num_parameters > max_parameters

    @property
    def takes_every_length(self) -> bool:
        """Is the model small enough for lengths that none of its numbers names?"""
        is_small = self.adapter.num_parameters <= MAX_PARAMETERS_FOR_EVERY_LENGTH
        return (is_small or self.budget.seconds is None) and not self.adapter.is_called_by_position

    @property
    def essential(self) -> bool:
        """Is this the first round over a large model, on the plain path, with the probes that show most?"""
        return self.budget.essential

    # -- the claim

    def allowed_mask(self, length: int, row: int = 0) -> Tensor:
        """(T, T): may position k influence the output at q, through all layers? Every position may influence
        its own.
        """
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
        """Does the claim allow every position to influence every other?"""
        return bool(self.allowed_mask(self.adapter.length).all())

    # -- calls

    @property
    def supports_float64(self) -> bool:
        """Does the model run in float64? Tried when it is first asked, since a large model takes a while."""
        if self.float64_support is None:
            self.float64_support = self._runs_in_float64()
        return self.float64_support

    def _runs_in_float64(self) -> bool:
        adapter = self.adapter
        if adapter.module is None or self.quantized or adapter.dtype == torch.float64:
            return False
        if sum(p.numel() * p.element_size() for p in adapter.module.parameters()) >= MAX_FLOAT64_BYTES:
            return False
        path = CodePath(dtype=torch.float64)
        try:
            with adapter.on_path(path):
                adapter.run(adapter.make_inputs(2), path)
        except CallError as error:
            self.note(f"it does not run in float64 ({error}), so rounding is told from leaks less finely")
            return False
        return True

    def is_pure_float64(self, path: CodePath) -> bool:
        """Does this path, run in float64, compute in nothing but float64?"""
        float64_path = path.but(
            dtype=torch.float64, mask="absent", batch=2, output="", wrapped=False, autocast=False
        )
        purity = self.run_cache.float64_purity
        if float64_path not in purity:
            try:
                with self.adapter.on_path(float64_path), OpCounter() as op_counter:
                    self.adapter.run(self.adapter.make_inputs(2), float64_path)
                purity[float64_path] = not op_counter.has_low_precision
            except CallError:
                purity[float64_path] = False
        return purity[float64_path]

    def in_float64(self, path: CodePath) -> CodePath:
        """The same path in float64; unchanged where it has a dtype of its own, where the model does not run
        in float64, and in the rounds over a large model that have little time.
        """
        if path.dtype is not None or (self.is_large and not self.budget.exhaustive):
            return path
        return path.but(dtype=torch.float64) if self.supports_float64 else path

    def cached_run(self, inputs: Inputs, path: CodePath) -> Tensor:
        """The output of a call; one of the latest calls is not computed again."""
        recent_outputs = self.run_cache.recent_outputs
        for cached_inputs, cached_path, output in recent_outputs:
            if cached_inputs is inputs and cached_path == path:
                return output
        output = self.adapter.run(inputs, path)
        recent_outputs.append((inputs, path, output))
        del recent_outputs[:-MAX_RECENT_OUTPUTS]
        return output

    def accepts_length(self, path: CodePath, length: int) -> bool:
        """Does the model take a sequence of this length? A table of learned positions has an end."""
        adapter = self.adapter
        if (path, length) in self.run_cache.accepted_lengths:
            return True
        try:
            with adapter.on_path(path):
                adapter.run(adapter.make_inputs(1, length), path)
        except CallError as error:
            self._reject_length(path, length, error)
            return False
        self.run_cache.accepted_lengths.add((path, length))
        return True

    def _reject_length(self, path: CodePath, length: int, error: CallError) -> None:
        """Report that the model takes no sequence of this length; on the plain path, none that is longer."""
        if path.but(dtype=None) != CodePath():
            self.skip(f"length {length}, {path.label()}", error)
        elif length <= self.adapter.length:
            self.skip(f"length {length}", error)
        elif length < self.run_cache.rejected_length:  # one line says it
            self.skipped = [line for line in self.skipped if not line.startswith("lengths from ")]
            self.run_cache.rejected_length = length
            self.skip(f"lengths from {length} on", error)

    # -- results

    def add_finding(self, finding: Finding, variant: str = "") -> None:
        """Record a leak; the same leak on a further path, or in another module of the same code, is added to
        the finding that is already there.

        variant: tells findings of one kind in one module apart.
        """
        key = self._known_leak(finding, variant)
        if key is None:
            variant = variant if finding.is_leak else f"{variant}, {finding.severity}"
            self.findings[finding.kind, finding.module, variant] = finding
            self.progress.report_finding(finding)
            return
        known = self.findings[key]
        if finding.path != known.path and finding.path not in known.also:
            known = replace(known, also=(*known.also, finding.path))
        if finding.module not in ("", known.module, *known.also_in):
            known = replace(known, also_in=(*known.also_in, finding.module))
        self.findings[key] = replace(known, line=known.line or finding.line)

    def _known_leak(self, finding: Finding, variant: str) -> LeakKey | None:
        """The key of the finding that has the same cause; None where there is none."""
        key = (finding.kind, finding.module, variant)
        same_kind = {
            other: known
            for other, known in self.findings.items()
            if other[0] == finding.kind and known.severity == finding.severity
        }
        # NaN spreads, and the first finding names the module where it begins
        if not same_kind or finding.kind == "nan":
            return next(iter(same_kind), None)
        if key in same_kind:
            return key
        if not finding.module:
            # the faults of a loss and the operations on a cache are told apart by their variant alone
            named_by_variant = finding.kind in ("labels", "cache")
            return next((other for other in same_kind if other[2] == variant or not named_by_variant), None)
        for other, known in same_kind.items():
            if other[2] != variant and {other[2], variant} not in SAME_CAUSE.get(finding.kind, ()):
                continue
            if other[1] == finding.module and (finding.kind == "padding" or _lines_agree(finding, known)):
                return other
            is_same_code = finding.line and finding.line == known.line
            if is_same_code and self._module_type(other[1]) is self._module_type(finding.module):
                return other
        return None

    def _module_type(self, name: str) -> type | None:
        """The class of a submodule."""
        modules = {} if self.adapter.module is None else dict(self.adapter.module.named_modules())
        return type(modules[name]) if name in modules else None

    def explain_future(self, cause: str, advices: Iterable[str]) -> None:
        """Add a likely cause to the first finding of the future, if its advice is one that says little:
        what a convolution or a norm does wrong is known.
        """
        for key, finding in self.findings.items():
            if finding.kind == "future":
                if not any(advice in finding.message for advice in advices):
                    return
                self.findings[key] = replace(finding, message=f"{finding.message} {cause}")
                return

    def has_finding(self, *kinds: str) -> bool:
        """Is there a leak of one of these kinds?"""
        return any(finding.kind in kinds and finding.is_leak for finding in self.findings.values())

    def skip(self, item: str, reason: object, *, fatal: bool = False) -> None:
        """Report that an item could not be checked; fatal: without it there is no verdict."""
        line = f"{item}: {reason}"
        if line not in self.skipped:
            self.skipped.append(line)
        if fatal and line not in self.blocked:
            self.blocked.append(line)

    def mark_unchecked(self, check: str, reason: object) -> None:
        """Report that a check applies and could not be made: unless a later pass makes it, there is no
        verdict.
        """
        self.skip(check, reason)
        self.unchecked[check] = f"{check}: {reason}"

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def record_path(self, path: CodePath, batch: int | None = None, length: int | None = None) -> str:
        """Count a comparison on this path, and return the path's label."""
        path_label = path.label(batch, length)
        self.num_comparisons += 1
        self.path_labels[path_label] = None
        self.tried_paths |= {path, path if batch is None else path.but(batch=batch)}
        if length is not None:
            self.tried_lengths.add(length)
        self.progress.report_path(path_label)
        return path_label

    def outcome(self, check: str) -> tuple[CheckOutcome, str]:
        """What came of a check, and why it was not made."""
        if self.has_finding(check):
            return "leak", ""
        if check in self.checked:
            return "clean", ""
        if check in self.unchecked:
            return "unchecked", self.unchecked[check].removeprefix(f"{check}: ")
        reasons = [line.removeprefix(f"{check}: ") for line in self.skipped if line.startswith(f"{check}: ")]
        return "not applicable", "".join(reasons[:1])

    # -- time

    @property
    def out_of_time(self) -> bool:
        """Is the time of the budget up? The first round over a large model is finished all the same: one pass
        of every kind is what a verdict needs.
        """
        if self.seconds is None or self.essential or self.num_comparisons < self.num_granted:
            return False
        now = time.monotonic()
        return now - self.started_at > self.seconds or now > self.check_ends_at

    @property
    def seconds(self) -> float | None:
        """The time of the budget for this model."""
        return self.budget.large_seconds if self.is_large else self.budget.seconds

    def limit_check(self, share: float) -> None:
        """The check that begins now takes no more than this share of the time: some is left for others."""
        self.check_ends_at = math.inf if self.seconds is None else time.monotonic() + share * self.seconds
        # a check that has not been made yet gets one comparison, however late it is
        self.num_granted = self.num_comparisons + 1 if share < 1 else 0

    @property
    def out_of_time_message(self) -> str:
        return f"the time of the {self.budget.name} budget was up; budget='full' has no limit"

    def within_budget(self, steps: Iterable[Item], item: str) -> Iterator[Item]:
        """Iterate for as long as there is time, and report the item as skipped where there is none left."""
        for step in steps:
            if self.out_of_time:
                self.skip(item, self.out_of_time_message)
                return
            yield step

    @contextmanager
    def skip_on_error(self, item: str) -> Iterator[None]:
        """Report a part of a check as skipped where a call in it fails, and go on with the audit."""
        try:
            yield
        except CallError as error:
            self.skip(item, error)


def _lines_agree(finding: Finding, other: Finding) -> bool:
    """Are both in the same line, or is that of one not known?"""
    return not finding.line or not other.line or finding.line == other.line
