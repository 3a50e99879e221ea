"""The loss, not the model: which scores does a label judge?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import outputs, sentences
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.report import Finding
from keepleft.auditing.subject import Call, CallError, Subject
from keepleft.auditing.ways import Way
from keepleft.auditing.words import Ids

IGNORED = -100


def labels(inquiry: Inquiry, ways: Sequence[Way]) -> None:
    subject = inquiry.subject
    name = subject.sig.role("labels") or subject.sig.role("targets")
    if name is None or not isinstance(subject.words, Ids):
        inquiry.skip("labels", "the model takes no labels")
        return
    shifted = name == "labels" and subject.looked is None and not inquiry.silent
    for way in inquiry.timely(ways[:2], "labels, further paths"):
        with inquiry.trying(f"labels, {way.named(2)}"), subject.on(way):
            counts = (False, True) if subject.sig.role("count") is not None else (False,)
            if all(_aligned(inquiry, way, shifted, counted) for counted in counts):
                _shared(inquiry, way)


def _aligned(inquiry: Inquiry, way: Way, shifted: bool, counted: bool = False) -> bool:
    """One label at a time: several values for it, and the scores that explain the losses."""
    subject = inquiry.subject
    call = subject.call(2, seed=180)
    rows, length = call.tokens.shape[:2]
    count = subject.sig.role("count")
    extra = {} if count is None or not counted else {count: torch.tensor(1)}
    scores, first = loss(subject, call.but(labels=call.tokens, extra=extra), way)
    if first is None:
        raise CallError("no loss comes out when labels are given")
    rest = _rest(subject, call, way)
    path = inquiry.took(way, rows, length)
    chance = torch.log_softmax(scores.double(), -1).cpu()
    values = subject.words.draw(1, 6, 181)[0]
    values = values[values < chance.shape[-1]]
    if len(values.unique()) < 4:
        raise CallError("there are too few words to tell labels apart")
    expected = 1 if shifted else 0
    for row, at in ((1, length // 2), (0, length - 1), (1, 1), (1, 0), (0, 2)):
        found = []
        for value in values.tolist():
            given = torch.full((rows, length), rest)
            given[row, at] = value
            found.append(float(_value(loss(subject, call.but(labels=given, extra=extra), way)[1])))
        losses = torch.tensor(found, dtype=torch.float64)
        match = _explained(losses, -chance[:, :, values])
        if match is None:
            if at - expected < 0 and (not losses.isfinite().all() or float(losses.max() - losses.min()) < 1e-9):
                continue  # there is nothing before it that could foresee it
            if not losses.isfinite().all():
                raise CallError(f"the loss of the one label at position {at} is not a number")
            if float(losses.max() - losses.min()) < 1e-9:
                inquiry.add(Finding("labels", None, at, 1.0, path, "", f"the label at position {at} is judged by nothing: the "
                                    f"loss is the same whatever it is; {sentences.remedy('labels', '')}.", "labels"), "unjudged")
                return False
            raise CallError(f"no scores explain the loss of the label at position {at} (another loss than cross-entropy?)")
        seen, place, share = match
        if seen != row or place != at - expected:
            inquiry.add(Finding("labels", place, at, 1.0, path, "", _told(row, at, seen, place, expected)
                                + f"; {sentences.remedy('labels', '')}.", "labels"))
            return False
        if rest == IGNORED and abs(share - 1) > 0.02 and any(abs(share * n - 1) < 0.02 for n in
                                         (rows * length, rows * (length - 1), length, length - 1)):
            inquiry.add(Finding("labels", place, at, abs(share - 1), path, "", f"labels of {IGNORED} are counted: one real "
                                f"label weighs {share:.3g} instead of 1, so padding thins the loss; divide by the number of labels "
                                "that are judged.", "labels"), "ignored")
            return False
    return True


def _rest(subject: Subject, call: Call, way: Way) -> int:
    """What stands for no label: -100, or -1, or else any word."""
    for value in (IGNORED, -1):
        given = torch.full(call.tokens.shape[:2], value)
        given[:, 2:] = call.tokens[:, 2:]
        try:
            if _value(loss(subject, call.but(labels=given), way)[1]).isfinite():
                return value
        except CallError:
            continue
    return int(call.tokens[0, 0])


def _told(row: int, at: int, seen: int, place: int, expected: int) -> str:
    if seen != row:
        return (f"the label at position {at} of row {row} is judged by the scores at position {place} of row {seen}: the shift "
                "crosses rows")
    if place == at and expected:
        return (f"the label at position {at} is judged by the scores at that very position, which have seen it: labels are not "
                "shifted")
    if place < at - expected:
        return f"the label at position {at} is judged by the scores at position {place}: labels are shifted twice"
    return f"the label at position {at} is judged by the scores at position {place}, not {at - expected}"


def _explained(losses: Tensor, surprises: Tensor) -> tuple[int, int, float] | None:
    """(row, position, weight) of the surprises (B, T, n) that the losses follow, up to a constant."""
    if not losses.isfinite().all():
        return None
    y = losses - losses.mean()
    if float(y.abs().max()) < 1e-9:
        return None
    x = surprises - surprises.mean(-1, keepdim=True)
    share = (x * y).sum(-1) / (x * x).sum(-1).clamp(min=1e-30)
    left = (y - share[..., None] * x).abs().amax(-1) / y.abs().max()
    best = int(torch.where(share > 0, left, torch.inf).argmin())
    row, at = divmod(best, surprises.shape[1])
    return (row, at, float(share[row, at])) if float(left[row, at]) < 0.01 else None


def _shared(inquiry: Inquiry, way: Way) -> None:
    """Small batches one after the other, each told how many labels there are in all, must add up to the large one."""
    subject = inquiry.subject
    count = subject.sig.role("count")
    if count is None:
        return
    call = subject.call(2, seed=190)
    given = call.tokens.clone()
    given[0, 4:] = IGNORED
    names = {count: torch.tensor(int((given[:, 1:] != IGNORED).sum()))}
    whole = _value(loss(subject, call.but(labels=given, extra=names), way)[1])
    parts = [_value(loss(subject, call.but(tokens=call.tokens[n:n + 1], labels=given[n:n + 1], extra=names,
                                           source=None if call.source is None else call.source[n:n + 1]), way)[1])
             for n in range(2)]
    off = abs(float(whole) - float(sum(parts))) / max(abs(float(whole)), 1e-12)
    if off > 1e-3:
        inquiry.add(Finding("labels", None, None, off, inquiry.took(way, 2), "",
                            f"accumulation is not the full batch: two small batches add up to {float(sum(parts)):.4g}, the large "
                            f"one gives {float(whole):.4g}; divide the summed loss by {count}, and by nothing else.", "labels"),
                    "accumulation")


def loss(subject: Subject, call: Call, way: Way) -> tuple[Tensor, Any]:
    """Scores and loss."""
    with torch.no_grad():
        out = subject.raw(call, way)
    found = outputs.find(out, ("loss", "lm_loss"))
    if found is None:
        found = next((tensor for _, tensor in outputs.parts(out) if tensor.dim() == 0 or tensor.shape == (1,)), None)
    return subject.chosen(out, *call.tokens.shape[:2]), found


def _value(found: Any) -> Tensor:
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise CallError("the loss is not one number")
    return found.double().cpu().reshape(())
