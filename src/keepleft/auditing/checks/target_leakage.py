"""Target leakage: is a label judged by what has read it already? Seen in the loss, whatever it is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.auditing import rounding
from keepleft.auditing.checks.findings import remedy
from keepleft.auditing.checks.label_argument import (
    LabelArgument,
    ignore_value,
    line_of_loss,
    logits_and_loss,
    loss_scripts,
    scalar_loss,
)
from keepleft.auditing.checks.reproducer import script
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.probe_inputs import TokenSampler, first_middle_last
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession
from keepleft.nn.loss import IGNORE_INDEX

MIN_TOLERANCE = 1e-6  # of what a label contributes to the loss


def check_target_leakage(session: AuditSession, path: CodePath, label_argument: LabelArgument) -> None:
    """One label at a time, all others ignored: what it contributes to the loss must not change with its own
    token and those behind it, and must change with the token before.

    What it contributes is the difference between the losses of two values, in which a loss of anything else
    cancels out.
    """
    adapter = session.adapter
    if session.claims_nothing or session.has_finding("future", "batch", "labels"):
        return
    path = session.in_float64(path)
    inputs = adapter.make_inputs(2, seed=191)
    if inputs.tokens.dim() > 2:
        session.skip("labels, one at a time", "each position has several tokens or features")
        return
    replacement = adapter.resample(inputs, 192)
    length = inputs.tokens.shape[1]
    shift = label_argument.shift
    with adapter.on_path(path):
        if ignore_value(label_argument, inputs, path) != IGNORE_INDEX:
            return
        probe = _ContributionProbe(session, path, label_argument)
        tolerance = max(rounding.tolerance(session, path), MIN_TOLERANCE)
        positions = list(range(max(1, shift), length - 1 + shift))
        num_judged = num_following = 0
        for position in first_middle_last(positions) if session.is_large else positions:
            first_hidden = position + 1 - shift
            contribution = probe.contribution(inputs, position)
            if contribution is None:
                continue
            num_judged += 1
            behind = inputs.blend(replacement, (torch.arange(length) >= first_hidden)[None])
            before = inputs.blend(replacement, (torch.arange(length) == first_hidden - 1)[None])
            if probe.change(contribution, behind, position) > tolerance:
                probe.report_leak(inputs, behind, position, first_hidden)
                return
            num_following += probe.change(contribution, before, position) > tolerance
        if num_judged and not num_following:
            probe.report_distance()


class _ContributionProbe:
    """What one label contributes to the loss."""

    def __init__(self, session: AuditSession, path: CodePath, label_argument: LabelArgument) -> None:
        self.session = session
        self.path = path
        self.label_argument = label_argument
        assert isinstance(session.adapter.sampler, TokenSampler)
        self.values = session.adapter.sampler.pool[[0, -1]].tolist()

    def with_label(self, inputs: Inputs, position: int, value: int) -> Inputs:
        labels = torch.full(inputs.tokens.shape[:2], IGNORE_INDEX)
        labels[0, position] = value
        return self.label_argument.with_labels(inputs, labels)

    def contribution(self, inputs: Inputs, position: int) -> float | None:
        """None where the loss does not depend on the label, or is not a number."""
        losses = [self._loss(self.with_label(inputs, position, value)) for value in self.values]
        difference = losses[0] - losses[1]
        return float(difference) if bool(difference.isfinite()) and abs(float(difference)) > 1e-9 else None

    def change(self, contribution: float, inputs: Inputs, position: int) -> float:
        """Relative to the larger contribution; 0 where there is none with other tokens."""
        other = self.contribution(inputs, position)
        return 0.0 if other is None else abs(other - contribution) / max(abs(other), abs(contribution))

    def report_leak(self, inputs: Inputs, behind: Inputs, position: int, first_hidden: int) -> None:
        session = self.session
        contribution = self.contribution(inputs, position)
        size = 1.0 if contribution is None else self.change(contribution, behind, position)
        calls = [
            self.with_label(given, position, value) for given in (inputs, behind) for value in self.values
        ]
        session.add_finding(
            Finding(
                "labels",
                position - self.label_argument.shift,
                position,
                size,
                session.record_path(self.path, 2, inputs.tokens.shape[1]),
                "",
                f"the label at position {position} is judged by what has read it: what it contributes to the "
                f"loss changes by {size:.2g} of itself with the tokens from position {first_hidden} on; "
                f"{remedy('labels', '')}.",
                "labels",
                line_of_loss(session, self.path, self.label_argument),
                loss_scripts(session, self.path).double_difference(calls),
            ),
            "read",
        )

    def report_distance(self) -> None:
        """No label's loss changes with the token right before it."""
        session = self.session
        session.add_finding(
            Finding(
                "labels",
                None,
                None,
                1.0,
                session.record_path(self.path, 2),
                "",
                "no label's loss changes with the token before it: labels are shifted twice; "
                f"{remedy('labels', '')}.",
                "labels",
                line_of_loss(session, self.path, self.label_argument),
            ),
            "distant",
        )

    def _loss(self, inputs: Inputs) -> Tensor:
        return scalar_loss(logits_and_loss(self.session.adapter, inputs, self.path)[1])


def check_fed_labels(session: AuditSession, path: CodePath) -> None:
    """Labels that the decoder reads, shifted to the right: no position may read the last one, and the first
    position none at all.
    """
    adapter = session.adapter
    if session.has_finding("future"):
        return
    inputs = adapter.make_inputs(2, seed=193)
    batch, length = inputs.tokens.shape[:2]
    labels = adapter.sampler.sample(batch, length, 194)
    new = adapter.sampler.resample(labels, 195)
    base = inputs.but(extra={adapter.main_argument: labels})
    base_output = adapter.run(base, path)
    scale = rounding.scale(base_output)
    for first, readers in ((length - 1, slice(None)), (0, slice(1))):
        changed_labels = torch.where(torch.arange(length) >= first, new, labels)
        changed = base.but(extra={adapter.main_argument: changed_labels})
        change = rounding.max_change(base_output, adapter.run(changed, path))[:, readers].cpu() / scale
        path_label = session.record_path(path, batch, length)
        row, reader = divmod(int(change.argmax()), change.shape[1])
        size = float(change[row, reader])
        if size <= rounding.MAX_ROUNDING_ULPS * torch.finfo(base_output.dtype).eps:
            continue
        session.add_finding(
            Finding(
                "labels",
                reader,
                first,
                size,
                path_label,
                "",
                f"the decoder reads its answers: the scores at position {reader} move by {size:.2g} of the "
                f"largest output when labels from position {first} on change; shift labels to the right, "
                "behind a start token, before they become the decoder's input.",
                "labels",
                "",
                script(session, path, base, changed, (row, reader), (row, reader)),
            ),
            "fed",
        )
        return
