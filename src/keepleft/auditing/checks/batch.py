"""Batch independence: does the output of a row depend on the other rows?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from keepleft.auditing.checks.agreement import CallPair, agree, remaining_paths
from keepleft.auditing.checks.padding import check_padding_of_other_rows
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.session import AuditSession

LARGE_BATCH_SIZE = 8  # rows: several groups, where a model mixes rows in groups of two or four


def batch(session: AuditSession, paths: Sequence[CodePath], all_paths: Sequence[CodePath] = ()) -> None:
    """Every comparison on the main paths, and one exact comparison on each of the others."""
    adapter = session.adapter
    exhaustive = session.budget.exhaustive
    for n, path in enumerate(session.within_budget(paths, "batch, further paths")):
        with session.skip_on_error(f"batch, {path.label(3)}"), adapter.on_path(path):
            batch_sizes: tuple[int, ...] = (3,)
            if exhaustive:
                batch_sizes = (2, 3, LARGE_BATCH_SIZE)
            elif n == 0 and not session.essential:
                batch_sizes = (3, LARGE_BATCH_SIZE)
            if not all(
                agree(session, path, call_pair)
                for batch_size in batch_sizes
                for call_pair in _call_pairs(session, batch_size)
            ):
                continue
        float64_path = session.in_float64(path)
        with session.skip_on_error(f"batch, {float64_path.label(3)}"), adapter.on_path(float64_path):
            if not all(agree(session, float64_path, call_pair) for call_pair in _single_row_pairs(session)):
                continue
        # with a padding check, this comes after it, if that finds nothing
        if (n == 0 or exhaustive) and "padding" not in session.checks:
            check_padding_of_other_rows(session, float64_path)
    for path in session.within_budget(
        remaining_paths(session, "batch", paths, all_paths), "batch, further paths"
    ):
        with session.skip_on_error(f"batch, {path.label(3)}"), adapter.on_path(path):
            base = adapter.make_inputs(3, seed=80)
            new = adapter.sampler.resample(base.tokens, 82)
            all(
                agree(session, path, _call_pair(session, base, unchanged_rows, new))
                for unchanged_rows in torch.tensor([[0, 1, 1], [1, 0, 0]]).bool()
            )


def _call_pairs(session: AuditSession, batch_size: int) -> Iterator[CallPair]:
    """Some rows stay, the others change: to random tokens, to copies of the row that stays, to the sampler's
    special changes.
    """
    adapter = session.adapter
    base = adapter.make_inputs(batch_size, seed=80)
    row_masks = torch.eye(batch_size, dtype=torch.bool)
    new = adapter.sampler.resample(base.tokens, 82)
    if batch_size < LARGE_BATCH_SIZE:
        for row, unchanged_rows in enumerate(row_masks):
            repeated_row = base.tokens[row : row + 1].expand_as(base.tokens)
            changes = [
                new,
                repeated_row,
                *(change for _, change in adapter.sampler.special_changes(base.tokens)),
            ]
            if not session.budget.exhaustive:
                changes = changes[: 1 if session.essential else 3]
            for change in changes:
                yield _call_pair(session, base, unchanged_rows, change)
    else:  # of any two rows, each changes at least once while the other stays
        for bit in range((batch_size - 1).bit_length()):
            half_mask = (torch.arange(batch_size) >> bit & 1).bool()
            yield _call_pair(session, base, half_mask, new)
            yield _call_pair(session, base, ~half_mask, new)
    if batch_size == 3 or (batch_size > 3 and session.budget.exhaustive):
        yield from (_call_pair(session, base, ~row_mask, new) for row_mask in row_masks)


def _call_pair(session: AuditSession, base: Inputs, unchanged_rows: Tensor, new: Tensor) -> CallPair:
    """The rows that stay must not change at any position. unchanged_rows: (B,)"""
    adapter = session.adapter

    def describe(row: int, reader: int, module: str, size: str) -> str:
        return f"other rows of the batch move row {row}: position {reader} moves {size}, through {module}"

    def mix_rows(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(unchanged_rows.view(-1, *[1] * (old.dim() - 1)), old, new.to(old.dtype))

    changed = base.blend(
        adapter.resample(base, 82).but(tokens=new.to(base.tokens.dtype)),
        ~unchanged_rows[:, None].expand(base.tokens.shape[:2]),
    )
    if base.source is not None and adapter.source_sampler is not None:
        changed = changed.but(source=mix_rows(base.source, adapter.source_sampler.resample(base.source, 83)))
    positions = unchanged_rows[:, None].expand(base.tokens.shape[:2]).nonzero()
    return CallPair("batch", base, changed, positions, positions, True, describe)


def _single_row_pairs(session: AuditSession) -> Iterator[CallPair]:
    """Each of three rows by itself, against the three together."""
    adapter = session.adapter
    base = adapter.make_inputs(3, seed=81)

    def describe(row: int, reader: int, module: str, size: str) -> str:
        return (
            f"row {row} is another alone than among three: position {reader} moves {size}, through {module}"
        )

    for row in range(3):
        single_row = base.select_rows(slice(row, row + 1))
        positions = torch.stack(
            [torch.zeros(adapter.length, dtype=torch.long), torch.arange(adapter.length)], 1
        )
        yield CallPair(
            "batch",
            single_row,
            base,
            positions,
            positions + torch.tensor([row, 0]),
            False,
            describe,
            None,
            "alone",
        )
