"""Leak or rounding? The same computation gives the same bits; where it is not the same, a leak stays and rounding goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.subject import Call, CallError
from keepleft.auditing.ways import Way

SURE = 1024      # so many units in the last place are no rounding
SHAKEN = 0.7     # changes that point the same way, whatever shakes the rounding, are no rounding


def moved(a: Tensor, b: Tensor) -> Tensor:
    """(B, T): the largest change at each position; infinite where a number came or went."""
    if torch.equal(a, b):  # the rule, for honest models
        return torch.zeros(a.shape[:2], dtype=torch.float64 if a.dtype == torch.float64 else torch.float32, device=a.device)
    a, b = a.float() if a.dtype != torch.float64 else a, b.float() if b.dtype != torch.float64 else b
    change = (a - b).abs()
    change = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(change), change)
    return torch.nan_to_num(change.flatten(2).amax(2) if change.dim() > 2 else change, nan=torch.inf)


def scale(out: Tensor) -> float:
    """What a change is measured by: the largest output."""
    return max(float(torch.nan_to_num(out, nan=0.0, posinf=0.0, neginf=0.0).abs().max()), 1e-30)


def tolerance(inquiry: Inquiry, way: Way) -> float:
    """How far honest results may lie apart where the computation is not the same (other shapes, another order)."""
    if inquiry.quantised:
        return 0.2
    kind = way.dtype or inquiry.subject.dtype
    if kind == torch.float64:
        return 1e-9 if inquiry.pure(way) else 3e-4
    return 3e-4 if kind == torch.float32 else 0.12


def real(inquiry: Inquiry, way: Way, a: Call, b: Call, row: int, reader: int, size: float,
         shakes: Sequence[tuple[Call, Call]] = ()) -> bool:
    """Is a change at (row, reader) between two calls of the same shape more than rounding? `shakes` are pairs of calls in
    which the same thing changes while something beside it differs, so that rounding falls another way."""
    if size == float("inf"):
        return True
    kind = torch.bfloat16 if way.autocast else way.dtype or inquiry.subject.dtype
    if inquiry.quantised:
        return size > 0.2
    eps = torch.finfo(kind).eps
    if kind in (torch.float32, torch.float64) and size > SURE * eps:
        return True
    if kind == torch.float32 and inquiry.double and not way.wrapped:
        precise = again(inquiry, way.but(dtype=torch.float64), a, b, row, reader)
        if precise is not None and precise < size / 100:
            return False
        if precise is not None and precise > 1e-5:
            return True
    finer = kind == torch.float32 and inquiry.double and not way.wrapped and inquiry.pure(way)
    if size <= 8 * eps and not finer:
        return False  # nothing finer is at hand
    agreement = coherent(inquiry, way, a, b, row, reader, shakes)
    return size > 8 * eps if agreement is None else agreement > SHAKEN


def again(inquiry: Inquiry, way: Way, a: Call, b: Call, row: int, reader: int) -> float | None:
    """The size of the change on another path; None where that cannot be taken."""
    subject = inquiry.subject
    try:
        with subject.on(way):
            one, other = subject.run(a, way), subject.run(b, way)
    except CallError:
        return None
    return float(moved(one, other)[row, reader]) / scale(one)


def coherent(inquiry: Inquiry, way: Way, a: Call, b: Call, row: int, reader: int,
             shakes: Sequence[tuple[Call, Call]]) -> float | None:
    """How much the change keeps its direction when something beside it is shaken; None where that says nothing."""
    subject, seen = inquiry.subject, []

    def change(one: Call, other: Call) -> Tensor:
        return (subject.run(other, way)[row, reader].double() - subject.run(one, way)[row, reader].double()).flatten()

    try:
        first = change(a, b)
    except CallError:
        return None
    if first.numel() < 8 or not first.isfinite().all():
        return None
    for one, other in shakes:
        try:
            now = change(one, other)
        except CallError:
            continue
        if now.isfinite().all():
            seen.append(float(torch.nn.functional.cosine_similarity(first, now, dim=0)) if now.any() else 0.0)
    return max(seen) if seen else None
