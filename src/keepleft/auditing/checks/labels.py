"""Label alignment: is each label compared with the logits that predict it, once, and with no others?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import reused_outputs, rounding
from keepleft.auditing.call_forms import IsolatedLossCall
from keepleft.auditing.checks.agreement import CallPair, agree
from keepleft.auditing.checks.findings import format_size, remedy
from keepleft.auditing.checks.label_argument import (
    LabelArgument,
    find_label_argument,
    line_of_loss,
    logits_and_loss,
    loss_scripts,
    scalar_loss,
)
from keepleft.auditing.checks.label_loss import LabelLossProbe, labels_aligned, misalignment_message
from keepleft.auditing.checks.reproducer import constant_script, script
from keepleft.auditing.checks.target_leakage import check_fed_labels, check_target_leakage
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.localize import loss_line
from keepleft.auditing.model_adapter import CallError
from keepleft.auditing.probe_inputs import TokenSampler
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession
from keepleft.nn.loss import IGNORE_INDEX

MAX_LENGTH = 300  # of the longest sequence that is tried
IGNORED_TOLERANCE = 1e-4  # of the loss


def labels(session: AuditSession, paths: Sequence[CodePath]) -> None:
    adapter = session.adapter
    if adapter.feeds_labels:
        for path in session.within_budget(paths[:2], "labels, further paths"):
            with session.skip_on_error(f"labels, {path.label(2)}"), adapter.on_path(path):
                check_fed_labels(session, path)
        return
    label_argument = (
        find_label_argument(session, paths[0]) if isinstance(adapter.sampler, TokenSampler) else None
    )
    if label_argument is None:
        session.skip("labels", "the model takes no labels")
        return
    for path in session.within_budget(paths[:2], "labels, further paths"):
        with session.skip_on_error(f"labels, {path.label(2)}"), adapter.on_path(path):
            num_comparisons = session.num_comparisons
            if not _logits_ignore_labels(session, path, label_argument) or not _decoder_input_is_shifted(
                session, path, label_argument
            ):
                continue
            session.num_comparisons = num_comparisons  # only an explained loss counts as a label check
            if isinstance(adapter.entry_point, IsolatedLossCall):
                _check_isolated_labels(session, path, label_argument, adapter.entry_point)
                continue
            # where only labels differ, all but the loss of a large model is computed once
            is_reusable = session.is_large and not (path.train and adapter.random_in_training)
            reuse = reused_outputs.reuse_outputs(adapter.module) if is_reusable else nullcontext()
            with reuse:
                try:
                    _check_loss(session, path, label_argument)
                except CallError:  # no scores explain the loss
                    check_target_leakage(session, path, label_argument)
                    raise


def _check_loss(session: AuditSession, path: CodePath, label_argument: LabelArgument) -> None:
    """Is the loss that of the right labels, each once, and do small batches add up to a large one?"""
    count_argument = session.adapter.signature.argument_for("count")
    count_arguments = (None, count_argument) if count_argument is not None else (None,)
    variants = [replace(label_argument, count_argument=name) for name in count_arguments]
    trials = (
        [(variants[0], 2)]
        if session.essential
        else [(variant, batch_size) for variant in variants for batch_size in (2, 1)]
    )
    if all(
        labels_aligned(session, path, variant, batch_size) for variant, batch_size in trials
    ) and _ignored_row_is_free(session, path, label_argument):
        _check_accumulation(session, path)
        if not session.essential:
            _check_long_sequence(session, path, label_argument)


def _logits_ignore_labels(session: AuditSession, path: CodePath, label_argument: LabelArgument) -> bool:
    """The logits must not change when the labels do."""
    adapter = session.adapter
    inputs = adapter.make_inputs(2, seed=180)
    base = label_argument.with_labels(inputs, inputs.tokens)
    try:
        adapter.run(base, path)
    except CallError:
        return True  # no logits come out where there are labels
    positions = torch.ones(inputs.tokens.shape[:2]).nonzero()
    new_labels = adapter.sampler.resample(inputs.tokens, 182)

    def describe(row: int, reader: int, module: str, size: str) -> str:
        return (
            f"the scores at position {reader} move {size} when labels change, through {module}: "
            "the model reads its answers"
        )

    return agree(
        session,
        path,
        CallPair(
            "labels",
            base,
            label_argument.with_labels(inputs, new_labels),
            positions,
            positions,
            True,
            describe,
            None,
            "read",
        ),
    )


def _decoder_input_is_shifted(session: AuditSession, path: CodePath, label_argument: LabelArgument) -> bool:
    """Where the model makes the decoder's input from the labels, it must shift them: the logits at t must not
    have read the label at t.
    """
    adapter = session.adapter
    if (
        adapter.source_argument is None
        or not label_argument.has_role
        or adapter.main_argument in adapter.signature.required
        or session.claims_nothing
        or session.has_finding("future")
    ):
        return True
    inputs = adapter.make_inputs(2, seed=183)
    batch_size, length = inputs.tokens.shape[:2]
    new_labels = adapter.sampler.resample(inputs.tokens, 184)

    def arguments_for(labels: Tensor) -> dict[str, Any]:
        arguments = adapter.arguments(inputs.but(labels=labels), path)
        del arguments[adapter.main_argument]
        return arguments

    def run_for(labels: Tensor) -> Any:
        with torch.no_grad():
            return adapter.invoke(adapter.entry_point, arguments_for(labels))

    def logits_for(labels: Tensor) -> Tensor:
        return adapter.select_output(run_for(labels), batch_size, length).detach()

    try:
        base_logits = logits_for(inputs.tokens)
    except CallError:
        return True  # it does not make the decoder's input itself
    scale = rounding.scale(base_logits)
    for position in sorted({0, 1, length // 2, length - 1}):
        changed_labels = inputs.tokens.clone()
        changed_labels[:, position:] = new_labels[:, position:]
        change = rounding.max_change(base_logits, logits_for(changed_labels))[:, : position + 1]
        relative = change.amax(0).cpu() / scale
        size = float(relative.max())
        path_label = session.record_path(path, batch_size, length)
        if size > rounding.MAX_ROUNDING_ULPS * torch.finfo(base_logits.dtype).eps:
            reader = int(relative.argmax())
            outs = [run_for(labels) for labels in (inputs.tokens, changed_labels)]
            session.add_finding(
                Finding(
                    "labels",
                    reader,
                    position,
                    size,
                    f"{path_label}, {label_argument.name} without {adapter.main_argument}",
                    "",
                    f"the decoder reads its answers: without {adapter.main_argument}, the scores at position "
                    f"{reader} move {format_size(size)} when labels from position {position} on change; "
                    "shift labels to the right, behind a start token, before they become the decoder's "
                    "input.",
                    "labels",
                    "",
                    loss_scripts(session, path).output_change(
                        arguments_for(inputs.tokens),
                        arguments_for(changed_labels),
                        outs,
                        [adapter.select_output(out, batch_size, length)[:, : position + 1] for out in outs],
                    ),
                ),
                "fed",
            )
            return False
    return True


def _ignored_row_is_free(session: AuditSession, path: CodePath, label_argument: LabelArgument) -> bool:
    """The tokens of a row whose labels are all ignored must not weigh the more, the fewer other labels there
    are: then something is summed over ignored labels and divided by the number of the others, as a smoothed
    loss may be. A mean over all positions, which is no loss of labels, stays the same.
    """
    adapter = session.adapter
    inputs = adapter.make_inputs(2, seed=186)
    other_row = torch.tensor([[False], [True]]).expand(inputs.tokens.shape[:2])
    changed = inputs.blend(adapter.resample(inputs, 187), other_row)
    few = torch.full_like(inputs.tokens, IGNORE_INDEX)
    few[0, 1] = inputs.tokens[0, 1]
    many = torch.where(other_row, IGNORE_INDEX, inputs.tokens)
    moves = []
    for labels in (few, many):
        losses = [label_argument.loss(given, labels, path) for given in (inputs, changed)]
        moves.append(abs(losses[0] - losses[1]) / max(abs(losses[0]), 1e-12))
    session.record_path(path, 2)
    if not (moves[0] > IGNORED_TOLERANCE and moves[0] > 2 * moves[1]):
        return True
    session.add_finding(
        Finding(
            "labels",
            None,
            None,
            moves[0],
            path.label(2),
            "",
            f"labels of {IGNORE_INDEX} are counted: the loss moves by {moves[0]:.2g} of itself with the "
            "tokens of a row that has no other labels; leave out what is ignored before anything is summed.",
            "labels",
            line_of_loss(session, path, label_argument),
            loss_scripts(session, path).difference(
                label_argument.with_labels(inputs, few), label_argument.with_labels(changed, few)
            ),
        ),
        "ignored",
    )
    return False


def _check_isolated_labels(
    session: AuditSession, path: CodePath, label_argument: LabelArgument, call: IsolatedLossCall
) -> None:
    """Where there is a loss and no scores: each label by itself must count, and must not be judged by what
    has read it.
    """
    adapter = session.adapter
    inputs = adapter.make_inputs(2, seed=188)
    length = inputs.tokens.shape[1]
    shift = label_argument.shift
    assert isinstance(adapter.sampler, TokenSampler)
    losses = []
    for label in adapter.sampler.pool[[0, -1]].tolist():
        call.label = int(label)
        losses.append(adapter.run(inputs, path)[..., 0])
    call.label = int(adapter.sampler.pool[0])
    session.record_path(path, 2, length)
    unjudged = (losses[0] == losses[1]).all(0).nonzero().flatten().tolist()
    missed = [position for position in unjudged if position >= shift]
    if missed:
        session.add_finding(
            Finding(
                "labels",
                None,
                missed[0],
                1.0,
                path.label(2, length),
                "",
                f"the label at position {missed[0]} is judged by nothing: the loss is the same whatever it "
                f"is; {remedy('labels', '')}.",
                "labels",
                line_of_loss(session, path, label_argument),
                constant_script(session, path, inputs, missed[0], int(adapter.sampler.pool[-1])),
            ),
            "unjudged",
        )
        return
    if not shift or session.has_finding("future"):
        return
    position = length // 2
    changed = inputs.blend(adapter.resample(inputs, 189), (torch.arange(length) == position)[None])
    new_losses = adapter.run(changed, path)[..., 0]
    moved = new_losses[:, position] != losses[0][:, position]
    if bool(moved.any()):
        at = (int(moved.long().argmax()), position)
        session.add_finding(
            Finding(
                "labels",
                position,
                position,
                1.0,
                path.label(2, length),
                "",
                misalignment_message(0, position, 0, position, shift) + f"; {remedy('labels', '')}.",
                "labels",
                line_of_loss(session, path, label_argument),
                script(session, path, inputs, changed, at, at),
            )
        )


def _check_long_sequence(session: AuditSession, path: CodePath, label_argument: LabelArgument) -> None:
    """A loss computed in chunks may go wrong where a chunk ends: two short sequences, whose lengths have
    nothing in common, and one longer than most chunks, or as long as the model takes.
    """
    longer_lengths = sorted(
        n for n in session.lengths if session.adapter.length < n < session.run_cache.rejected_length
    )
    max_length = min(session.budget.max_length, MAX_LENGTH) + 1
    candidates = longer_lengths[:-4:-1]  # the longest three
    if max_length < session.run_cache.rejected_length:
        candidates.insert(0, max_length)
    for length in (session.adapter.length - 1, session.adapter.length - 3):
        with suppress(CallError):
            if not LabelLossProbe(session, path, label_argument, 2, length).check_all_labels():
                return
    for length in candidates:
        with suppress(CallError):
            LabelLossProbe(session, path, label_argument, 2, length).check_all_labels()
            return  # else a shorter one may do


def _check_accumulation(session: AuditSession, path: CodePath) -> None:
    """Gradient accumulation: the losses of small batches, each given the number of all labels, must add up to
    the loss of the large batch.
    """
    adapter = session.adapter
    count_argument = adapter.signature.argument_for("count")
    if count_argument is None:
        return
    inputs = adapter.make_inputs(2, seed=190)
    labels = inputs.tokens.clone()
    labels[0, 4:] = IGNORE_INDEX
    extra = {count_argument: torch.tensor(int((labels[:, 1:] != IGNORE_INDEX).sum()))}
    full_loss = scalar_loss(logits_and_loss(adapter, inputs.but(labels=labels, extra=extra), path)[1])
    row_slices = [slice(n, n + 1) for n in range(2)]
    parts = [
        inputs.select_rows(row_slice).but(labels=labels[row_slice], extra=extra) for row_slice in row_slices
    ]
    row_losses = [scalar_loss(logits_and_loss(adapter, part, path)[1]) for part in parts]
    relative_error = abs(float(full_loss) - float(sum(row_losses))) / max(abs(float(full_loss)), 1e-12)
    if relative_error > 1e-3:
        session.add_finding(
            Finding(
                "labels",
                None,
                None,
                relative_error,
                session.record_path(path, 2),
                "",
                "accumulation is not the full batch: two small batches add up to "
                f"{float(sum(row_losses)):.4g}, the large one gives {float(full_loss):.4g}; divide the "
                f"summed loss by {count_argument}, and by nothing else.",
                "labels",
                loss_line(lambda: adapter.run_raw(parts[0], path)),
                loss_scripts(session, path).sum_of_parts(inputs.but(labels=labels, extra=extra), parts),
            ),
            "accumulation",
        )
