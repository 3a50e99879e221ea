"""A mask of finite numbers holds until a score beats it, and a rescue looks everywhere: scores and inputs made large, inputs
poisoned. All cuts at once, one in each row; what moves is looked at again in a row by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keepleft.auditing import place, rounding, sentences, strain
from keepleft.auditing.checks import told
from keepleft.auditing.checks.cuts import Variant, changed, cuts
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.report import Finding
from keepleft.auditing.subject import Call
from keepleft.auditing.ways import COARSE, Way


def strained(inquiry: Inquiry, way: Way) -> None:
    """A mask of finite numbers holds until a score beats it: so scores are made large, and so is what comes in."""
    length = inquiry.subject.length
    if inquiry.subject.dtype in COARSE:
        way = way.but(dtype=torch.float32)  # half precision rounds as soon as scores are large
    for sign in (1.0, -1.0):
        _bent(inquiry, way, length, "large scores", sign)
    _bent(inquiry, way, length, "large inputs", None)


def _bent(inquiry: Inquiry, way: Way, length: int, name: str, sign: float | None) -> None:
    """Large scores of either sign, or large inputs where there is none."""
    subject = inquiry.subject
    if inquiry.quantised or inquiry.late or inquiry.found("future"):
        return
    base = subject.call(1, length, seed=length + 2)

    def pair(some: list[Variant]) -> _Strained | None:
        """Without and with what is hidden changed, under strain."""
        if sign is None:
            return _upset(inquiry, way, base, some, None)
        rows, scores = _rows(base, len(some)), strain.Scores(length, sign)
        new = rows.but(tokens=torch.cat([changed(inquiry, base.tokens, one) for one in some]))
        with scores.on():
            a = subject.run(rows, way)
        if not scores.factors:
            inquiry.note("no attention scores were seen, so no large ones were tried")
            return None
        with scores.on():
            return _Strained(rows, new, a, subject.run(new, way), scores, None)

    with inquiry.trying(f"future under {name}"), subject.on(way):
        hit = _singled(inquiry, way, pair, 1e-6)
        if hit is None:
            return
        found, line = hit.place(inquiry, way)
        why = (f"once scores reach {strain.LARGE:g}, its mask of finite numbers no longer hides it; fill with -inf, or use a "
               "boolean mask" if sign else f"once inputs reach {strain.HUGE:g}; {sentences.remedy('future', found.sort)}")
        inquiry.add(Finding("future", hit.reader, hit.source, hit.size, f"{inquiry.took(way, 1, length)}, {name}", found.module,
                            f"position {hit.reader} reads position {hit.source}, out of its sight, through "
                            f"{found.module or subject.name} {why}.", "magnitude", line, hit.shown(inquiry, way)), "magnitude")


@dataclass(frozen=True)
class _Strained:
    """Two calls under strain, and what they gave."""

    base: Call
    new: Call
    a: Tensor
    b: Tensor
    scores: strain.Scores | None
    touch: strain.Touch | None  # what was done to the vectors of the second
    reader: int = 0             # who moves, once that is known; who moves it, and by how much
    source: int = 0
    size: float = 0.0

    def place(self, inquiry: Inquiry, way: Way) -> tuple[place.Place, str]:
        subject, calls = inquiry.subject, ((self.base, None), (self.new, self.touch))
        first, second = (told.spot(inquiry, way, call, 0, self.reader, strain.under(subject, call, way, self.scores, touch))
                         for call, touch in calls)
        return told.where(inquiry, first, second)

    def shown(self, inquiry: Inquiry, way: Way) -> str:
        return told.reproducer(inquiry, way, self.base, self.new, 0, self.reader)


def _upset(inquiry: Inquiry, way: Way, base: Call, some: list[Variant], value: float | None) -> _Strained | None:
    """What is hidden is made large, or NaN or infinite, where the words become vectors."""
    rows, touch = _rows(base, len(some)), strain.upset(torch.stack([one.changed for one in some]), value)
    new = strain.upturned(inquiry.subject, rows, way, touch)
    return None if new is None else _Strained(rows, rows, inquiry.subject.run(rows, way), new, None, touch)


def _singled(inquiry: Inquiry, way: Way, pair: Callable[[list[Variant]], _Strained | None],
             least: float) -> _Strained | None:
    """The cut that moves a reader: found among all, then seen in a row by itself, where no other row can have done it."""
    length = inquiry.subject.length
    allowed = inquiry.allowed(length)
    some = cuts(inquiry, allowed)
    got: _Strained | None = None
    for _ in ("all cuts", "the one that moves something"):
        got = pair(some)
        if got is None:
            return None
        inquiry.took(way, len(some), length)
        sound = got.a.isfinite().flatten(2).all(2) & got.b.isfinite().flatten(2).all(2)
        if got.scores is not None and not sound.all():
            return None
        move, size = torch.where(sound, rounding.moved(got.a, got.b), 0.0).cpu(), rounding.scale(got.a)
        hits = (move > 0) & torch.stack([~(allowed & one.changed).any(1) for one in some])
        if not hits.any() or float(move[hits].max()) / size < least:
            return None
        row, reader = divmod(int(torch.where(hits, move, -1.0).argmax()), length)
        some = [some[row]]
    assert got is not None
    return replace(got, reader=reader, source=int(some[0].changed.nonzero()[0]), size=float(move[0, reader]) / size)


def _rows(call: Call, rows: int) -> Call:
    """The same text in every row."""
    return call.but(tokens=call.tokens[:1].repeat(rows, *[1] * (call.tokens.dim() - 1)),
                    source=None if call.source is None else call.source[:1].repeat(rows, *[1] * (call.source.dim() - 1)))


def poisoned(inquiry: Inquiry, way: Way) -> None:
    """NaN and infinity where a reader may not look. NaN behind it proves nothing, since 0 · NaN is NaN in honest kernels
    too; another number does."""
    subject, length = inquiry.subject, inquiry.subject.length
    if inquiry.quantised or inquiry.late or inquiry.found("future"):
        return
    base = subject.call(1, length, seed=length + 3)
    with inquiry.trying("future by poison"), subject.on(way):
        for value in (float("nan"), float("inf")):
            hit = _singled(inquiry, way, lambda some, value=value: _upset(inquiry, way, base, some, value), 1e-5)  # type: ignore[misc]
            if hit is None:
                continue
            found, line = hit.place(inquiry, way)
            path = f"{inquiry.took(way, 1, length)}, {value} as input"
            inquiry.add(Finding("future", hit.reader, hit.source, hit.size, path, found.module,
                                f"position {hit.reader} gives another number when position {hit.source}, out of its sight, "
                                f"holds {value}: something looks at the whole sequence; "
                                f"{sentences.remedy('future', found.sort)}.", "poison", line, hit.shown(inquiry, way)))
            return
