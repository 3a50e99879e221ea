"""The state of one audit: its claim and budget, what it has found, and what it had to leave out."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from keepleft.attention.masks import Mask, mask_table
from keepleft.auditing.code_paths import Budget, CodePath
from keepleft.auditing.interventions import OpCounter
from keepleft.auditing.model_adapter import CallError, Inputs, ModelAdapter
from keepleft.auditing.report import Finding

Item = TypeVar("Item")
PROBES = ("substitution", "gradient", "length", "magnitude", "poison")
MAX_RECENT_OUTPUTS = 3
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
    on_progress: Callable[[str], None] = lambda _: None
    started_at: float = field(default_factory=time.monotonic)
    # what the first calls show
    supports_float64: bool = False
    quantized: bool = False
    num_randomized: int = 0  # weights that were all zero
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
    num_comparisons: int = 0
    run_cache: RunCache = field(default_factory=RunCache)

    @property
    def is_large(self) -> bool:
        """Is one call so slow that a sample of them must do?"""
        return self.budget.seconds is not None and self.adapter.num_parameters > 3e7

    @property
    def reduced_coverage(self) -> bool:
        """A large model and little time: the plain path, and the probes that show most."""
        return self.is_large and not self.budget.exhaustive

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
        """The same path in float64; unchanged where it has a dtype of its own or the model does not run in
        float64.
        """
        return path.but(dtype=torch.float64) if self.supports_float64 and path.dtype is None else path

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
        try:
            with adapter.on_path(path):
                adapter.run(adapter.make_inputs(1, length), path)
        except CallError as error:
            if length > adapter.length:
                self.run_cache.rejected_length = min(self.run_cache.rejected_length, length)
            self.skip(f"lengths from {length} on" if length > adapter.length else f"length {length}", error)
            return False
        return True

    # -- results

    def add_finding(self, finding: Finding, variant: str = "") -> None:
        """Record a leak; the same leak on a further path, or in another module of the same code, is added to
        the finding that is already there.

        variant: tells findings of one kind in one module apart.
        """
        key = self._known_leak(finding, variant)
        if key is None:
            self.findings[finding.kind, finding.module, variant] = finding
            self.on_progress(str(finding))
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
        same_kind = {other: known for other, known in self.findings.items() if other[0] == finding.kind}
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
        return any(kind in kinds for kind, _, _ in self.findings)

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
        return path_label

    # -- time

    @property
    def out_of_time(self) -> bool:
        return self.budget.seconds is not None and time.monotonic() - self.started_at > self.budget.seconds

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
