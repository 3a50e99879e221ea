"""The loss of a model is held to padding too: a text must cost what it costs alone."""

from __future__ import annotations

import torch

from keepleft.auditing import rounding
from keepleft.auditing.checks.label_argument import find_label_argument, line_of_loss, loss_scripts
from keepleft.auditing.checks.padding import (
    PADDING_AMOUNTS,
    make_keep_mask,
    pad_inputs,
    padding_sides,
    positions_skip_padding,
    unpad,
)
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.probe_inputs import TokenSampler
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession
from keepleft.nn.loss import IGNORE_INDEX

MIN_TOLERANCE = 1e-6  # of the loss


def check_padded_loss(session: AuditSession, path: CodePath) -> None:
    """The loss of one text, padded and alone, where labels at padding are ignored."""
    adapter = session.adapter
    padding_argument = adapter.padding_argument
    if (
        padding_argument is None
        or not isinstance(adapter.sampler, TokenSampler)
        or adapter.sampler.token_shape  # several tokens at each position
        or adapter.feeds_labels
        or adapter.is_called_by_position
        or session.has_finding("padding", "future")
    ):
        return
    label_argument = find_label_argument(session, path)
    if label_argument is None:
        return
    path = session.in_float64(path)
    amount = PADDING_AMOUNTS[0]
    inputs = adapter.make_inputs(1, seed=66)
    length = inputs.tokens.shape[1]
    skips_padding = positions_skip_padding(session, False)
    for side in padding_sides(padding_argument, False, skips_padding):
        if side == "left" and not skips_padding:
            continue  # positions count padding on the left, by convention
        label = f"padding, the loss, {path.label(1)}, on the {side}"
        with session.skip_on_error(label), adapter.on_path(path):
            keep_mask = make_keep_mask(torch.tensor([length - amount]), length, side)
            # nothing predicts the first label of a text, or padding does
            is_first = keep_mask & (keep_mask.long().cumsum(1) == 1)
            labels = torch.where(keep_mask & ~is_first, inputs.tokens, IGNORE_INDEX)
            padded = pad_inputs(adapter, inputs, keep_mask, side, False)
            alone = unpad(adapter, inputs, 0, keep_mask, side, False)
            padded_loss = label_argument.loss(padded, labels, path)
            loss = label_argument.loss(alone, labels[:, keep_mask[0]], path)
            path_label = session.record_path(path, 1, length) + f", {amount} of padding on the {side}"
            size = abs(padded_loss - loss) / max(abs(loss), 1e-12)
            if not size > max(rounding.tolerance(session, path), MIN_TOLERANCE):
                continue
            session.add_finding(
                Finding(
                    "padding",
                    None,
                    int((~keep_mask[0]).nonzero()[0]),
                    size,
                    path_label,
                    "",
                    f"padding on the {side} changes the loss of a text by {size:.2g} of itself, though its "
                    f"labels are {IGNORE_INDEX}; divide by the number of labels that are judged.",
                    "comparison",
                    line_of_loss(session, path, label_argument),
                    loss_scripts(session, path).difference(
                        label_argument.with_labels(padded, labels),
                        label_argument.with_labels(alone, labels[:, keep_mask[0]]),
                    ),
                ),
                "loss",
            )
            return
