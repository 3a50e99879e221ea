"""Is each label in the loss judged by the logits that predict it, once, and by no others?"""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.auditing.checks.findings import remedy
from keepleft.auditing.checks.label_argument import (
    LabelArgument,
    ignore_value,
    line_of_loss,
    logits_and_loss,
    loss_scripts,
)
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import CallError
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession
from keepleft.nn.loss import IGNORE_INDEX

MAX_RESIDUAL = 0.01  # of the loss's change that logits leave unexplained


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
            if unpredictable and (not losses.isfinite().all() or is_constant(losses)):
                return 1.0
            if not losses.isfinite().all():
                # it may be the only label, and ignored: the mean of nothing is NaN
                base_labels = self.inputs.tokens
                losses = self.losses_at(base_labels, row, position)
            if losses.isfinite().all() and is_constant(losses):
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
                        line_of_loss(session, self.path, self.label_argument),
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
                    misalignment_message(row, position, logits_row, logits_position, shift)
                    + f"; {remedy('labels', '')}.",
                    "labels",
                    line_of_loss(session, self.path, self.label_argument),
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


def labels_aligned(
    session: AuditSession, path: CodePath, label_argument: LabelArgument, batch_size: int
) -> bool:
    """One label at a time, with several values, and then all of them. Returns False at the first finding."""
    probe = LabelLossProbe(session, path, label_argument, batch_size, None)
    length = probe.length
    ignored = ignore_value(label_argument, probe.inputs, path)
    base_labels = torch.full((batch_size, length), ignored)
    if ignored not in (IGNORE_INDEX, -1):
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
            ignored == IGNORE_INDEX
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
                    line_of_loss(session, path, label_argument),
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


def misalignment_message(row: int, position: int, logits_row: int, logits_position: int, shift: int) -> str:
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


def is_constant(losses: Tensor) -> bool:
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
