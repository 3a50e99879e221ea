"""Two calls whose outputs must agree at some places: bit for bit where the computation is the same, else up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keepleft.auditing import place, rounding, sentences
from keepleft.auditing.checks.told import spot, where
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.report import Finding
from keepleft.auditing.subject import Call
from keepleft.auditing.ways import COARSE, Way


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
        inquiry.skip(f"{pair.kind} by comparison", "a pass itself looks where it must not, so passes of other shapes differ: "
                     "mend that first")
        return True
    a, b = (inquiry.ran(call, way) for call in (pair.one, pair.other))
    inquiry.recent.sort(key=lambda known: known[0] is pair.one)  # what many are compared with is kept the longest
    first, second = (out[tuple(rows.to(out.device).unbind(1))] for out, rows in ((a, pair.at), (b, pair.also)))
    gone = [out.isnan().flatten(1).any(1).cpu() for out in (first, second)]
    if bool((gone[0] | gone[1]).any()) and not _tolerated(inquiry, way, pair):
        return _nan(inquiry, way, pair, (a, b), gone)
    numbers = ~(gone[0] | gone[1])
    if not bool(numbers.any()):
        return True
    path = inquiry.took(way, *pair.other.tokens.shape[:2]) + (f", {pair.path}" if pair.path else "")
    if pair.other.keep is not None:
        path = path.replace("no mask", "a mask of the real tokens")
    size = rounding.scale(first)
    move = _moves(first, second, size) * numbers
    limit = 0.0 if pair.exact else rounding.tolerance(inquiry, way)
    if not bool((move / size > limit).any()):
        return True
    n = int(move.argmax())
    relative = float(move[n]) / size
    (row, reader), (row_, reader_) = pair.at[n].tolist(), pair.also[n].tolist()
    if pair.exact and not rounding.real(inquiry, way, pair.one, pair.other, row, reader, relative,
                                              _shakes(inquiry, way, pair, row, reader, relative)):
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


def _moves(one: Tensor, other: Tensor, size: float) -> Tensor:
    """(n,): how far each place moves; to infinity and back is as far as the largest output."""
    one, other = (out.double() if out.dtype == torch.float64 else out.float() for out in (one, other))
    change = torch.where(one == other, 0.0, (one - other).abs()).flatten(1).amax(1)
    return torch.nan_to_num(change, nan=0.0, posinf=size).cpu()


def _shakes(inquiry: Inquiry, way: Way, pair: Pair, row: int, reader: int, size: float) -> list[tuple[Call, Call]]:
    """The same change with another word at the ends of the row that is watched, in both calls. Only coarse numbers need it:
    their rounding is as large as a leak may be. What is as small as their last place stays rounding."""
    kind = way.dtype or inquiry.subject.dtype
    if kind not in COARSE or size <= 2 * torch.finfo(kind).eps:
        return []
    ends = [at for r, at in pair.at.tolist() if r == row and at != reader]
    out = []
    for at in sorted({ends[0], ends[-1]}) if ends else ():
        word = inquiry.subject.words.others(pair.one.tokens, 77)[row, at].to(pair.one.tokens.dtype)
        both = []
        for call in (pair.one, pair.other):
            tokens = call.tokens.clone()
            tokens[row, at] = word
            both.append(call.but(tokens=tokens))
        out.append((both[0], both[1]))
    return out


def _tolerated(inquiry: Inquiry, way: Way, pair: Pair) -> bool:
    """Is NaN not to be reported here? Then the places that are numbers are compared."""
    if "nan" not in inquiry.checks:
        inquiry.skip(f"{pair.kind} where outputs are NaN", "NaN compares with nothing; with nan among the checks it is said "
                     "where it begins")
        return True
    return way.dtype is not None  # another precision than its own may be beyond it


def _nan(inquiry: Inquiry, way: Way, pair: Pair, outs: Sequence[Tensor], gone: Sequence[Tensor]) -> bool:
    """It does not move: it breaks."""
    subject, n = inquiry.subject, int(gone[1].any())
    call, places = ((pair.one, pair.at), (pair.other, pair.also))[n]
    row, reader = places[int(gone[n].long().argmax())].tolist()
    path = inquiry.took(way, *call.tokens.shape[:2]) + (f", {pair.path}" if pair.path else "")
    begun = outs[n].isnan().flatten(2).any(2).nonzero()[0].tolist()
    name = place.broken(subject.module, spot(inquiry, way, call, *begun))
    among = "where others of its row are padding" if call.keep is not None or call.source_keep is not None else \
        "alone" if len(call.tokens) == 1 else f"among {len(call.tokens)} rows"
    inquiry.add(Finding("nan", reader, pair.source, float("inf"), path, name,
                        f"position {reader} of row {row} is NaN {among}, through {name or subject.name}; "
                        f"{sentences.remedy('nan', '')}.", "comparison", "",
                        reproducer(inquiry, way, pair, tuple(pair.at[0].tolist()), (row, reader))))
    return False


def further(inquiry: Inquiry, what: str, ways: Sequence[Way], every: Iterable[Way]) -> list[Way]:
    """The paths that were not handed in, each once; the size of a batch is not told apart."""
    known = {way.but(batch=2) for way in ways}
    out = [way for way in dict.fromkeys(way.but(batch=2) for way in every)
           if way not in known and (what, way) not in inquiry.tried]
    inquiry.tried.update((what, way) for way in out)
    return out


def reproducer(inquiry: Inquiry, way: Way, pair: Pair, first: tuple[int, int], second: tuple[int, int]) -> str:
    """Both calls, spelt out."""
    subject = inquiry.subject
    if pair.other.tokens.is_floating_point() or subject.selector is None:
        return ""
    steps = [f"model.{'train' if way.train else 'eval'}()"]
    for name, call in (("one", pair.one), ("other", pair.other)):
        given = subject.arguments(call, way)
        said = ", ".join(f"{key}={f'torch.tensor({value.tolist()})' if isinstance(value, Tensor) else repr(value)}"
                         for key, value in given.items() if not isinstance(value, Tensor) or value.numel() <= 128)
        steps.append(f"{name} = model({said}){subject.selector.spelt()}")
    return "\n".join([*steps, f"(one[{first[0]}, {first[1]}] - other[{second[0]}, {second[1]}]).abs().max()  # must be 0"])
