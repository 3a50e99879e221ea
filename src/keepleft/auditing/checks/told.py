"""A finding put into words: the place it enters, the line of code, and a few lines that show it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from keepleft.auditing import place, sentences
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.report import Finding
from keepleft.auditing.subject import Call, CallError
from keepleft.auditing.ways import Way


def ahead(inquiry: Inquiry, way: Way, base: Call, pair: Call, row: int, reader: int, source: int, size: float,
           probe: str) -> None:
    """Put the finding into words, with the place it enters and lines that show it."""
    subject = inquiry.subject
    batch, length = base.tokens.shape[:2]
    plain = way.but(wrapped=False)
    found, line = where(inquiry, spot(inquiry, plain, base, row, reader), spot(inquiry, plain, pair, row, reader))
    where_it_lies = "its future" if source > reader else "out of its sight"
    remedy = sentences.remedy("future", found.sort) if source > reader else sentences.NARROWER
    sort = f"the {found.sort} of {found.module}" if found.sort and found.module else found.module or subject.name
    inquiry.add(Finding(
        "future", reader, source, size, inquiry.took(way, batch, length), found.module,
        f"position {reader} reads position {source}, {where_it_lies}, through {sort}: its output moves {sentences.size(size)}; "
        f"{remedy}.", probe, line, reproducer(inquiry, way, base, pair, row, reader)))


def spot(inquiry: Inquiry, way: Way, call: Call, row: int, reader: int | None,
         run: Callable[[], object] | None = None) -> place.Spot:
    """A call, and the place in it that is looked at."""
    subject = inquiry.subject
    return place.Spot(run or (lambda: subject.raw(call, way)), call.tokens.shape[0], call.tokens.shape[1], row, reader,
                      subject.widths)


def where(inquiry: Inquiry, one: place.Spot, other: place.Spot, tolerance: float = 0.0) -> tuple[place.Place, str]:
    """The place, and the line of code."""
    subject = inquiry.subject
    try:
        found = place.located(subject.module, one, other, tolerance)
    except CallError:
        return place.Place(), ""
    if subject.module is None:
        return found, ""
    return found, place.line(place.part(subject.module, found.module), one, other, tolerance)


def reproducer(inquiry: Inquiry, way: Way, base: Call, pair: Call, row: int, reader: int) -> str:
    """A few lines that show it, on one row where one row is enough."""
    subject = inquiry.subject
    assert subject.selector is not None
    steps = [f"model.{'train' if way.train else 'eval'}()"]
    if way.implementation:
        steps.append(f"model.set_attn_implementation({way.implementation!r})")
    if base.tokens.is_floating_point():
        at = (base.tokens != pair.tokens).flatten(2).any(2)[row].nonzero().flatten().tolist()
        steps += [f"a = torch.randn({tuple(base.tokens.shape)}); b = a.clone(); b[{row}, {at}] += 1.0"]
    else:
        at = (base.tokens != pair.tokens)[row].nonzero().flatten().tolist()
        one = row if len(base.tokens) > 1 else 0
        steps += [f"a = torch.tensor({base.tokens.tolist()}); b = a.clone()",
                  "; ".join(f"b[{one}, {k}] = {int(pair.tokens[row, k])}" for k in at)]
    extra = "".join(f", {name}={value!r}" for name, value in way.asked)
    called = f"model({subject.main}={{}}{extra}){subject.selector.spelt()}[{row}, {reader}]"
    return "\n".join([*steps, f"({called.format('a')} - {called.format('b')}).abs().max()  # must be 0"])


def broken(inquiry: Inquiry, way: Way, call: Call, out: Tensor, when: str, told: str = "") -> bool:
    """Is there NaN in an output? It is told, with the place where it begins, if NaN is among the checks."""
    bad = out.isnan().flatten(2).any(2).cpu()
    if not bad.any():
        return False
    if "nan" in inquiry.checks:
        row, reader = bad.nonzero()[0].tolist()
        path = inquiry.took(way, *call.tokens.shape[:2]) + (f", {told}" if told else "")
        name = place.broken(inquiry.subject.module, spot(inquiry, way, call, row, reader))
        inquiry.add(Finding("nan", reader, None, float("inf"), path, name,
                            f"position {reader} of row {row} is NaN {when}, through {name or inquiry.subject.name}; "
                            f"{sentences.remedy('nan', '')}.", "forward"))
    return True
