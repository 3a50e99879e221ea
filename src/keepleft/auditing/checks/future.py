"""Does a position move when only what it may not see has changed?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keepleft.auditing import outputs, rounding
from keepleft.auditing.checks import told
from keepleft.auditing.checks.cuts import Variant, changed, cuts, singles, variants
from keepleft.auditing.checks.gradients import gradients
from keepleft.auditing.checks.lengthened import lengthened
from keepleft.auditing.checks.strained import poisoned, strained
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.subject import Call
from keepleft.auditing.ways import Way

ROWS = 16            # so many changes are tried at once
TOKENS = 4096        # in at most so many tokens
PLAIN = "for plain words"


def future(inquiry: Inquiry, ways: Sequence[Way]) -> None:
    """All probes, on the plain path first."""
    subject = inquiry.subject
    if inquiry.silent:
        return
    kinds = [name for name, _ in subject.words.kinds(subject.call(1).tokens)]
    plain, *others = ways
    if "substitution" in inquiry.probes:
        _path(inquiry, plain, subject.length, 1, inquiry.budget.seeds, kinds)
    for n, way in enumerate([plain, *others]):
        if inquiry.late:
            break
        if "substitution" in inquiry.probes:
            _path(inquiry, way, subject.length, way.batch, 1 if n else inquiry.budget.seeds, ())
    if "gradient" in inquiry.probes:
        for way in [plain, plain.but(train=True)] if inquiry.budget.broad else [plain]:
            gradients(inquiry, way, subject.length)
    if "magnitude" in inquiry.probes:
        strained(inquiry, plain)
    if "poison" in inquiry.probes:
        poisoned(inquiry, plain)
    if "length" in inquiry.probes:
        lengthened(inquiry, plain)
    if "substitution" in inquiry.probes:
        _others(inquiry, plain)
    for n, length in enumerate(inquiry.timely(inquiry.lengths, "future, further lengths")):
        if "substitution" in inquiry.probes and length > 1:
            _path(inquiry, plain, length, ROWS, 1, (), sweep=True)
            if inquiry.budget.broad and n < 8:
                _path(inquiry, plain.but(train=True), length, ROWS, 1, (), sweep=True)


def _others(inquiry: Inquiry, way: Way) -> None:
    """Further outputs for each position (a value head, heads that look several words ahead) are held to the claim too."""
    subject = inquiry.subject
    with inquiry.trying("future, further outputs"):
        with subject.on(way), torch.no_grad():
            found = outputs.selectors(subject.raw(subject.call(2), way), 2, subject.length)
        main = subject.selector
        for other in found[:6]:
            if other != main and ("output", other) not in inquiry.tried:
                inquiry.tried.add(("output", other))
                try:
                    subject.selector = other
                    _path(inquiry, way.but(output=str(other)), subject.length, way.batch, 1, ())
                finally:
                    subject.selector = main


def _path(inquiry: Inquiry, way: Way, length: int, batch: int, seeds: int, kinds: Sequence[str], *,
          sweep: bool = False) -> None:
    """A complete sweep on one path."""
    subject = inquiry.subject
    what = f"future, {way.named(batch, length)}"
    key = (way, batch, length, seeds, len(kinds), inquiry.budget.broad and not sweep)
    if key in inquiry.tried or (sweep and length >= inquiry.refused):
        return
    inquiry.tried.add(key)
    if sweep and not inquiry.takes(way, length):
        return
    with inquiry.trying(what), subject.on(way):
        allowed = inquiry.allowed(length)
        tried = variants(allowed, seeds, kinds)
        if inquiry.large:  # all cuts at once on the plain path, a few on the others
            tried = variants(allowed, 1) if batch > 1 and way == Way() else cuts(inquiry, allowed)
            batch = 1 if batch == 1 else len(tried)
        if inquiry.budget.broad and not sweep:
            tried += singles(allowed)
        batch = max(1, min(batch, TOKENS // length)) if sweep else batch
        inquiry.took(way, batch, length)
        base = subject.call(batch, length, seed=length)
        out = subject.run(base, way)
        size = rounding.scale(out)
        if out.isnan().any() and way.dtype is None and not way.autocast:
            told.broken(inquiry, way, base, out, PLAIN)
        for n in range(0, len(tried), batch):
            if inquiry.late and n:
                inquiry.skip(what, "the time was up in the middle of it")
                return
            some = tried[n:n + batch]
            rows = [changed(inquiry, base.tokens[row:row + 1], one) for row, one in enumerate(some)]
            rows += [base.tokens[row:row + 1] for row in range(len(rows), batch)]
            new = base.but(tokens=torch.cat(rows))
            move = rounding.moved(out, subject.run(new, way))
            if not move.any():
                continue
            for row, one in enumerate(some):
                hidden = ~(inquiry.allowed(length, row) & one.changed).any(1) if not inquiry.claim.uniform else \
                    ~(allowed & one.changed).any(1)
                hits = (move[row].cpu() > 0) & hidden
                if hits.any() and judged(inquiry, way, base, new, row, hits, move[row].cpu(), size, one):
                    return


def judged(inquiry: Inquiry, way: Way, base: Call, new: Call, row: int, hits: Tensor, move: Tensor, size: float,
           variant: Variant) -> bool:
    """A change where there must be none: is it more than rounding, is it this row's own doing, and which source does it?"""
    subject = inquiry.subject
    reader = int(torch.where(hits, move, -1.0).argmax())
    relative = float(move[reader]) / size
    if relative == float("inf"):  # it breaks: that is a matter of its own
        if way.dtype is None and not way.autocast:
            told.broken(inquiry, way, new, subject.run(new, way), PLAIN)
        return False
    own = base.but(tokens=base.tokens.clone())
    own.tokens[row] = new.tokens[row]
    if len(base.tokens) > 1:  # do other rows do it?
        alone = rounding.moved(subject.run(base, way), subject.run(own, way))[row].cpu()
        if not (alone[hits] > 0).any():
            return False  # the batch check sees to it
        reader = int(torch.where(hits & (alone > 0), alone, -1.0).argmax())
        relative = float(alone[reader]) / size
    if not rounding.real(inquiry, way, base, own, row, reader, relative, _shakes(inquiry, base, own, reader, variant)):
        return False
    source, pair, largest = _source(inquiry, way, base, own, row, reader, variant)
    told.ahead(inquiry, way, base, pair, row, reader, source, max(relative, largest / size), "substitution")
    return True


def _source(inquiry: Inquiry, way: Way, base: Call, own: Call, row: int, reader: int,
            variant: Variant) -> tuple[int, Call, float]:
    """The one position that moves the reader most, where one alone does."""
    subject = inquiry.subject
    out = subject.run(base, way)
    best, pair, largest = int(variant.changed.nonzero()[0]), own, 0.0
    for k in variant.changed.nonzero().flatten().tolist()[:64]:
        one = base.but(tokens=base.tokens.clone())
        one.tokens[row, k] = own.tokens[row, k]
        size = float(rounding.moved(out, subject.run(one, way))[row, reader])
        if size > largest:
            best, pair, largest = k, one, size
    return best, pair, largest


def _shakes(inquiry: Inquiry, base: Call, own: Call, reader: int, variant: Variant) -> list[tuple[Call, Call]]:
    """The same change with something else beside it: a longer text, other words where nothing was changed."""
    words, batch, length = inquiry.subject.words, *base.tokens.shape[:2]
    out = []
    for more in (1, 3):
        tail = words.draw(batch, more, 900 + more)
        out.append(tuple(call.but(tokens=torch.cat([call.tokens, tail], 1)) for call in (base, own)))
    for at in (0, length - 1):
        if at != reader and not variant.changed[at]:
            other = words.others(base.tokens, 77)[:, at]
            pair = []
            for call in (base, own):
                tokens = call.tokens.clone()
                tokens[:, at] = other
                pair.append(call.but(tokens=tokens))
            out.append(tuple(pair))
    return out  # type: ignore[return-value]
