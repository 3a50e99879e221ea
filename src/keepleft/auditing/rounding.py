"""Leak or rounding? The same computation gives the same bits; where it is another computation, a leak
persists in finer precision, and rounding does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import CallError
from keepleft.auditing.session import AuditSession

MAX_ROUNDING_ULPS = 1024  # a change of more units in the last place is no rounding
# a change that keeps its direction (by cosine similarity), whatever else changes, is no rounding
MIN_DIRECTION_AGREEMENT = 0.7


def max_change(a: Tensor, b: Tensor) -> Tensor:
    """(B, T): the largest change at each position; infinite where a number became NaN, or NaN a number."""
    if torch.equal(a, b):  # as it is for nearly every call of an honest model
        dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
        return torch.zeros(a.shape[:2], dtype=dtype, device=a.device)
    a, b = (x if x.dtype == torch.float64 else x.float() for x in (a, b))
    change = (a - b).abs()
    change = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(change), change)
    return torch.nan_to_num(change.flatten(2).amax(2) if change.dim() > 2 else change, nan=torch.inf)


def scale(out: Tensor) -> float:
    """The largest finite output, which changes are measured by."""
    return max(float(torch.nan_to_num(out, nan=0.0, posinf=0.0, neginf=0.0).abs().max()), 1e-30)


def tolerance(session: AuditSession, path: CodePath) -> float:
    """How far apart results may lie, relative to the scale, where the computation is not the same (other
    shapes, another order).
    """
    if session.quantized:
        return 0.2
    dtype = path.dtype or (torch.bfloat16 if path.autocast else session.adapter.dtype)
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
    """Is a change at (row, reader) between two calls of the same shape more than rounding?

    jittered_pairs: pairs of calls with the same change and something else beside it, so that rounding falls
    another way.
    """
    if size == float("inf"):
        return True
    if session.quantized:
        return size > 0.2
    dtype = torch.bfloat16 if path.autocast else path.dtype or session.adapter.dtype
    eps = torch.finfo(dtype).eps
    if dtype in (torch.float32, torch.float64) and size > MAX_ROUNDING_ULPS * eps:
        return True
    has_pure_float64 = False
    if dtype == torch.float32 and session.supports_float64 and not path.wrapped:
        float64_change = change_on_path(session, path.but(dtype=torch.float64), a, b, row, reader)
        if float64_change is not None and float64_change < size / 100:
            return False
        if float64_change is not None and float64_change > 1e-5:
            return True
        has_pure_float64 = session.is_pure_float64(path)
    if size <= 8 * eps and not has_pure_float64:
        return False  # there is nothing finer to compare with
    agreement = direction_agreement(session, path, a, b, row, reader, jittered_pairs)
    return size > 8 * eps if agreement is None else agreement > MIN_DIRECTION_AGREEMENT


def change_on_path(
    session: AuditSession, path: CodePath, a: Inputs, b: Inputs, row: int, reader: int
) -> float | None:
    """The relative size of a change on another path; None where the model does not run on it."""
    adapter = session.adapter
    try:
        with adapter.on_path(path):
            output = adapter.run(a, path)
            other_output = adapter.run(b, path)
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
    """The largest cosine similarity between a change and the same change in a jittered pair; None where there
    is nothing to compare, or too few features to tell.
    """
    adapter = session.adapter

    def change_vector(before: Inputs, after: Inputs) -> Tensor | None:
        try:
            old, new = (adapter.run(inputs, path)[row, reader].double() for inputs in (before, after))
        except CallError:
            return None
        change = (new - old).flatten()
        return change if change.isfinite().all() else None

    reference = change_vector(a, b)
    if reference is None or reference.numel() < 8:
        return None
    similarities = []
    for jittered_a, jittered_b in jittered_pairs:
        jittered_change = change_vector(jittered_a, jittered_b)
        if jittered_change is not None:
            similarities.append(
                float(F.cosine_similarity(reference, jittered_change, dim=0))
                if jittered_change.any()
                else 0.0
            )
    return max(similarities) if similarities else None
