"""Two calls whose outputs must agree at some places: bit for bit where the computation is the same, else up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keepleft.auditing import place, rounding, sentences
from keepleft.auditing.checks.future import spot, where
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.report import Finding
from keepleft.auditing.subject import Call
from keepleft.auditing.ways import Way


@dataclass(frozen=True)
class Pair:
    """Two calls, the places that must agree, and how a finding is put into words."""

    kind: str
    one: Call
    other: Call
    at: Tensor                       # (n, 2) row and position in the first
    also: Tensor                     # (n, 2) in the other
    exact: bool                      # the same computation?
    told: Callable[[int, int, str, str], str]  # (row, position) of the other, the module, how large → a sentence
    source: int | None = None
    sort: str = ""                   # findings of the same kind and place, but told apart
    path: str = ""
    read: Sequence[tuple[tuple[int, int], tuple[int, int]]] = ()  # places in the source that must agree as well


def agree(inquiry: Inquiry, way: Way, pair: Pair) -> bool:
    """Compare, and report where they do not agree. True: they do."""
    subject = inquiry.subject
    if subject.random and way.train and not pair.exact:
        return True
    if not pair.exact and inquiry.found("future"):
        inquiry.skip(f"{pair.kind} by comparison", "a pass itself looks where it must not, so passes of other shapes differ: mend "
                     "that first")
        return True
    a, b = (inquiry.ran(call, way) for call in (pair.one, pair.other))
    first, second = (out[tuple(rows.to(out.device).unbind(1))] for out, rows in ((a, pair.at), (b, pair.also)))
    path = inquiry.took(way, *pair.other.tokens.shape[:2]) + (f", {pair.path}" if pair.path else "")
    move = rounding.moved(first[None], second[None])[0].cpu()
    size = rounding.scale(first)
    limit = 0.0 if pair.exact else rounding.tolerance(inquiry, way)
    if not bool((move / size > limit).any()):
        return True
    n = int(move.argmax())
    relative = float(move[n]) / size
    (row, reader), (row_, reader_) = pair.at[n].tolist(), pair.also[n].tolist()
    if relative == float("inf") and pair.kind != "nan" and bool(second[n].isnan().any()):
        if "nan" not in inquiry.checks or way.dtype is not None:  # another precision than its own may be beyond it
            return True
        return _nan(inquiry, way, pair, row_, reader_, path)
    if pair.exact and not rounding.real(inquiry, way, pair.one, pair.other, row, reader, relative):
        return True
    if not pair.exact and (way.dtype or subject.dtype) not in (torch.float32, torch.float64) and \
            float(move.median()) / size <= limit:
        return True  # coarse numbers: one position may fall to the other side of a choice
    whole = pair.kind == "batch" and pair.exact  # everything of this row is to stay
    found, line = _read(inquiry, way, pair, limit) or where(
        inquiry, spot(inquiry, way, pair.one, row, None if whole else reader),
        spot(inquiry, way, pair.other, row_, None if whole else reader_), limit)
    inquiry.add(Finding(pair.kind, reader_, pair.source, relative, path, found.module,
                        pair.told(row_, reader_, found.module or subject.name, sentences.size(relative))
                        + f"; {sentences.remedy(pair.kind, found.sort)}.", "substitution" if pair.exact else "comparison", line,
                        reproducer(inquiry, way, pair, (row, reader), (row_, reader_))), pair.sort)
    return False


def _read(inquiry: Inquiry, way: Way, pair: Pair, limit: float) -> tuple[place.Place, str] | None:
    """Does it enter where the source is read? The reader of a target sees that only later."""
    if not pair.read or pair.one.source is None or pair.other.source is None:
        return None
    for n in sorted({0, len(pair.read) // 2, len(pair.read) - 1}):
        first, second = (replace(spot(inquiry, way, call, row, at), batch=source.shape[0], length=source.shape[1])
                         for call, source, (row, at) in ((pair.one, pair.one.source, pair.read[n][0]),
                                                         (pair.other, pair.other.source, pair.read[n][1])))
        found, line = where(inquiry, first, second, limit)
        if found.module:
            return found, line
    return None


def _nan(inquiry: Inquiry, way: Way, pair: Pair, row: int, reader: int, path: str) -> bool:
    """It does not move: it breaks."""
    subject = inquiry.subject
    name = place.broken(subject.module, spot(inquiry, way, pair.other, row, reader))
    inquiry.add(Finding("nan", reader, pair.source, float("inf"), path, name,
                        f"position {reader} of row {row} is NaN where others of its row are padding, through "
                        f"{name or subject.name}; {sentences.remedy('nan', '')}.", "comparison", "",
                        reproducer(inquiry, way, pair, (row, reader), (row, reader))))
    return False


def reproducer(inquiry: Inquiry, way: Way, pair: Pair, first: tuple[int, int], second: tuple[int, int]) -> str:
    """Both calls, spelt out."""
    subject = inquiry.subject
    if pair.other.tokens.is_floating_point() or subject.selector is None:
        return ""
    steps = [f"model.{'train' if way.train else 'eval'}()"]
    picked = "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in subject.selector.way)
    for name, call in (("one", pair.one), ("other", pair.other)):
        given = subject.arguments(call, way)
        said = ", ".join(f"{key}={f'torch.tensor({value.tolist()})' if isinstance(value, Tensor) else repr(value)}"
                         for key, value in given.items() if not isinstance(value, Tensor) or value.numel() <= 128)
        steps.append(f"{name} = model({said}){picked}")
    return "\n".join([*steps, f"(one[{first[0]}, {first[1]}] - other[{second[0]}, {second[1]}]).abs().max()  # must be 0"])
