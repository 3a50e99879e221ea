"""Several texts in one row: does a neighbour move this one, and is it as it would be alone?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keepleft.auditing.checks.pairs import Pair, agree
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.ways import Way


def packing(inquiry: Inquiry, ways: Sequence[Way]) -> None:
    subject = inquiry.subject
    if subject.segments is None and subject.positions is None:
        inquiry.skip("packing", "the model takes no segment, document or position ids")
        return
    if subject.segments is None and not subject.resets:
        _by_positions(inquiry, ways[0])
        return
    for way in inquiry.timely(ways, "packing, further paths"):
        with inquiry.trying(f"packing, {way.named(1)}"):
            for named in ((1, 2, 3), (2, 1, 3)) if inquiry.budget.broad and not subject.facts.ours else ((1, 2, 3),):
                if not _texts(inquiry, way, named):
                    break


def _by_positions(inquiry: Inquiry, way: Way) -> None:
    """Only positions can begin anew. Some models keep texts apart by that alone, others do not claim to: no leak is told, but
    a line that says so."""
    use = inquiry.subject.sig.role("use_cache")
    ways = [way.but(asked=((use, False),)), way] if use is not None else [way]
    apart = []
    for there in ways:
        trial = Inquiry(inquiry.subject, inquiry.claim, inquiry.layers, inquiry.budget, inquiry.checks, double=inquiry.double,
                        purity=inquiry.purity, quantised=inquiry.quantised, began=inquiry.began)
        with trial.trying(f"packing, {there.named(1)}"):
            apart.append(_texts(trial, there, (1, 2, 3)))
        for line in trial.skipped:
            inquiry.skip(*line.split(": ", 1))
    if apart and apart[0]:
        inquiry.took(ways[0], 1, inquiry.subject.length)
        if not all(apart):
            inquiry.note(f"positions that begin anew keep packed texts apart only with {use}=False")
    elif apart:
        inquiry.skip("packing", "positions that begin anew do not keep texts apart here, and there are no segment ids: give a 4-D "
                     "mask, or do not pack")


def _texts(inquiry: Inquiry, way: Way, named: tuple[int, ...]) -> bool:
    """Texts of 5, 4 and the rest, in one row."""
    subject = inquiry.subject
    parts = (5, 4, subject.length - 9)
    starts = (0, 5, 9)
    call = subject.call(1, seed=90)
    segments = torch.cat([torch.full((n,), name) for n, name in zip(parts, named, strict=True)])[None]
    positions = torch.cat([torch.arange(n) for n in parts])[None] if subject.positions and not subject.facts.ours else None
    packed = call.but(segments=segments if subject.segments else None, positions=positions)
    fine = way.but(dtype=torch.float64) if inquiry.double and way.dtype is None else way
    with subject.on(way):
        for changed in range(len(parts)):
            hidden = segments[0] == named[changed]
            tokens = torch.where(hidden.view(1, -1, *[1] * (call.tokens.dim() - 2)), subject.words.others(call.tokens, 91),
                                 call.tokens)
            places = torch.stack([torch.zeros_like(segments[0]), torch.arange(subject.length)], 1)[~hidden]
            source = starts[changed]

            def told(row: int, reader: int, module: str, size: str, source: int = source) -> str:
                return (f"a neighbour in the same row moves a text: position {reader} moves {size} when the text that begins "
                        f"at position {source} changes, through {module}")

            if not agree(inquiry, way, Pair("packing", packed, packed.but(tokens=tokens), places, places, True, told, source)):
                return False
    for there in (fine, way) if fine != way else (way,):
        with subject.on(there):
            for n, (start, length) in enumerate(zip(starts, parts, strict=True)):
                alone = call.but(tokens=call.tokens[:, start:start + length],
                                 segments=torch.ones(1, length, dtype=torch.long) if subject.segments else None,
                                 positions=None if positions is None else torch.arange(length)[None])
                at = torch.stack([torch.zeros(length, dtype=torch.long), torch.arange(length)], 1)

                def told_alone(row: int, reader: int, module: str, size: str, n: int = n) -> str:
                    return (f"text {n + 1} of a packed row is another than alone: position {reader} moves {size}, through "
                            f"{module}; nothing of its neighbours leaks, so positions are probably not counted anew")

                pair = Pair("packing", alone, packed, at, at + torch.tensor([0, start]), False, told_alone, start, "alone")
                if not agree(inquiry, there, pair):
                    return False
    return True
