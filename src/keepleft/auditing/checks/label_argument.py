"""The argument that takes labels, and the loss that comes out when they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import outputs
from keepleft.auditing.checks.label_scripts import LossScripts
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.localize import loss_line
from keepleft.auditing.model_adapter import CallError, ModelAdapter
from keepleft.auditing.session import AuditSession
from keepleft.nn.loss import IGNORE_INDEX

LOSS_NAMES = ("loss", "lm_loss")


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
        return float(scalar_loss(logits_and_loss(self.adapter, self.with_labels(inputs, labels), path)[1]))


def find_label_argument(session: AuditSession, path: CodePath) -> LabelArgument | None:
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


def ignore_value(label_argument: LabelArgument, inputs: Inputs, path: CodePath) -> int:
    """The label that is ignored, -100 or -1; some token where neither is."""
    for value in (IGNORE_INDEX, -1):
        labels = torch.full_like(inputs.tokens, value)
        labels[:, 2:] = inputs.tokens[:, 2:]
        try:
            if scalar_loss(
                logits_and_loss(label_argument.adapter, label_argument.with_labels(inputs, labels), path)[1]
            ).isfinite():
                return value
        except CallError:
            continue
    return int(inputs.tokens[0, 0])


def logits_and_loss(adapter: ModelAdapter, inputs: Inputs, path: CodePath) -> tuple[Tensor, Any]:
    """The logits, and the loss as the model gives it: one number, one for each label, or None."""
    with torch.no_grad():
        out = adapter.run_raw(inputs, path)
    return _find_logits_and_loss(adapter, path, out, inputs)


def _find_logits_and_loss(
    adapter: ModelAdapter, path: CodePath, out: Any, inputs: Inputs
) -> tuple[Tensor, Any]:
    """Where no logits come out beside a loss, those of the same call without labels."""
    """The same, in what a call has returned."""
    batch_size, length = inputs.tokens.shape[:2]
    try:
        logits = adapter.select_output(out, batch_size, length)
    except CallError:
        loss_value = outputs.find(out, LOSS_NAMES)
        if loss_value is None:
            raise
        return adapter.run(inputs.but(labels=None, extra={}), path), loss_value
    floats = [tensor for _, tensor in outputs.float_tensors(out)]
    if logits.dim() < 3:  # with labels, a loss for each label may take the place of the logits
        logits = next(
            (tensor for tensor in floats if tensor.dim() == 3 and tensor.shape[:2] == (batch_size, length)),
            logits,
        )
    loss_value = outputs.find(out, LOSS_NAMES)
    if loss_value is None:
        loss_value = next((tensor for tensor in floats if tensor.dim() == 0 or tensor.shape == (1,)), None)
    if loss_value is None:
        label_shapes = [(batch_size, n) for n in (length, length - 1)] + [
            (batch_size * n,) for n in (length, length - 1)
        ]
        loss_value = next((tensor for tensor in floats if tuple(tensor.shape) in label_shapes), None)
    return logits, loss_value


def scalar_loss(loss_value: Any) -> Tensor:
    """The loss as one number: the sum, where there is one for each label."""
    if not isinstance(loss_value, Tensor):
        raise CallError("the loss is not a number")
    return loss_value.double().cpu().sum()


def loss_scripts(session: AuditSession, path: CodePath) -> LossScripts:
    return LossScripts(
        session, path, lambda out, inputs: _find_logits_and_loss(session.adapter, path, out, inputs)
    )


def line_of_loss(session: AuditSession, path: CodePath, label_argument: LabelArgument) -> str:
    """The line of code that computes the loss, where it is known."""
    inputs = session.adapter.make_inputs(2, seed=180)
    given = label_argument.with_labels(inputs, inputs.tokens)
    return loss_line(lambda: session.adapter.run_raw(given, path))
