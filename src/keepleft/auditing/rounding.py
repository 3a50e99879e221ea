"""Leak or rounding? The same computation gives the same bits; where it is not the same, a leak stays and
rounding goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.model_adapter import CallError, Inputs
from keepleft.auditing.session import AuditSession

MAX_ROUNDING_ULPS = 1024  # so many units in the last place are no rounding
MIN_DIRECTION_AGREEMENT = (
    0.7  # changes that point the same way, whatever shakes the rounding, are no rounding
)


def max_change(a: Tensor, b: Tensor) -> Tensor:
    """(B, T): the largest change at each position; infinite where a number came or went."""
    if torch.equal(a, b):  # the rule, for honest models
        return torch.zeros(
            a.shape[:2], dtype=torch.float64 if a.dtype == torch.float64 else torch.float32, device=a.device
        )
    a, b = a.float() if a.dtype != torch.float64 else a, b.float() if b.dtype != torch.float64 else b
    change = (a - b).abs()
    change = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(change), change)
    return torch.nan_to_num(change.flatten(2).amax(2) if change.dim() > 2 else change, nan=torch.inf)


def scale(out: Tensor) -> float:
    """What a change is measured by: the largest output."""
    return max(float(torch.nan_to_num(out, nan=0.0, posinf=0.0, neginf=0.0).abs().max()), 1e-30)


def tolerance(session: AuditSession, path: CodePath) -> float:
    """How far honest results may lie apart where the computation is not the same (other shapes, another
    order).
    """
    if session.quantized:
        return 0.2
    dtype = path.dtype or session.adapter.dtype
    if dtype == torch.float64:
        return 1e-9 if session.is_pure_float64(path) else 3e-4
    return 3e-4 if dtype == torch.float32 else 0.12


def is_real_change(
    session: AuditSession,
    path: CodePath,
    a: Inputs,
    b: Inputs,
    row: int,
    reader: int,
    size: float,
    jittered_pairs: Sequence[tuple[Inputs, Inputs]] = (),
) -> bool:
    """Is a change at (row, reader) between two calls of the same shape more than rounding? `jittered_pairs`
    are pairs of calls in which the same thing changes while something beside it differs, so that rounding
    falls another way.
    """
    if size == float("inf"):
        return True
    dtype = torch.bfloat16 if path.autocast else path.dtype or session.adapter.dtype
    if session.quantized:
        return size > 0.2
    eps = torch.finfo(dtype).eps
    if dtype in (torch.float32, torch.float64) and size > MAX_ROUNDING_ULPS * eps:
        return True
    if dtype == torch.float32 and session.supports_float64 and not path.wrapped:
        float64_change = change_on_path(session, path.but(dtype=torch.float64), a, b, row, reader)
        if float64_change is not None and float64_change < size / 100:
            return False
        if float64_change is not None and float64_change > 1e-5:
            return True
    has_pure_float64 = (
        dtype == torch.float32
        and session.supports_float64
        and not path.wrapped
        and session.is_pure_float64(path)
    )
    if size <= 8 * eps and not has_pure_float64:
        return False  # nothing finer is at hand
    agreement = direction_agreement(session, path, a, b, row, reader, jittered_pairs)
    return size > 8 * eps if agreement is None else agreement > MIN_DIRECTION_AGREEMENT


def change_on_path(
    session: AuditSession, path: CodePath, a: Inputs, b: Inputs, row: int, reader: int
) -> float | None:
    """The size of the change on another path; None where that cannot be taken."""
    adapter = session.adapter
    try:
        with adapter.on_path(path):
            output, other_output = adapter.run(a, path), adapter.run(b, path)
    except CallError:
        return None
    return float(max_change(output, other_output)[row, reader]) / scale(output)


def direction_agreement(
    session: AuditSession,
    path: CodePath,
    a: Inputs,
    b: Inputs,
    row: int,
    reader: int,
    jittered_pairs: Sequence[tuple[Inputs, Inputs]],
) -> float | None:
    """How much the change keeps its direction when something beside it is shaken; None where that says
    nothing.
    """
    adapter, similarities = session.adapter, []

    def change_vector(before: Inputs, after: Inputs) -> Tensor:
        return (
            adapter.run(after, path)[row, reader].double() - adapter.run(before, path)[row, reader].double()
        ).flatten()

    try:
        reference = change_vector(a, b)
    except CallError:
        return None
    if reference.numel() < 8 or not reference.isfinite().all():
        return None
    for jittered_a, jittered_b in jittered_pairs:
        try:
            jittered_change = change_vector(jittered_a, jittered_b)
        except CallError:
            continue
        if jittered_change.isfinite().all():
            similarities.append(
                float(torch.nn.functional.cosine_similarity(reference, jittered_change, dim=0))
                if jittered_change.any()
                else 0.0
            )
    return max(similarities) if similarities else None
