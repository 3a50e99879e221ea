"""Label alignment: is each label compared with the logits that predict it, once, and with no others?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import isolation, outputs, rounding
from keepleft.auditing.call_forms import IsolatedLossCall
from keepleft.auditing.checks.agreement import CallPair, agree
from keepleft.auditing.checks.findings import format_size, remedy
from keepleft.auditing.checks.label_scripts import LossScripts
from keepleft.auditing.checks.reproducer import constant_script, script
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.localize import loss_line
from keepleft.auditing.model_adapter import CallError, Inputs, ModelAdapter
from keepleft.auditing.probe_inputs import TokenSampler
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession
from keepleft.nn.loss import IGNORE_INDEX

MAX_LENGTH = 300  # of the longest sequence that is tried
IGNORED_TOLERANCE = 1e-4  # of the loss
MAX_RESIDUAL = 0.01  # of the loss's change that logits leave unexplained


@dataclass(frozen=True)
class LabelArgument:
    """The argument that takes labels, and which logits they belong to."""

    adapter: ModelAdapter
    name: str
    shift: int  # the label at t belongs to the logits at t - shift
    has_role: bool  # is the argument known by its name? Then Inputs.labels becomes its value
    count_argument: str | None = None  # the argument with the number of labels, where it is given

    def with_labels(self, inputs: Inputs, labels: Tensor) -> Inputs:
        extra = {} if self.count_argument is None else {self.count_argument: torch.tensor(1)}
        if self.has_role:
            return inputs.but(labels=labels, extra=extra)
        return inputs.but(extra={**extra, self.name: labels})

    def loss(self, inputs: Inputs, labels: Tensor, path: CodePath) -> float:
        return float(_scalar_loss(logits_and_loss(self.adapter, self.with_labels(inputs, labels), path)[1]))


def labels(session: AuditSession, paths: Sequence[CodePath]) -> None:
    adapter = session.adapter
    if adapter.feeds_labels:
        session.skip("labels", "they are the decoder's input, and audited as that")
        return
    label_argument = (
        _find_label_argument(session, paths[0]) if isinstance(adapter.sampler, TokenSampler) else None
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
            reuse = isolation.reuse_outputs(adapter.module) if is_reusable else nullcontext()
            with reuse:
                _check_loss(session, path, label_argument)


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
        _labels_aligned(session, path, variant, batch_size) for variant, batch_size in trials
    ) and _ignored_row_is_free(session, path, label_argument):
        _check_accumulation(session, path)
        if not session.essential:
            _check_long_sequence(session, path, label_argument)


def _find_label_argument(session: AuditSession, path: CodePath) -> LabelArgument | None:
    """The argument that takes labels, known by its name, or else a second sequence that changes a loss but no
    logits; None where there is none.
    """
    adapter = session.adapter
    shift = 1 if adapter.source_argument is None and not session.claims_nothing else 0
    for role in ("labels", "targets"):
        name = adapter.signature.argument_for(role)
        if name is not None:
            by_custom = shift if role == "labels" else 0
            return LabelArgument(adapter, name, _shift_in_example(adapter, name, by_custom), True)
    candidates = [
        name
        for name in adapter.signature.arguments_for("target")
        if name not in (adapter.main_argument, adapter.source_argument)
    ]
    for name in candidates:
        label_argument = LabelArgument(adapter, name, 0, False)
        inputs = adapter.make_inputs(2, seed=180)
        try:
            with adapter.on_path(path):
                logits, loss_value = logits_and_loss(
                    adapter, label_argument.with_labels(inputs, inputs.tokens), path
                )
                other_logits, _ = logits_and_loss(
                    adapter,
                    label_argument.with_labels(inputs, adapter.sampler.resample(inputs.tokens, 182)),
                    path,
                )
        except CallError:
            continue
        if loss_value is not None and torch.equal(logits, other_logits):
            return label_argument
    return None


def _shift_in_example(adapter: ModelAdapter, name: str, by_custom: int) -> int:
    """The shift that the example shows: 0 where its labels are the tokens that follow, 1 where they are the
    tokens themselves; by custom where it shows neither.
    """
    tokens, labels = (adapter.example_arguments.get(argument) for argument in (adapter.main_argument, name))
    if not isinstance(tokens, Tensor) or not isinstance(labels, Tensor) or tokens.shape != labels.shape:
        return by_custom
    if adapter.time_axis == 0:
        tokens, labels = tokens.transpose(0, 1), labels.transpose(0, 1)
    if tokens.dim() != 2 or tokens.shape[1] < 3:
        return by_custom
    judged = labels[:, 1:] >= 0
    if bool((labels[:, 1:] == tokens[:, 1:])[judged].all()):
        return 1 if by_custom else 0
    judged = labels[:, :-1] >= 0
    return 0 if bool((labels[:, :-1] == tokens[:, 1:])[judged].all()) else by_custom


def _logits_ignore_labels(session: AuditSession, path: CodePath, label_argument: LabelArgument) -> bool:
    """The logits must not change when the labels do."""
    adapter = session.adapter
    inputs = adapter.make_inputs(2, seed=180)
    base = label_argument.with_labels(inputs, inputs.tokens)
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


class LabelLossProbe:
    """Random inputs, the log-probabilities of every token that the model gives for them, and the losses of
    labels that are tried.

    The loss is explained by finding the logits whose negative log-likelihood it follows.
    """

    def __init__(
        self,
        session: AuditSession,
        path: CodePath,
        label_argument: LabelArgument,
        batch_size: int,
        length: int | None,
    ) -> None:
        self.session = session
        self.path = path
        self.label_argument = label_argument
        adapter = session.adapter
        self.inputs = adapter.make_inputs(batch_size, length, seed=180)
        self.batch_size, self.length = self.inputs.tokens.shape[:2]
        logits, loss_value = logits_and_loss(
            adapter, label_argument.with_labels(self.inputs, self.inputs.tokens), path
        )
        if loss_value is None:
            raise CallError("no loss comes out when labels are given")
        self.logprobs = torch.log_softmax(logits.double(), -1).cpu()
        values = adapter.sampler.sample(1, 6, 181)[0]
        self.label_values = values[values < self.logprobs.shape[-1]]
        if len(self.label_values.unique()) < 4:
            raise CallError("there are too few words to tell labels apart")
        self.path_label = path.label(self.batch_size, self.length)
        self.scripts = loss_scripts(session, path)

    def record_comparison(self) -> None:
        self.session.record_path(self.path, self.batch_size, self.length)

    def script_arguments(self, base_labels: Tensor) -> tuple[Inputs, Tensor]:
        """The inputs with labels in them, and these labels."""
        labels = base_labels.clone()
        return self.label_argument.with_labels(self.inputs, labels), labels

    def losses_at(self, base_labels: Tensor, row: int, position: int) -> Tensor:
        """(n,): the loss with each of several values for one label."""
        losses = []
        for value in self.label_values.tolist():
            labels = base_labels.clone()
            labels[row, position] = value
            losses.append(self.label_argument.loss(self.inputs, labels, self.path))
        return torch.tensor(losses, dtype=torch.float64)

    def check_label(self, base_labels: Tensor, row: int, position: int) -> float | None:
        """The weight of a label in the loss; None where it is compared with the wrong logits or with none,
        which is reported. Raises CallError where no logits explain the loss.
        """
        session = self.session
        shift = self.label_argument.shift
        losses = self.losses_at(base_labels, row, position)
        match = _match_losses(losses, -self.logprobs[:, :, self.label_values], (row, position - shift))
        if match is None:
            unpredictable = position < shift  # no logits come before it
            if unpredictable and (not losses.isfinite().all() or _is_constant(losses)):
                return 1.0
            if not losses.isfinite().all():
                # it may be the only label, and ignored: the mean of nothing is NaN
                base_labels = self.inputs.tokens
                losses = self.losses_at(base_labels, row, position)
            if losses.isfinite().all() and _is_constant(losses):
                self.record_comparison()
                session.add_finding(
                    Finding(
                        "labels",
                        None,
                        position,
                        1.0,
                        self.path_label,
                        "",
                        f"the label at position {position} is judged by nothing: "
                        f"the loss is the same whatever it is; {remedy('labels', '')}.",
                        "labels",
                        _loss_line(session, self.path, self.label_argument),
                        self.scripts.constant(
                            *self.script_arguments(base_labels), (row, position), self.label_values.tolist()
                        ),
                    ),
                    "unjudged",
                )
                return None
            if not losses.isfinite().all():
                raise CallError(f"the loss of the one label at position {position} is not a number")
            raise CallError(
                f"no scores explain the loss of the label at position {position} (another loss than "
                "cross-entropy?)"
            )
        self.record_comparison()
        logits_row, logits_position, weight = match
        if logits_row != row or logits_position != position - shift:
            session.add_finding(
                Finding(
                    "labels",
                    logits_position,
                    position,
                    1.0,
                    self.path_label,
                    "",
                    _misalignment_message(row, position, logits_row, logits_position, shift)
                    + f"; {remedy('labels', '')}.",
                    "labels",
                    _loss_line(session, self.path, self.label_argument),
                    self.misalignment_script(base_labels, row, position),
                )
            )
            return None
        return weight

    def misalignment_script(self, base_labels: Tensor, row: int, position: int) -> str:
        scores = position - self.label_argument.shift
        at = (row, position)
        values = self.label_values.tolist()
        if scores >= 0:
            return self.scripts.residual(*self.script_arguments(base_labels), at, values, scores)
        return self.scripts.spread(*self.script_arguments(self.inputs.tokens), at, values)

    def check_all_labels(self) -> bool:
        """All labels at once: the loss must follow the sum of their negative log-likelihoods. Where it does
        not, up to three labels whose weight deviates are checked one by one.
        """
        sampler = self.session.adapter.sampler
        shift = self.label_argument.shift
        label_sets = [
            sampler.sample(self.batch_size, self.length, 185 + n).clamp(max=self.logprobs.shape[-1] - 1)
            for n in range(6)
        ]
        losses = torch.tensor(
            [self.label_argument.loss(self.inputs, labels, self.path) for labels in label_sets],
            dtype=torch.float64,
        )
        nlls = torch.stack([self._nll(labels)[:, shift:].sum() for labels in label_sets])
        if _match_losses(losses, nlls[None, None], (0, 0)) is not None:
            self.record_comparison()
            return True
        return all(
            self.check_label(label_sets[0], row, position) is not None
            for row, position in self._outliers(label_sets[0], label_sets[1])[:3]
        )

    def _nll(self, labels: Tensor) -> Tensor:
        """(B, T): the negative log-likelihood of each label; zero where no logits come before it."""
        shift = self.label_argument.shift
        out = torch.zeros(labels.shape, dtype=torch.float64)
        out[:, shift:] = -self.logprobs[:, : self.length - shift].gather(-1, labels[:, shift:, None])[..., 0]
        return out

    def _outliers(self, base_labels: Tensor, other_labels: Tensor) -> list[tuple[int, int]]:
        """Labels whose weight in the loss differs from that of most others, as (row, position)."""
        base_loss = self.label_argument.loss(self.inputs, base_labels, self.path)
        base_nll = self._nll(base_labels)
        other_nll = self._nll(other_labels)
        positions = []
        weights = []
        for position in range(self.label_argument.shift, self.length):
            row = position % self.batch_size
            labels = base_labels.clone()
            labels[row, position] = other_labels[row, position]
            nll_change = float(other_nll[row, position] - base_nll[row, position])
            if abs(nll_change) > 1e-3:
                positions.append((row, position))
                weights.append(
                    (self.label_argument.loss(self.inputs, labels, self.path) - base_loss) / nll_change
                )
        if not weights:
            return []
        weight_tensor = torch.tensor(weights, dtype=torch.float64)
        median = weight_tensor.median()
        return [
            positions[n]
            for n in ((weight_tensor - median).abs() > 0.05 * median.abs()).nonzero().flatten().tolist()
        ]


def _labels_aligned(
    session: AuditSession, path: CodePath, label_argument: LabelArgument, batch_size: int
) -> bool:
    """One label at a time, with several values, and then all of them. Returns False at the first finding."""
    probe = LabelLossProbe(session, path, label_argument, batch_size, None)
    length = probe.length
    ignore_value = _ignore_value(label_argument, probe.inputs, path)
    base_labels = torch.full((batch_size, length), ignore_value)
    if ignore_value not in (IGNORE_INDEX, -1):
        base_labels = probe.inputs.tokens
    positions = (
        ((1, length // 2), (0, length - 1), (1, 1), (1, 0), (0, 2))
        if batch_size > 1
        else ((0, length // 2), (0, length - 1))
    )
    for row, position in positions:
        weight = probe.check_label(base_labels, row, min(position, length - 1))
        if weight is None:
            return False
        if (
            ignore_value == IGNORE_INDEX
            and abs(weight - 1) > 0.02
            and any(
                abs(weight * n - 1) < 0.02
                for n in (batch_size * length, batch_size * (length - 1), length, length - 1)
            )
        ):
            session.add_finding(
                Finding(
                    "labels",
                    position - label_argument.shift,
                    position,
                    abs(weight - 1),
                    probe.path_label,
                    "",
                    f"labels of {IGNORE_INDEX} are counted: one real label weighs {weight:.3g} instead of "
                    "1, so padding thins the loss; divide by the number of labels that are judged.",
                    "labels",
                    _loss_line(session, path, label_argument),
                    probe.scripts.weight(
                        *probe.script_arguments(base_labels),
                        (row, min(position, length - 1)),
                        probe.label_values.tolist(),
                        min(position, length - 1) - label_argument.shift,
                    ),
                ),
                "ignored",
            )
            return False
    return label_argument.count_argument is not None or probe.check_all_labels()


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
            _loss_line(session, path, label_argument),
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
                _loss_line(session, path, label_argument),
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
                _misalignment_message(0, position, 0, position, shift) + f"; {remedy('labels', '')}.",
                "labels",
                _loss_line(session, path, label_argument),
                script(session, path, inputs, changed, at, at),
            )
        )


def _check_long_sequence(session: AuditSession, path: CodePath, label_argument: LabelArgument) -> None:
    """A loss computed in chunks may go wrong where a chunk ends: one sequence longer than most chunks,
    or as long as the model takes.
    """
    longer_lengths = sorted(
        n for n in session.lengths if session.adapter.length < n < session.run_cache.rejected_length
    )
    max_length = min(session.budget.max_length, MAX_LENGTH) + 1
    candidates = longer_lengths[:-4:-1]  # the longest three
    if max_length < session.run_cache.rejected_length:
        candidates.insert(0, max_length)
    for length in candidates:
        try:
            LabelLossProbe(session, path, label_argument, 2, length).check_all_labels()
        except CallError:
            continue  # a shorter one may do
        return


def _ignore_value(label_argument: LabelArgument, inputs: Inputs, path: CodePath) -> int:
    """The label that is ignored, -100 or -1; some token where neither is."""
    for value in (IGNORE_INDEX, -1):
        labels = torch.full(inputs.tokens.shape[:2], value)
        labels[:, 2:] = inputs.tokens[:, 2:]
        try:
            if _scalar_loss(
                logits_and_loss(label_argument.adapter, label_argument.with_labels(inputs, labels), path)[1]
            ).isfinite():
                return value
        except CallError:
            continue
    return int(inputs.tokens[0, 0])


def _misalignment_message(row: int, position: int, logits_row: int, logits_position: int, shift: int) -> str:
    if logits_row != row:
        return (
            f"the label at position {position} of row {row} is judged by the scores at position "
            f"{logits_position} of row {logits_row}: the shift crosses rows"
        )
    if logits_position == position and shift:
        return (
            f"the label at position {position} is judged by the scores at that very position, which have "
            "seen it: labels are not shifted"
        )
    if logits_position < position - shift:
        return (
            f"the label at position {position} is judged by the scores at position {logits_position}: "
            "labels are shifted twice"
        )
    return (
        f"the label at position {position} is judged by the scores at position {logits_position}, "
        f"not {position - shift}"
    )


def _is_constant(losses: Tensor) -> bool:
    return float(losses.max() - losses.min()) < 1e-9


def _match_losses(losses: Tensor, nlls: Tensor, expected: tuple[int, int]) -> tuple[int, int, float] | None:
    """Which negative log-likelihoods (B, T, n) do n losses follow, up to a factor and a constant? Returns the
    row, the position and the factor, the weight of the label; None where none fits.

    expected: the place that is preferred where several fit, as positions that see the same give the same.
    """
    if not losses.isfinite().all():
        return None
    y = losses - losses.mean()
    if float(y.abs().max()) < 1e-9:
        return None
    x = nlls - nlls.mean(-1, keepdim=True)
    weight = (x * y).sum(-1) / (x * x).sum(-1).clamp(min=1e-30)
    residual = (y - weight[..., None] * x).abs().amax(-1) / y.abs().max()
    residual = torch.where(weight > 0, residual, torch.inf)
    row, position = expected
    if position < 0 or residual[row, position] >= MAX_RESIDUAL:
        row, position = divmod(int(residual.argmin()), nlls.shape[1])
    if residual[row, position] >= MAX_RESIDUAL:
        return None
    return row, position, float(weight[row, position])


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
    full_loss = _scalar_loss(logits_and_loss(adapter, inputs.but(labels=labels, extra=extra), path)[1])
    row_slices = [slice(n, n + 1) for n in range(2)]
    parts = [
        inputs.select_rows(row_slice).but(labels=labels[row_slice], extra=extra) for row_slice in row_slices
    ]
    row_losses = [_scalar_loss(logits_and_loss(adapter, part, path)[1]) for part in parts]
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


def logits_and_loss(adapter: ModelAdapter, inputs: Inputs, path: CodePath) -> tuple[Tensor, Any]:
    """The logits, and the loss as the model gives it: one number, one for each label, or None."""
    with torch.no_grad():
        return _find_logits_and_loss(adapter, adapter.run_raw(inputs, path), inputs)


def _loss_line(session: AuditSession, path: CodePath, label_argument: LabelArgument) -> str:
    """The line of code that computes the loss, where it is known."""
    inputs = session.adapter.make_inputs(2, seed=180)
    given = label_argument.with_labels(inputs, inputs.tokens)
    return loss_line(lambda: session.adapter.run_raw(given, path))


def loss_scripts(session: AuditSession, path: CodePath) -> LossScripts:
    return LossScripts(session, path, lambda out, inputs: _find_logits_and_loss(session.adapter, out, inputs))


def _find_logits_and_loss(adapter: ModelAdapter, out: Any, inputs: Inputs) -> tuple[Tensor, Any]:
    """The same, in what a call has returned."""
    batch_size, length = inputs.tokens.shape[:2]
    logits = adapter.select_output(out, batch_size, length)
    floats = [tensor for _, tensor in outputs.float_tensors(out)]
    if logits.dim() < 3:  # with labels, a loss for each label may take the place of the logits
        logits = next(
            (tensor for tensor in floats if tensor.dim() == 3 and tensor.shape[:2] == (batch_size, length)),
            logits,
        )
    loss_value = outputs.find(out, ("loss", "lm_loss"))
    if loss_value is None:
        loss_value = next((tensor for tensor in floats if tensor.dim() == 0 or tensor.shape == (1,)), None)
    if loss_value is None:
        label_shapes = [(batch_size, n) for n in (length, length - 1)] + [
            (batch_size * n,) for n in (length, length - 1)
        ]
        loss_value = next((tensor for tensor in floats if tuple(tensor.shape) in label_shapes), None)
    return logits, loss_value


def _scalar_loss(loss_value: Any) -> Tensor:
    """The loss as one number: the sum, where there is one for each label."""
    if not isinstance(loss_value, Tensor):
        raise CallError("the loss is not a number")
    return loss_value.double().cpu().sum()
