"""Do other rows of a batch move this row?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from keepleft.auditing.checks.padding import neighbours
from keepleft.auditing.checks.pairs import Pair, agree, further
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.subject import Call
from keepleft.auditing.ways import Way

MANY = 8  # rows, so that groups of two and of four are more than one


def batch(inquiry: Inquiry, ways: Sequence[Way], every: Sequence[Way] = ()) -> None:
    """All of it on the ways that matter most, and one exact look at each of every way."""
    subject, broad = inquiry.subject, inquiry.budget.broad
    for n, way in enumerate(inquiry.timely(ways, "batch, further paths")):
        with inquiry.trying(f"batch, {way.named(3)}"), subject.on(way):
            sizes = (2, 3, MANY) if broad else (3, MANY) if n == 0 and not inquiry.brief else (3,)
            if not all(agree(inquiry, way, pair) for rows in sizes for pair in _pairs(inquiry, rows)):
                continue
        fine = inquiry.fine(way)
        with inquiry.trying(f"batch, {fine.named(3)}"), subject.on(fine):
            if not all(agree(inquiry, fine, pair) for pair in _alone(inquiry)):
                continue
        if (n == 0 or broad) and "padding" not in inquiry.checks:  # else it is looked at once padding itself is right
            neighbours(inquiry, fine)
    for way in inquiry.timely(further(inquiry, "batch", ways, every), "batch, further paths"):
        with inquiry.trying(f"batch, {way.named(3)}"), subject.on(way):
            base = subject.call(3, seed=80)
            new = subject.words.others(base.tokens, 82)
            all(agree(inquiry, way, _pair(inquiry, base, stays, new)) for stays in torch.tensor([[0, 1, 1], [1, 0, 0]]).bool())


def _pairs(inquiry: Inquiry, rows: int) -> Iterator[Pair]:
    """Some rows stay, the others change: to anything, to words that are all the same, to copies of the one that stays."""
    subject = inquiry.subject
    base = subject.call(rows, seed=80)
    each = torch.eye(rows, dtype=torch.bool)
    new = subject.words.others(base.tokens, 82)
    if rows < MANY:
        for row, stays in enumerate(each):
            copies = base.tokens[row:row + 1].expand_as(base.tokens)
            changes = [new, copies, *(change for _, change in subject.words.kinds(base.tokens))]
            for change in changes if inquiry.budget.broad else changes[:1] if inquiry.brief else changes[:3]:
                yield _pair(inquiry, base, stays, change)
    else:  # of any two rows, one changes and the other stays, both ways round
        for bit in range((rows - 1).bit_length()):
            half = (torch.arange(rows) >> bit & 1).bool()
            yield _pair(inquiry, base, half, new)
            yield _pair(inquiry, base, ~half, new)
    if rows == 3 or (rows > 3 and inquiry.budget.broad):
        yield from (_pair(inquiry, base, ~one, new) for one in each)


def _pair(inquiry: Inquiry, base: Call, stays: Tensor, new: Tensor) -> Pair:
    """Every row that stays is watched."""
    subject = inquiry.subject

    def told(row: int, reader: int, module: str, size: str) -> str:
        return f"other rows of the batch move row {row}: position {reader} moves {size}, through {module}"

    def mixed(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(stays.view(-1, *[1] * (old.dim() - 1)), old, new.to(old.dtype))

    other = base.but(tokens=mixed(base.tokens, new))
    if base.source is not None and subject.source_words is not None:
        other = other.but(source=mixed(base.source, subject.source_words.others(base.source, 83)))
    places = stays[:, None].expand(base.tokens.shape[:2]).nonzero()
    return Pair("batch", base, other, places, places, True, told)


def _alone(inquiry: Inquiry) -> Iterator[Pair]:
    """Each of three rows by itself."""
    subject = inquiry.subject
    base = subject.call(3, seed=81)

    def told(row: int, reader: int, module: str, size: str) -> str:
        return f"row {row} is another alone than among three: position {reader} moves {size}, through {module}"

    for row in range(3):
        alone = base.rows(slice(row, row + 1))
        at = torch.stack([torch.zeros(subject.length, dtype=torch.long), torch.arange(subject.length)], 1)
        yield Pair("batch", alone, base, at, at + torch.tensor([row, 0]), False, told, None, "alone")
