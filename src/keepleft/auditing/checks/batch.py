"""Do other rows of a batch move this row?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from keepleft.auditing.checks.pairs import Pair, agree
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.subject import Call
from keepleft.auditing.ways import Way


def batch(inquiry: Inquiry, ways: Sequence[Way]) -> None:
    subject = inquiry.subject
    for way in inquiry.timely(ways, "batch, further paths"):
        with inquiry.trying(f"batch, {way.named(3)}"), subject.on(way):
            if not all(agree(inquiry, way, pair) for rows in ((2, 3, 8) if inquiry.budget.broad else (3,))
                       for pair in _pairs(inquiry, rows)):
                continue
        fine = way.but(dtype=torch.float64) if inquiry.double and way.dtype is None else way
        with inquiry.trying(f"batch, {fine.named(3)}"), subject.on(fine):
            base = subject.call(3, seed=81)
            for row in range(3):
                alone = base.but(tokens=base.tokens[row:row + 1], source=None if base.source is None else base.source[row:row + 1])
                at = torch.stack([torch.zeros(subject.length, dtype=torch.long), torch.arange(subject.length)], 1)
                also = at + torch.tensor([row, 0])

                def told(row: int, reader: int, module: str, size: str) -> str:
                    return f"row {row} is another alone than among three: position {reader} moves {size}, through {module}"

                if not agree(inquiry, fine, Pair("batch", alone, base, at, also, False, told, None, "alone")):
                    break


def _pairs(inquiry: Inquiry, rows: int) -> Iterator[Pair]:
    """One row stays, the others change: to anything, to words that are all the same, to copies of it."""
    subject = inquiry.subject
    base = subject.call(rows, seed=80)

    def told(row: int, reader: int, module: str, size: str) -> str:
        return f"other rows of the batch move row {row}: position {reader} moves {size}, through {module}"

    kinds = subject.words.kinds(base.tokens)
    for row in range(min(rows, 3)):
        stays = torch.arange(rows) == row
        places = torch.stack([torch.full((subject.length,), row), torch.arange(subject.length)], 1)
        shape = (rows, *[1] * (base.tokens.dim() - 1))
        changes = [subject.words.others(base.tokens, 82), base.tokens[row:row + 1].expand_as(base.tokens),
                   *(new for _, new in kinds)]
        for new in changes if inquiry.budget.broad else changes[:3]:
            tokens = torch.where(stays.view(shape), base.tokens, new.to(base.tokens.dtype))
            other: Call = base.but(tokens=tokens)
            if base.source is not None and subject.source_words is not None:
                shape_ = (rows, *[1] * (base.source.dim() - 1))
                other = other.but(source=torch.where(stays.view(shape_), base.source,
                                                     subject.source_words.others(base.source, 83).to(base.source.dtype)))
            yield Pair("batch", base, other, places, places, True, told, None)
