"""A text and its beginning: what comes behind a position may not even count."""

from __future__ import annotations

import torch

from keepleft.auditing import rounding
from keepleft.auditing.checks import told
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.report import Finding
from keepleft.auditing.subject import Call
from keepleft.auditing.ways import Way


def lengthened(inquiry: Inquiry, way: Way) -> None:
    """A text and its beginning: what comes behind a position may not even count."""
    subject = inquiry.subject
    lengths = [(subject.length, more) for more in (1, 2, subject.length)] + [(3, 1), (5, 4)]
    lengths += [(n, 1) for n in inquiry.lengths[:8 if inquiry.budget.broad else 3] if n > 2]
    lengths += [(n, n) for n in inquiry.lengths[:6 if inquiry.budget.broad else 2] if 2 < n <= inquiry.budget.longest // 2]
    for kind in ([torch.float64, None] if inquiry.double else [None]):
        there = way.but(dtype=kind)
        limit = rounding.tolerance(inquiry, there)
        for short, more in inquiry.timely(lengths, "future by length"):
            if short + more >= inquiry.refused or not inquiry.takes(there, short + more):
                continue
            with inquiry.trying(f"future by length, {there.named(1, short + more)}"), subject.on(there):
                long = subject.call(1, short + more, seed=short + 40)
                brief = long.but(tokens=long.tokens[:, :short])
                if not torch.equal(inquiry.allowed(short), inquiry.allowed(short + more)[:short, :short]) or \
                        inquiry.allowed(short + more)[:short, short:].any():
                    return  # the claim itself looks at the end
                a, b = subject.run(brief, there), subject.run(long, there)[:, :short]
                inquiry.took(there, 1, short + more)
                move, size = rounding.moved(a, b)[0].cpu(), rounding.scale(a)
                if not float(move.max()) / size > limit:
                    continue
                if inquiry.found("future"):
                    return
                reader = int(move.argmax())
                one, other = (told.spot(inquiry, there, call, 0, reader) for call in (brief, long))
                found, line = told.where(inquiry, one, other, limit)
                relative = float(move[reader]) / size
                inquiry.add(Finding("future", reader, short, relative, there.named(1, short + more), found.module,
                                    f"position {reader} changes when {more} more positions follow, from {short} to "
                                    f"{short + more}: something depends on the length, through {found.module or subject.name}; "
                                    "let nothing depend on what comes later, not even its amount.", "length", line,
                                    _longer(inquiry, brief, long, reader)), "length")
                return


def _longer(inquiry: Inquiry, brief: Call, long: Call, reader: int) -> str:
    subject = inquiry.subject
    if long.tokens.is_floating_point():
        return f"a = torch.randn({tuple(long.tokens.shape)}); (model(a)[:, {reader}] - model(a[:, :{brief.tokens.shape[1]}])" \
               f"[:, {reader}]).abs().max()  # must be rounding only"
    assert subject.selector is not None
    called, cut = f"model({subject.main}={{}}){subject.selector.spelt()}[0, {reader}]", f"a[:, :{brief.tokens.shape[1]}]"
    return (f"a = torch.tensor({long.tokens.tolist()})\n({called.format('a')} - {called.format(cut)}).abs().max()"
            "  # must be rounding only")
