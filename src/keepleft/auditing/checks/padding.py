"""Does padding move a real output: by what it holds, or by how much of it there is?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from keepleft.auditing.checks.pairs import Pair, agree, further
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.subject import Call, Reader, Subject
from keepleft.auditing.ways import Way

AMOUNTS = (3, -2, 1, 6)  # of padding; -2: all but two positions


def padding(inquiry: Inquiry, ways: Sequence[Way], every: Sequence[Way] = ()) -> None:
    """All of it on the ways that matter most, and one exact look at each of every way."""
    subject = inquiry.subject
    if subject.reader is None and subject.source_reader is None:
        inquiry.skip("padding", "the model takes no mask of real tokens (attention_mask, key_padding_mask, lengths …)")
        return
    both = ((subject.reader, False), (subject.source_reader, True))
    readers = [(reader, source) for reader, source in both if reader is not None]
    for n, way in enumerate(inquiry.timely(ways, "padding, further paths")):
        for reader, source in readers:
            if _sides(inquiry, way, reader, source, thorough=inquiry.budget.broad and n == 0) and n == 0 and not source:
                _hole(inquiry, way, reader)
    forms = [Way(mask="boolean")] if subject.reader is not None and subject.reader.form == "keep" else []
    same = (way.but(mask="absent") if way.mask == "ones" else way for way in (*every, *forms))  # a mask is given anyway
    for way in inquiry.timely(further(inquiry, "padding", ways, same), "padding, further paths"):
        for reader, source in readers:
            if source and way.mask != "absent":
                continue  # the forms are those of the audited sequence's mask
            for side in _where(subject, reader, source, counted(inquiry, source)):
                with inquiry.trying(f"padding, {way.named(3)}, on the {side}" + " of the source" * source), subject.on(way):
                    agree(inquiry, way, _content(subject, side, AMOUNTS[0], source, 3, 0))
    if "batch" in inquiry.checks and not inquiry.found("padding"):
        for way in inquiry.timely(ways if inquiry.budget.broad else ways[:1], "batch, other padding in other rows"):
            neighbours(inquiry, inquiry.fine(way))


def counted(inquiry: Inquiry, source: bool) -> bool:
    """Are positions counted from the first real token, so that padding on the left changes nothing?"""
    subject = inquiry.subject
    return subject.positions is not None or subject.facts.ours or not (source or subject.looked or inquiry.silent)


def _where(subject: Subject, reader: Reader, source: bool, counted: bool) -> tuple[str, ...]:
    """The sides that padding may stand on. Sources are padded on the right, by custom."""
    return ("right",) if reader.form == "lengths" or (source and not counted) else ("right", "left")


def _sides(inquiry: Inquiry, way: Way, reader: Reader, source: bool, *, thorough: bool) -> bool:
    """True: nothing moved."""
    subject = inquiry.subject
    fine = dict.fromkeys([inquiry.fine(way), way][:1 + thorough])
    by_amount = counted(inquiry, source)
    for side in _where(subject, reader, source, by_amount):
        for amount in AMOUNTS if thorough else AMOUNTS[:1] if inquiry.brief else AMOUNTS[:2]:
            amount = amount if amount > 0 else (subject.source_length if source else subject.length) + amount
            what = f"padding, {way.named()}, {amount} on the {side}" + (" of the source" if source else "")
            with inquiry.trying(what):
                for there in fine if side == "right" or by_amount else ():
                    with subject.on(there):
                        for pair in _amounts(subject, side, amount, source, (1, 2, 3) if thorough else (1, 3)):
                            if not agree(inquiry, there, pair):
                                return False
                with subject.on(way):
                    for rows in (1, 2, 3, 5) if thorough else (1, 5):
                        for seed in range(2 if thorough else 1):
                            if not agree(inquiry, way, _content(subject, side, amount, source, rows, seed)):
                                return False
    return True


def _hole(inquiry: Inquiry, way: Way, reader: Reader) -> None:
    """A mask may hide any token, also one with real tokens on both sides."""
    subject = inquiry.subject
    third = subject.length // 3
    if reader.form not in ("keep", "drop") or not third:
        return
    keep = torch.ones(2, subject.length, dtype=torch.bool)
    keep[0, third:third + 2] = keep[1, 2 * third] = False

    def told(row: int, reader: int, module: str, size: str) -> str:
        return f"what stands in a hole of the mask moves position {reader} of row {row} {size}, through {module}"

    text = subject.call(2, seed=59).but(keep=keep)
    with inquiry.trying(f"padding, {way.named(2)}, a hole in the mask"), subject.on(way):
        agree(inquiry, way, Pair("padding", text, refilled(subject, text, keep, False, 0), keep.nonzero(), keep.nonzero(), True,
                                 told, third, path="a hole in the mask"))


def neighbours(inquiry: Inquiry, way: Way) -> None:
    """Does a row move when other rows are padded otherwise? One row is always whole, so that nothing can be cut off."""
    subject = inquiry.subject

    def told(row: int, reader: int, module: str, size: str) -> str:
        return f"the padding of other rows moves row {row}: position {reader} moves {size}, through {module}"

    for reader, source in ((subject.reader, False), (subject.source_reader, True)):
        if reader is None:
            continue
        whole = subject.source_length if source else subject.length
        side = "right" if source or reader.form == "lengths" else "left"
        text = subject.call(3, seed=84)
        base, *others = (laid(subject, text, kept((whole - torch.tensor(less)).clamp(min=2), whole, side), side, source)
                         for less in ((0, 3, 5), (0, 6, 1), (4, 3, 0)))
        for row, other in enumerate(others):
            seen = base.keep[row] if base.keep is not None else torch.ones(subject.length, dtype=torch.bool)
            at = seen.nonzero().flatten()
            places = torch.stack([torch.full_like(at, row), at], 1)
            pair = Pair("batch", base, other, places, places, False, told, None, "masks", path="other padding in other rows")
            with inquiry.trying(f"batch, {way.named(3)}, other padding in other rows"), subject.on(way):
                if not agree(inquiry, way, pair):
                    return


def _padded(subject: Subject, side: str, amount: int, source: bool, rows: int) -> tuple[Call, Call, Tensor]:
    """A text, the same said to be padded, and which of it is real; rows of different lengths, from the third on."""
    whole = subject.source_length if source else subject.length
    some, fewer = whole - amount, whole - amount - 2
    real = {1: [some], 2: [some, whole], 3: [whole, some, fewer], 5: [whole, some, fewer, fewer + 1, some]}[rows]
    keep = kept(torch.tensor(real).clamp(min=2), whole, side)
    text = subject.call(rows, seed=60 + amount)
    return text, laid(subject, text, keep, side, source), keep


def _content(subject: Subject, side: str, amount: int, source: bool, rows: int, seed: int) -> Pair:
    """Padded with one thing against padded with another."""
    thing = "the source's padding" if source else "padding"
    _, padded, keep = _padded(subject, side, amount, source, rows)
    places = (keep if not source else torch.ones(padded.tokens.shape[:2], dtype=torch.bool)).nonzero()

    def told(row: int, reader: int, module: str, size: str) -> str:
        return f"what {thing} on the {side} holds moves position {reader} of row {row} {size}, through {module}"

    return Pair("padding", padded, refilled(subject, padded, keep, source, seed), places, places, True, told,
                int((~keep).nonzero()[0, 1]), path=f"{amount} of padding on the {side}",
                read=[((r, k), (r, k)) for r, k in keep.nonzero().tolist()] if source else [])


def _amounts(subject: Subject, side: str, amount: int, source: bool, batches: Sequence[int]) -> Iterator[Pair]:
    """Alone against padded; one row, and rows of different lengths."""
    thing = "the source's padding" if source else "padding"

    def told(row: int, reader: int, module: str, size: str) -> str:
        return (f"{amount} positions of {thing} on the {side} move position {reader} of row {row} {size}, through {module}, "
                "whatever they hold")

    for rows in batches:
        text, padded, keep = _padded(subject, side, amount, source, rows)
        places = (keep if not source else torch.ones(text.tokens.shape[:2], dtype=torch.bool)).nonzero()
        for row in range(rows):
            alone = cut(subject, text, row, keep, side, source)
            also = places[places[:, 0] == row]
            at = torch.stack([torch.zeros(len(also), dtype=torch.long), torch.arange(len(also))], 1)
            real = keep[row].nonzero().flatten().tolist()
            yield Pair("padding", alone, padded, at, also, False, told, int((~keep).nonzero()[0, 1]), "amount",
                       path=f"{amount} of padding on the {side}",
                       read=[((0, i), (row, k)) for i, k in enumerate(real)] if source else [])


def kept(real: Tensor, length: int, side: str) -> Tensor:
    """(B, T): True where a token is real."""
    at = torch.arange(length)[None]
    return at < real[:, None] if side == "right" else at >= length - real[:, None]


def laid(subject: Subject, text: Call, keep: Tensor, side: str, source: bool) -> Call:
    """Said to be padded; positions counted from the first real token, where the model takes them and needs them."""
    if source:
        return text.but(source_keep=keep)
    positions = None
    if side == "left" and subject.positions is not None and not subject.facts.ours:
        positions = (keep.long().cumsum(1) - 1).clamp(min=0)
    return text.but(keep=keep, positions=positions)


def cut(subject: Subject, text: Call, row: int, keep: Tensor, side: str, source: bool) -> Call:
    """The real part of one row, alone."""
    one = text.rows(slice(row, row + 1))
    if source:
        assert one.source is not None
        return one.but(source=one.source[:, keep[row]])
    tokens = one.tokens[:, keep[row]]
    positions = torch.arange(tokens.shape[1])[None] if side == "left" and subject.positions and not subject.facts.ours else None
    return one.but(tokens=tokens, positions=positions)


def refilled(subject: Subject, call: Call, keep: Tensor, source: bool, seed: int) -> Call:
    """The same with something else in its padding."""
    tokens = call.source if source else call.tokens
    assert tokens is not None
    words = subject.source_words if source else subject.words
    assert words is not None
    new = words.others(tokens, 300 + seed)
    out = torch.where(keep.view(*keep.shape, *[1] * (tokens.dim() - 2)), tokens, new.to(tokens.dtype))
    return call.but(source=out) if source else call.but(tokens=out)
