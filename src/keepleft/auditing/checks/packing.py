"""Several texts in one row: does a neighbour move this one, and is it as it would be alone?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from keepleft.auditing.checks.pairs import Pair, agree
from keepleft.auditing.checks.told import broken
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.subject import Call, Subject
from keepleft.auditing.ways import Way

ENDS = ("cu_seqlens", "cu_seq_lens", "cu_seqlen", "cumulative_lengths")  # where each text ends, counted through the row
LONGEST = ("max_seqlen", "max_seq_len_in_batch")
LEAST = 4  # fewer positions are no pack


@dataclass(frozen=True)
class Row:
    """The texts of one row: how long each is, and the number that stands for it."""

    parts: tuple[int, ...]
    names: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.parts, initial=0))[:-1]

    @property
    def segments(self) -> Tensor:
        return torch.cat([torch.full((n,), name) for n, name in zip(self.parts, self.names, strict=True)])

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(n) for n in self.parts])


@dataclass(frozen=True)
class Telling:
    """How a model is told which text a token belongs to."""

    subject: Subject
    how: str                # segments, positions, ends or mask
    name: str = ""          # of the argument, for ends and mask
    placed: bool = True     # are positions given as well, where they can be?

    def packed(self, call: Call, rows: Sequence[Row]) -> Call:
        subject = self.subject
        segments = torch.stack([row.segments for row in rows])
        given = self.how == "positions" or (self.placed and subject.positions is not None and not subject.facts.ours)
        call = call.but(positions=torch.stack([row.positions for row in rows]) if given else None)
        if self.how == "segments":
            return call.but(segments=segments)
        if self.how == "mask":
            return call.but(extra={self.name: segments})
        if self.how == "ends":
            ends = torch.tensor([0, *accumulate(rows[0].parts)], dtype=torch.int32)
            longest = {name: max(rows[0].parts) for name in LONGEST if name in subject.sig.names}
            return call.but(extra={self.name: ends, **longest})
        return call

    def alone(self, call: Call) -> Call:
        return self.packed(call, [Row((call.tokens.shape[1],), (1,))])


def packing(inquiry: Inquiry, ways: Sequence[Way]) -> None:
    subject = inquiry.subject
    telling = _telling(subject)
    if telling is None:
        inquiry.skip("packing", "the model takes no segment, document or position ids")
        return
    if subject.length < LEAST:
        inquiry.skip("packing", f"it takes {subject.length} positions: too few for several texts")
        return
    if telling.how == "positions" and not subject.resets:
        _by_positions(inquiry, telling, ways[0])
        return
    for way in inquiry.timely(ways, "packing, further paths"):
        for told, rows in _layouts(inquiry, telling):
            alone = 2 if told == "three texts" else int(inquiry.budget.broad or way == ways[0])
            with inquiry.trying(f"packing, {told}, {way.named(len(rows))}"):
                if not _texts(inquiry, way, telling, rows, alone):
                    break
    if telling.how == "segments" and subject.positions is not None and not subject.facts.ours and not inquiry.found("packing"):
        _without_positions(inquiry, ways[0])


def _telling(subject: Subject) -> Telling | None:
    if subject.segments is not None:
        return Telling(subject, "segments", subject.segments)
    reader = subject.reader
    if reader is not None and reader.form == "keep":
        shown = subject.given.get(reader.name)
        if isinstance(shown, Tensor) and shown.dim() == 2 and not shown.is_floating_point() and int(shown.max()) > 1:
            return Telling(subject, "mask", reader.name)
    ends = next((name for name in ENDS if name in subject.sig.names), None)
    if ends is not None:
        return Telling(subject, "ends", ends)
    return Telling(subject, "positions") if subject.positions is not None else None


def _layouts(inquiry: Inquiry, telling: Telling) -> list[tuple[str, list[Row]]]:
    """Three texts; two rows of many, some of one token, with large numbers; and the number 0."""
    subject, ours = inquiry.subject, inquiry.subject.facts.ours
    length = subject.length
    first = _filled((5, 4), length) if length > 10 else _filled((length // 3, length // 3), length)
    out = [("three texts", [Row(first, tuple(range(1, len(first) + 1)))])]
    if inquiry.budget.broad and not ours and telling.how == "segments":
        out.append(("texts out of order", [Row(first, (2, 1, 3))]))
    many, others = _filled((2, 1, 1, 3, 1, 2), length), _filled((1, 3, 1, 1, 4), length)
    rows = [Row(many, tuple(range(1, len(many) + 1))), Row(others, (3, 7, 8, 12, 40, 41)[:len(others)])]
    if telling.how == "ends":
        return [*out, *((f"{len(row.parts)} texts", [row]) for row in rows)]
    out.append(("many texts in two rows", rows))
    if telling.how in ("segments", "mask"):
        last = Row(first, (*range(1, len(first)), 0))
        front = Row(_filled((3, 2), length), (0, 1, 2))
        out.append(("a text numbered 0", [last] if ours or telling.how == "mask" else [front, last]))
    return out


def _filled(parts: tuple[int, ...], length: int) -> tuple[int, ...]:
    """As many of these as fit, and the rest as one more."""
    ends = [end for end in accumulate(parts) if end < length]
    return (*parts[:len(ends)], length - (ends[-1] if ends else 0))


def _by_positions(inquiry: Inquiry, telling: Telling, way: Way) -> None:
    """Only positions can begin anew. Some models keep texts apart by that alone, others do not claim to: no leak is told, but
    a line that says so."""
    use = inquiry.subject.sig.role("use_cache")
    ways = [way.but(asked=((use, False),)), way] if use is not None else [way]
    told, rows = _layouts(inquiry, telling)[0]
    apart = []
    for there in ways:
        trial = _trial(inquiry)
        with trial.trying(f"packing, {told}, {there.named(1)}"):
            apart.append(_texts(trial, there, telling, rows, 2))
        for line in trial.skipped:
            inquiry.skip(*line.split(": ", 1))
    if apart and apart[0]:
        inquiry.took(ways[0], 1, inquiry.subject.length)
        if not all(apart):
            inquiry.note(f"positions that begin anew keep packed texts apart only with {use}=False")
    elif apart:
        inquiry.skip("packing", "positions that begin anew do not keep texts apart here, and there are no segment ids: give a "
                     "4-D mask, or do not pack")


def _without_positions(inquiry: Inquiry, way: Way) -> None:
    """Who takes both may leave positions to the caller; a line says so."""
    telling = Telling(inquiry.subject, "segments", placed=False)
    trial, rows = _trial(inquiry), _layouts(inquiry, telling)[0][1]
    with trial.trying("packing"):
        if not _texts(trial, way, telling, rows, 1):
            inquiry.note(f"{inquiry.subject.segments} alone does not keep packed texts as they are alone: give "
                         f"{inquiry.subject.positions} that begin anew with each text as well")


def _trial(inquiry: Inquiry) -> Inquiry:
    """Findings in it are not told."""
    return Inquiry(inquiry.subject, inquiry.claim, inquiry.layers, inquiry.budget, inquiry.checks, double=inquiry.double,
                   purity=inquiry.purity, quantised=inquiry.quantised, began=inquiry.began)


def _texts(inquiry: Inquiry, way: Way, telling: Telling, rows: Sequence[Row], alone: int) -> bool:
    """Each text in turn changes, in all rows at once, and nothing else may move; then each is compared with itself alone, in
    so many precisions, the finest first."""
    subject = inquiry.subject
    call = subject.call(len(rows), seed=90)
    packed = telling.packed(call, rows)
    with subject.on(way):
        if not _numbers(inquiry, way, packed):
            return False
        plain = 0 not in sum((row.names for row in rows), ()) or _ordinary(inquiry, way, telling)
        if not _apart(inquiry, way, packed, rows, plain):
            return False
    for there in dict.fromkeys([inquiry.fine(way), way][:alone]):
        with subject.on(there):
            if not _as_alone(inquiry, there, telling, packed, rows, plain):
                return False
    return True


def _numbers(inquiry: Inquiry, way: Way, packed: Call) -> bool:
    """Are they numbers? A text that sees nothing is not."""
    if "nan" not in inquiry.checks or way.dtype is not None:
        return True
    return not broken(inquiry, way, packed, inquiry.ran(packed, way), "where several texts share a row", "packed texts")


def _ordinary(inquiry: Inquiry, way: Way, telling: Telling) -> bool:
    """Is 0 a number like any other, or does it stand for padding?"""
    subject = inquiry.subject
    if subject.facts.ours or telling.how == "mask":
        return False
    call = subject.call(1, seed=92)
    one, none = (subject.run(telling.packed(call, [Row((subject.length,), (name,))]), way) for name in (1, 0))
    return torch.equal(one, none)


def _apart(inquiry: Inquiry, way: Way, packed: Call, rows: Sequence[Row], plain: bool) -> bool:
    subject = inquiry.subject
    new = subject.words.others(packed.tokens, 91)
    texts = torch.stack([torch.cat([torch.full((part,), n) for n, part in enumerate(row.parts)]) for row in rows])
    judged = torch.stack([row.segments for row in rows]) != 0
    if plain:
        judged = torch.ones_like(judged)
    for changed in range(int(texts.max()) + 1):
        hidden = texts == changed
        tokens = torch.where(hidden.view(*hidden.shape, *[1] * (new.dim() - 2)), new, packed.tokens)
        other = packed.but(tokens=tokens)
        for n, row in enumerate(rows):
            places = (~hidden & judged)[n].nonzero()
            if changed >= len(row.parts) or not len(places):
                continue
            at, source = torch.cat([torch.full_like(places, n), places], 1), row.starts[changed]

            def told(row: int, reader: int, module: str, size: str, source: int = source) -> str:
                return (f"a neighbour in the same row moves a text: position {reader} of row {row} moves {size} when the text "
                        f"that begins at position {source} changes, through {module}")

            if not agree(inquiry, way, Pair("packing", packed, other, at, at, True, told, source)):
                return False
    return True


def _as_alone(inquiry: Inquiry, way: Way, telling: Telling, packed: Call, rows: Sequence[Row], plain: bool) -> bool:
    for n, row in enumerate(rows):
        for text, (start, length) in enumerate(zip(row.starts, row.parts, strict=True)):
            if row.names[text] == 0 and not plain:
                continue
            alone = telling.alone(Call(packed.tokens[n:n + 1, start:start + length],
                                       None if packed.source is None else packed.source[n:n + 1]))
            at = torch.stack([torch.zeros(length, dtype=torch.long), torch.arange(length)], 1)

            def told(row: int, reader: int, module: str, size: str, text: int = text) -> str:
                return (f"text {text + 1} of a packed row is another than alone: position {reader} of row {row} moves {size}, "
                        f"through {module}; nothing of its neighbours leaks, so positions are probably not counted anew")

            pair = Pair("packing", alone, packed, at, at + torch.tensor([n, start]), False, told, start, "alone")
            if not agree(inquiry, way, pair):
                return False
    return True
