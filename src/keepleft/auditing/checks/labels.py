"""The loss, not the model: which scores does a label judge?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import outputs, rounding, sentences
from keepleft.auditing.checks.pairs import Pair, agree
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.report import Finding
from keepleft.auditing.subject import Call, CallError, Subject
from keepleft.auditing.ways import Way
from keepleft.auditing.words import Ids

IGNORED = -100
FARTHEST = 300                   # no longer text is tried


@dataclass(frozen=True)
class Asked:
    """How labels are given, and where they are judged."""

    subject: Subject
    name: str
    expected: int                # a label at t is judged by the scores at t - expected
    among: bool                  # is it one of the audit's own roles?
    counted: str | None = None   # the argument that says how many labels there are, where it is given

    def call(self, call: Call, labels: Tensor) -> Call:
        extra = {} if self.counted is None else {self.counted: torch.tensor(1)}
        return call.but(labels=labels, extra=extra) if self.among else call.but(extra={**extra, self.name: labels})

    def loss(self, call: Call, labels: Tensor, way: Way) -> float:
        return float(_value(loss(self.subject, self.call(call, labels), way)[1]))


def labels(inquiry: Inquiry, ways: Sequence[Way]) -> None:
    subject = inquiry.subject
    asked = _asked(inquiry, ways[0]) if isinstance(subject.words, Ids) else None
    if asked is None:
        inquiry.skip("labels", "the model takes no labels")
        return
    for way in inquiry.timely(ways[:2], "labels, further paths"):
        with inquiry.trying(f"labels, {way.named(2)}"), subject.on(way):
            done = inquiry.done
            if not _unread(inquiry, way, asked) or not _fed(inquiry, way, asked):
                continue
            inquiry.done = done  # labels are checked once a loss was explained
            count = subject.sig.role("count")
            counts = (None, count) if count is not None else (None,)
            told = [Asked(subject, asked.name, asked.expected, asked.among, counted) for counted in counts]
            tries = [(told[0], 2)] if inquiry.brief else [(how, rows) for how in told for rows in (2, 1)]
            if all(_aligned(inquiry, way, how, rows) for how, rows in tries):
                _shared(inquiry, way)
                if not inquiry.brief:
                    _longer(inquiry, way, asked)


def _asked(inquiry: Inquiry, way: Way) -> Asked | None:
    """The argument that takes labels: by its name; or a second sequence that moves no scores, while a loss comes out."""
    subject = inquiry.subject
    inside = 1 if subject.looked is None and not inquiry.silent else 0
    for role in ("labels", "targets"):
        name = subject.sig.role(role)
        if name is not None:
            return Asked(subject, name, inside if role == "labels" else 0, True)
    second = [name for name in subject.sig.roles("target") if name not in (subject.main, subject.looked)]
    for name in second:
        asked = Asked(subject, name, 0, False)
        call = subject.call(2, seed=180)
        try:
            with subject.on(way):
                scores, found = loss(subject, asked.call(call, call.tokens), way)
                other, _ = loss(subject, asked.call(call, subject.words.others(call.tokens, 182)), way)
        except CallError:
            continue
        if found is not None and torch.equal(scores, other):
            return asked
    return None


def _unread(inquiry: Inquiry, way: Way, asked: Asked) -> bool:
    """The scores must not move when labels do."""
    subject = inquiry.subject
    call = subject.call(2, seed=180)
    base = asked.call(call, call.tokens)
    places = torch.ones(call.tokens.shape[:2]).nonzero()
    new = subject.words.others(call.tokens, 182)

    def told(row: int, reader: int, module: str, size: str) -> str:
        return f"the scores at position {reader} move {size} when labels change, through {module}: the model reads its answers"

    return agree(inquiry, way, Pair("labels", base, asked.call(call, new), places, places, True, told, None, "read"))


def _fed(inquiry: Inquiry, way: Way, asked: Asked) -> bool:
    """Where the decoder's input is made from labels, it is shifted: the scores at t have not read the label at t."""
    subject = inquiry.subject
    if subject.looked is None or not asked.among or subject.main in subject.sig.required or inquiry.silent \
            or inquiry.found("future"):
        return True
    call = subject.call(2, seed=183)
    rows, length = call.tokens.shape[:2]
    new = subject.words.others(call.tokens, 184)

    def scores(labels: Tensor) -> Tensor:
        given = subject.arguments(call.but(labels=labels), way)
        del given[subject.main]
        with torch.no_grad():
            return subject.chosen(subject.invoke(subject.entry, given), rows, length).detach()

    try:
        first = scores(call.tokens)
    except CallError:
        return True  # it does not make its input itself
    size = rounding.scale(first)
    for at in sorted({0, 1, length // 2, length - 1}):
        changed = call.tokens.clone()
        changed[:, at:] = new[:, at:]
        move = rounding.moved(first, scores(changed))[:, :at + 1].amax(0).cpu() / size
        path = inquiry.took(way, rows, length)
        if float(move.max()) > rounding.SURE * torch.finfo(first.dtype).eps:
            reader = int(move.argmax())
            inquiry.add(Finding("labels", reader, at, float(move.max()), f"{path}, {asked.name} without {subject.main}", "",
                                f"the decoder reads its answers: without {subject.main}, the scores at position {reader} move "
                                f"{sentences.size(float(move.max()))} when labels from position {at} on change; shift labels "
                                "to the right, behind a start token, before they become the decoder's input.", "labels"), "fed")
            return False
    return True


class Scores:
    """A call, what its scores make of each word, and what loss comes of labels."""

    def __init__(self, inquiry: Inquiry, way: Way, asked: Asked, rows: int, length: int | None) -> None:
        self.inquiry, self.way, self.asked, subject = inquiry, way, asked, inquiry.subject
        self.call = subject.call(rows, length, seed=180)
        self.rows, self.length = self.call.tokens.shape[:2]
        scores, first = loss(subject, asked.call(self.call, self.call.tokens), way)
        if first is None:
            raise CallError("no loss comes out when labels are given")
        self.chance = torch.log_softmax(scores.double(), -1).cpu()
        values = subject.words.draw(1, 6, 181)[0]
        self.values = values[values < self.chance.shape[-1]]
        if len(self.values.unique()) < 4:
            raise CallError("there are too few words to tell labels apart")
        self.path = way.named(self.rows, self.length)

    def compared(self) -> None:
        self.inquiry.took(self.way, self.rows, self.length)

    def losses(self, base: Tensor, row: int, at: int) -> Tensor:
        """(n,) of several values for one label."""
        found = []
        for value in self.values.tolist():
            given = base.clone()
            given[row, at] = value
            found.append(self.asked.loss(self.call, given, self.way))
        return torch.tensor(found, dtype=torch.float64)

    def judged(self, base: Tensor, row: int, at: int) -> float | None:
        """Is this label judged where it should be? Its weight; None: it is not, and that was told."""
        inquiry, expected = self.inquiry, self.asked.expected
        losses = self.losses(base, row, at)
        match = _explained(losses, -self.chance[:, :, self.values])
        if match is None:
            early = at - expected < 0  # there is nothing before it that could foresee it
            if early and (not losses.isfinite().all() or _still(losses)):
                return 1.0
            if not losses.isfinite().all():
                losses = self.losses(self.call.tokens, row, at)  # it may be the only one, and left out: a mean over nothing
            if losses.isfinite().all() and _still(losses):
                self.compared()
                inquiry.add(Finding("labels", None, at, 1.0, self.path, "", f"the label at position {at} is judged by nothing: "
                                    f"the loss is the same whatever it is; {sentences.remedy('labels', '')}.", "labels"),
                            "unjudged")
                return None
            if not losses.isfinite().all():
                raise CallError(f"the loss of the one label at position {at} is not a number")
            raise CallError(f"no scores explain the loss of the label at position {at} (another loss than cross-entropy?)")
        self.compared()
        seen, place, share = match
        if seen != row or place != at - expected:
            inquiry.add(Finding("labels", place, at, 1.0, self.path, "", _told(row, at, seen, place, expected)
                                + f"; {sentences.remedy('labels', '')}.", "labels"))
            return None
        return share

    def whole(self) -> bool:
        """All labels at once: the loss follows the sum of all surprises. Where it does not, each label is looked at."""
        words, expected = self.inquiry.subject.words, self.asked.expected
        drawn = [words.draw(self.rows, self.length, 185 + n).clamp(max=self.chance.shape[-1] - 1) for n in range(6)]
        losses = torch.tensor([self.asked.loss(self.call, each, self.way) for each in drawn], dtype=torch.float64)
        surprises = torch.stack([self._surprise(each)[:, expected:].sum() for each in drawn])
        if _explained(losses, surprises[None, None]) is not None:
            self.compared()
            return True
        return all(self.judged(drawn[0], row, at) is not None for row, at in self._odd(drawn[0], drawn[1])[:3])

    def _surprise(self, given: Tensor) -> Tensor:
        """(B, T) of each label; zero where nothing foresees it."""
        expected = self.asked.expected
        out = torch.zeros(given.shape, dtype=torch.float64)
        out[:, expected:] = -self.chance[:, :self.length - expected].gather(-1, given[:, expected:, None])[..., 0]
        return out

    def _odd(self, base: Tensor, other: Tensor) -> list[tuple[int, int]]:
        """Labels whose change moves the loss by more or less than it should, compared with most others."""
        first, before = self.asked.loss(self.call, base, self.way), self._surprise(base)
        after, places, shares = self._surprise(other), [], []
        for at in range(self.asked.expected, self.length):
            row = at % self.rows
            given = base.clone()
            given[row, at] = other[row, at]
            step = float(after[row, at] - before[row, at])
            if abs(step) > 1e-3:
                places.append((row, at))
                shares.append((self.asked.loss(self.call, given, self.way) - first) / step)
        if not shares:
            return []
        most = torch.tensor(shares, dtype=torch.float64)
        usual = most.median()
        return [places[n] for n in ((most - usual).abs() > 0.05 * usual.abs()).nonzero().flatten().tolist()]


def _aligned(inquiry: Inquiry, way: Way, asked: Asked, rows: int) -> bool:
    """One label at a time: several values for it, and the scores that explain the losses; then all of them."""
    scores = Scores(inquiry, way, asked, rows, None)
    length = scores.length
    rest = _rest(asked, scores.call, way)
    base = torch.full((rows, length), rest)
    if rest not in (IGNORED, -1):
        base = scores.call.tokens
    places = ((1, length // 2), (0, length - 1), (1, 1), (1, 0), (0, 2)) if rows > 1 else ((0, length // 2), (0, length - 1))
    for row, at in places:
        share = scores.judged(base, row, min(at, length - 1))
        if share is None:
            return False
        if rest == IGNORED and abs(share - 1) > 0.02 and any(abs(share * n - 1) < 0.02 for n in
                                                             (rows * length, rows * (length - 1), length, length - 1)):
            inquiry.add(Finding("labels", at - asked.expected, at, abs(share - 1), scores.path, "", f"labels of {IGNORED} are "
                                f"counted: one real label weighs {share:.3g} instead of 1, so padding thins the loss; divide "
                                "by the number of labels that are judged.", "labels"), "ignored")
            return False
    return asked.counted is not None or scores.whole()


def _longer(inquiry: Inquiry, way: Way, asked: Asked) -> None:
    """Losses in chunks go wrong where a chunk ends: one text that is longer than most chunks, or as long as it can be."""
    known = sorted(n for n in inquiry.lengths if inquiry.subject.length < n < inquiry.refused)
    longest = min(inquiry.budget.longest, FARTHEST) + 1
    for length in ([longest] if longest < inquiry.refused else []) + known[:-4:-1]:
        try:
            Scores(inquiry, way, asked, 2, length).whole()
        except CallError:
            continue  # another length may do
        return


def _rest(asked: Asked, call: Call, way: Way) -> int:
    """What stands for no label: -100, or -1, or else any word."""
    for value in (IGNORED, -1):
        given = torch.full(call.tokens.shape[:2], value)
        given[:, 2:] = call.tokens[:, 2:]
        try:
            if _value(loss(asked.subject, asked.call(call, given), way)[1]).isfinite():
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


def _still(losses: Tensor) -> bool:
    return float(losses.max() - losses.min()) < 1e-9


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
    each = [slice(n, n + 1) for n in range(2)]
    parts = [_value(loss(subject, call.rows(one).but(labels=given[one], extra=names), way)[1]) for one in each]
    off = abs(float(whole) - float(sum(parts))) / max(abs(float(whole)), 1e-12)
    if off > 1e-3:
        inquiry.add(Finding("labels", None, None, off, inquiry.took(way, 2), "",
                            f"accumulation is not the full batch: two small batches add up to {float(sum(parts)):.4g}, the "
                            f"large one gives {float(whole):.4g}; divide the summed loss by {count}, and by nothing else.",
                            "labels"), "accumulation")


def loss(subject: Subject, call: Call, way: Way) -> tuple[Tensor, Any]:
    """Scores and loss: one number, or one for each label."""
    with torch.no_grad():
        out = subject.raw(call, way)
    rows, length = call.tokens.shape[:2]
    scores = subject.chosen(out, rows, length)
    floats = [tensor for _, tensor in outputs.parts(out)]
    if scores.dim() < 3:  # a loss for each label may stand where scores stand without labels
        scores = next((tensor for tensor in floats if tensor.dim() == 3 and tensor.shape[:2] == (rows, length)), scores)
    found = outputs.find(out, ("loss", "lm_loss"))
    if found is None:
        found = next((tensor for tensor in floats if tensor.dim() == 0 or tensor.shape == (1,)), None)
    if found is None:
        each = [(rows, n) for n in (length, length - 1)] + [(rows * n,) for n in (length, length - 1)]
        found = next((tensor for tensor in floats if tuple(tensor.shape) in each), None)
    return scores, found


def _value(found: Any) -> Tensor:
    """One number; of a loss for each label, their sum."""
    if not isinstance(found, Tensor):
        raise CallError("the loss is not a number")
    return found.double().cpu().sum()
