"""Does padding move a real output: by what it holds, or by how much of it there is?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from keepleft.auditing.checks.pairs import Pair, agree
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.subject import Call, Reader, Subject
from keepleft.auditing.ways import Way

AMOUNTS = (3, -2, 1, 6)  # of padding; -2: all but two positions


def padding(inquiry: Inquiry, ways: Sequence[Way]) -> None:
    subject = inquiry.subject
    if subject.reader is None and subject.source_reader is None:
        inquiry.skip("padding", "the model takes no mask of real tokens (attention_mask, key_padding_mask, lengths …)")
        return
    for n, way in enumerate(inquiry.timely(ways, "padding, further paths")):
        for source in (False, True):
            reader = subject.source_reader if source else subject.reader
            if reader is not None:
                _sides(inquiry, way, reader, source, thorough=inquiry.budget.broad and n == 0)


def _sides(inquiry: Inquiry, way: Way, reader: Reader, source: bool, *, thorough: bool) -> None:
    subject = inquiry.subject
    fine = [way.but(dtype=torch.float64), *([way] if thorough else [])] if inquiry.double and way.dtype is None else [way]
    counted = subject.positions is not None or subject.facts.ours or not (source or subject.looked or inquiry.silent)
    for side in ("right",) if reader.form == "lengths" else ("right", "left"):
        for amount in AMOUNTS if thorough else AMOUNTS[:2]:
            amount = amount if amount > 0 else (subject.source_length if source else subject.length) + amount
            what = f"padding, {way.named()}, {amount} on the {side}" + (" of the source" if source else "")
            with inquiry.trying(what):
                for there in fine if side == "right" or counted else ():  # sources are padded on the right, by custom
                    with subject.on(there):
                        for pair in _pairs(inquiry, side, amount, source, inexact=True, thorough=thorough):
                            if not agree(inquiry, there, pair):
                                return
                with subject.on(way):
                    for pair in _pairs(inquiry, side, amount, source, inexact=False, thorough=thorough):
                        if not agree(inquiry, way, pair):
                            return


def _pairs(inquiry: Inquiry, side: str, amount: int, source: bool, *, inexact: bool, thorough: bool) -> Iterator[Pair]:
    """Alone against padded, and padded with one thing against another; one row, and rows of different lengths."""
    subject = inquiry.subject
    whole = subject.source_length if source else subject.length
    for batch in (1, 2, 3) if thorough else (1, 3):
        some, fewer = whole - amount, whole - amount - 2
        real = torch.tensor({1: [some], 2: [some, whole], 3: [whole, some, fewer]}[batch]).clamp(min=2)
        keep = kept(real, whole, side)
        text = subject.call(batch, seed=60 + amount)
        padded = laid(subject, text, keep, side, source)
        seen = keep if not source else torch.ones(text.tokens.shape[:2], dtype=torch.bool)
        places = seen.nonzero()
        thing = "the source's padding" if source else "padding"
        pad = int((~keep).nonzero()[0, 1])

        def told(row: int, reader: int, module: str, size: str, thing: str = thing) -> str:
            return f"what {thing} on the {side} holds moves position {reader} of row {row} {size}, through {module}"

        def told_amount(row: int, reader: int, module: str, size: str, thing: str = thing) -> str:
            return (f"{amount} positions of {thing} on the {side} move position {reader} of row {row} {size}, through {module}, "
                    "whatever they hold")

        if not inexact:
            for seed in range(2 if thorough else 1):
                yield Pair("padding", padded, refilled(subject, padded, keep, source, seed), places, places, True, told, pad,
                           path=f"{amount} of padding on the {side}",
                           read=[((r, k), (r, k)) for r, k in keep.nonzero().tolist()] if source else [])
            continue
        for row in range(batch):
            n = int(real[row])
            alone = cut(subject, text, row, keep, side, source)
            at = torch.stack([torch.zeros(n, dtype=torch.long), torch.arange(n)], 1) if not source else \
                torch.stack([torch.zeros(subject.length, dtype=torch.long), torch.arange(subject.length)], 1)
            also = places[places[:, 0] == row]
            kept_ = keep[row].nonzero().flatten().tolist()
            yield Pair("padding", alone, padded, at, also, False, told_amount, pad, "amount",
                       path=f"{amount} of padding on the {side}",
                       read=[((0, i), (row, k)) for i, k in enumerate(kept_)] if source else [])


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
    one = slice(row, row + 1)
    if source:
        assert text.source is not None
        return text.but(tokens=text.tokens[one], source=text.source[one][:, keep[row]])
    tokens = text.tokens[one][:, keep[row]]
    positions = torch.arange(tokens.shape[1])[None] if side == "left" and subject.positions and not subject.facts.ours else None
    return text.but(tokens=tokens, source=None if text.source is None else text.source[one], positions=positions)


def refilled(subject: Subject, call: Call, keep: Tensor, source: bool, seed: int) -> Call:
    """The same with something else in its padding."""
    tokens = call.source if source else call.tokens
    assert tokens is not None
    words = subject.source_words if source else subject.words
    assert words is not None
    new = words.others(tokens, 300 + seed)
    out = torch.where(keep.view(*keep.shape, *[1] * (tokens.dim() - 2)), tokens, new.to(tokens.dtype))
    return call.but(source=out) if source else call.but(tokens=out)
