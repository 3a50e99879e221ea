"""Padding: do the outputs of real tokens depend on what padding contains, or on how much of it there is?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from keepleft.auditing.checks.agreement import CallPair, agree, remaining_paths
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import ModelAdapter, PaddingArgument
from keepleft.auditing.session import AuditSession

PADDING_AMOUNTS = (3, -2, 1, 6)  # positions; -2: all but two


def padding(session: AuditSession, paths: Sequence[CodePath], all_paths: Sequence[CodePath] = ()) -> None:
    """Every comparison on the main paths, and one exact comparison on each of the others."""
    adapter = session.adapter
    if adapter.padding_argument is None and adapter.source_padding_argument is None:
        session.skip(
            "padding", "the model takes no mask of real tokens (attention_mask, key_padding_mask, lengths …)"
        )
        return
    candidates = ((adapter.padding_argument, False), (adapter.source_padding_argument, True))
    padding_arguments = [
        (padding_argument, is_source)
        for padding_argument, is_source in candidates
        if padding_argument is not None
    ]
    for n, path in enumerate(session.within_budget(paths, "padding, further paths")):
        for padding_argument, is_source in padding_arguments:
            if (
                _check_sides(
                    session, path, padding_argument, is_source, thorough=session.budget.exhaustive and n == 0
                )
                and n == 0
                and not is_source
            ):
                _check_mask_hole(session, path, padding_argument)
    mask_paths = (
        [CodePath(mask="boolean")]
        if adapter.padding_argument is not None and adapter.padding_argument.form == "keep"
        else []
    )
    # padding needs a mask on every path, so that a path with a mask of ones is the same as one without
    candidate_paths = (
        path.but(mask="absent") if path.mask == "ones" else path for path in (*all_paths, *mask_paths)
    )
    for path in session.within_budget(
        remaining_paths(session, "padding", paths, candidate_paths), "padding, further paths"
    ):
        for padding_argument, is_source in padding_arguments:
            if is_source and path.mask != "absent":
                continue  # a path's form of mask is that of the audited sequence
            skips_padding = positions_skip_padding(session, is_source)
            for side in padding_sides(padding_argument, is_source, skips_padding):
                with (
                    session.skip_on_error(
                        f"padding, {path.label(3)}, on the {side}" + " of the source" * is_source
                    ),
                    adapter.on_path(path),
                ):
                    agree(session, path, _content_pair(adapter, side, PADDING_AMOUNTS[0], is_source, 3, 0))
    if "batch" in session.checks and not session.has_finding("padding"):
        for path in session.within_budget(
            paths if session.budget.exhaustive else paths[:1], "batch, other padding in other rows"
        ):
            check_padding_of_other_rows(session, session.in_float64(path))


def positions_skip_padding(session: AuditSession, is_source: bool) -> bool:
    """Are positions counted from the first real token, so that padding on the left changes nothing?"""
    adapter = session.adapter
    return (
        adapter.positions_argument is not None
        or adapter.facts.is_keepleft
        or not (is_source or adapter.source_argument or session.claims_nothing)
    )


def padding_sides(padding_argument: PaddingArgument, is_source: bool, skips_padding: bool) -> tuple[str, ...]:
    """The sides that padding may be on. Sources are padded on the right, by convention."""
    if padding_argument.form == "lengths" or (is_source and not skips_padding):
        return ("right",)
    return ("right", "left")


def _check_sides(
    session: AuditSession,
    path: CodePath,
    padding_argument: PaddingArgument,
    is_source: bool,
    *,
    thorough: bool,
) -> bool:
    """Do real outputs stay the same, whatever padding holds and however much there is, on either side?"""
    adapter = session.adapter
    precision_paths = dict.fromkeys([session.in_float64(path), path][: 1 + thorough])
    amounts: Sequence[int] = PADDING_AMOUNTS
    if not thorough:
        amounts = amounts[: 1 if session.essential else 2]
    skips_padding = positions_skip_padding(session, is_source)
    amount_batches: tuple[int, ...] = (1, 2, 3) if thorough else (1, 3)
    content_batches: tuple[int, ...] = (1, 2, 3, 5) if thorough else (1, 5)
    if session.essential:
        amount_batches = content_batches = (3,)
    for side in padding_sides(padding_argument, is_source, skips_padding):
        for amount in amounts:
            if amount < 0:
                amount += adapter.source_length if is_source else adapter.length
            label = f"padding, {path.label()}, {amount} on the {side}" + " of the source" * is_source
            with session.skip_on_error(label):
                for precision_path in precision_paths if side == "right" or skips_padding else ():
                    with adapter.on_path(precision_path):
                        for call_pair in _amount_pairs(adapter, side, amount, is_source, amount_batches):
                            if not agree(session, precision_path, call_pair):
                                return False
                with adapter.on_path(path):
                    for batch_size in content_batches:
                        for seed in range(2 if thorough else 1):
                            if not agree(
                                session,
                                path,
                                _content_pair(adapter, side, amount, is_source, batch_size, seed),
                            ):
                                return False
    return True


def _check_mask_hole(session: AuditSession, path: CodePath, padding_argument: PaddingArgument) -> None:
    """A mask may hide any token, even one with real tokens on both sides."""
    adapter = session.adapter
    third = adapter.length // 3
    if padding_argument.form not in ("keep", "drop") or not third:
        return
    keep_mask = torch.ones(2, adapter.length, dtype=torch.bool)
    keep_mask[0, third : third + 2] = keep_mask[1, 2 * third] = False

    def describe(row: int, reader: int, module: str, size: str) -> str:
        return (
            f"what stands in a hole of the mask moves position {reader} of row {row} {size}, through {module}"
        )

    inputs = adapter.make_inputs(2, seed=59).but(keep_mask=keep_mask)
    with session.skip_on_error(f"padding, {path.label(2)}, a hole in the mask"), adapter.on_path(path):
        agree(
            session,
            path,
            CallPair(
                "padding",
                inputs,
                refill_padding(adapter, inputs, keep_mask, False, 0),
                keep_mask.nonzero(),
                keep_mask.nonzero(),
                True,
                describe,
                third,
                path_note="a hole in the mask",
            ),
        )


def check_padding_of_other_rows(session: AuditSession, path: CodePath) -> None:
    """A row must not change when other rows are padded differently, which the batch check reports.

    One row always has no padding, so that a model that cuts off common padding cuts off nothing.
    """
    adapter = session.adapter

    def describe(row: int, reader: int, module: str, size: str) -> str:
        return f"the padding of other rows moves row {row}: position {reader} moves {size}, through {module}"

    for padding_argument, is_source in (
        (adapter.padding_argument, False),
        (adapter.source_padding_argument, True),
    ):
        if padding_argument is None:
            continue
        full_length = adapter.source_length if is_source else adapter.length
        side = "right" if is_source or padding_argument.form == "lengths" else "left"
        inputs = adapter.make_inputs(3, seed=84)
        base, *others = (
            pad_inputs(
                adapter,
                inputs,
                make_keep_mask((full_length - torch.tensor(padding_lengths)).clamp(min=2), full_length, side),
                side,
                is_source,
            )
            for padding_lengths in ((0, 3, 5), (0, 6, 1), (4, 3, 0))
        )
        for row, other in enumerate(others):
            kept_row = (
                base.keep_mask[row]
                if base.keep_mask is not None
                else torch.ones(adapter.length, dtype=torch.bool)
            )
            kept_positions = kept_row.nonzero().flatten()
            positions = torch.stack([torch.full_like(kept_positions, row), kept_positions], 1)
            call_pair = CallPair(
                "batch",
                base,
                other,
                positions,
                positions,
                False,
                describe,
                None,
                "masks",
                path_note="other padding in other rows",
            )
            with (
                session.skip_on_error(f"batch, {path.label(3)}, other padding in other rows"),
                adapter.on_path(path),
            ):
                if not agree(session, path, call_pair):
                    return


def _padded_inputs(
    adapter: ModelAdapter, side: str, amount: int, is_source: bool, batch_size: int
) -> tuple[Inputs, Inputs, Tensor]:
    """Inputs, the same inputs with a padding mask, and a mask (B, T) of the real tokens.

    With 3 rows or more, the padded rows differ in length.
    """
    full_length = adapter.source_length if is_source else adapter.length
    shorter = full_length - amount
    shortest = full_length - amount - 2
    real_lengths = {
        1: [shorter],
        2: [shorter, full_length],
        3: [shorter, shortest, full_length],  # sorted by length, they are no longer in pairs
        5: [full_length, shortest, shortest + 1, shorter, shorter],
    }[batch_size]
    keep_mask = make_keep_mask(torch.tensor(real_lengths).clamp(min=2), full_length, side)
    inputs = adapter.make_inputs(batch_size, seed=60 + amount)
    return inputs, pad_inputs(adapter, inputs, keep_mask, side, is_source), keep_mask


def _content_pair(
    adapter: ModelAdapter, side: str, amount: int, is_source: bool, batch_size: int, seed: int
) -> CallPair:
    """The same inputs with other contents in the padding."""
    padding_name = "the source's padding" if is_source else "padding"
    _, padded, keep_mask = _padded_inputs(adapter, side, amount, is_source, batch_size)
    positions = (
        keep_mask if not is_source else torch.ones(padded.tokens.shape[:2], dtype=torch.bool)
    ).nonzero()

    def describe(row: int, reader: int, module: str, size: str) -> str:
        return (
            f"what {padding_name} on the {side} holds moves position {reader} of row {row} {size}, "
            f"through {module}"
        )

    return CallPair(
        "padding",
        padded,
        refill_padding(adapter, padded, keep_mask, is_source, seed),
        positions,
        positions,
        True,
        describe,
        int((~keep_mask).nonzero()[0, 1]),
        path_note=f"{amount} of padding on the {side}",
        source_positions=[((r, k), (r, k)) for r, k in keep_mask.nonzero().tolist()] if is_source else [],
    )


def _amount_pairs(
    adapter: ModelAdapter, side: str, amount: int, is_source: bool, batch_sizes: Sequence[int]
) -> Iterator[CallPair]:
    """Each row alone, without padding, against the same row padded in a batch."""
    padding_name = "the source's padding" if is_source else "padding"

    def describe(row: int, reader: int, module: str, size: str) -> str:
        return (
            f"{amount} positions of {padding_name} on the {side} move position {reader} of row {row} {size}, "
            f"through {module}, whatever they hold"
        )

    for batch_size in batch_sizes:
        inputs, padded, keep_mask = _padded_inputs(adapter, side, amount, is_source, batch_size)
        positions = (
            keep_mask if not is_source else torch.ones(inputs.tokens.shape[:2], dtype=torch.bool)
        ).nonzero()
        for row in range(batch_size):
            unpadded = unpad(adapter, inputs, row, keep_mask, side, is_source)
            padded_positions = positions[positions[:, 0] == row]
            unpadded_positions = torch.stack(
                [torch.zeros(len(padded_positions), dtype=torch.long), torch.arange(len(padded_positions))], 1
            )
            real_positions = keep_mask[row].nonzero().flatten().tolist()
            yield CallPair(
                "padding",
                unpadded,
                padded,
                unpadded_positions,
                padded_positions,
                False,
                describe,
                int((~keep_mask).nonzero()[0, 1]),
                "amount",
                path_note=f"{amount} of padding on the {side}",
                source_positions=[((0, i), (row, k)) for i, k in enumerate(real_positions)]
                if is_source
                else [],
            )


def make_keep_mask(real_lengths: Tensor, length: int, side: str) -> Tensor:
    """(B, T): True where a token is real."""
    positions = torch.arange(length)[None]
    return (
        positions < real_lengths[:, None] if side == "right" else positions >= length - real_lengths[:, None]
    )


def pad_inputs(
    adapter: ModelAdapter, inputs: Inputs, keep_mask: Tensor, side: str, is_source: bool
) -> Inputs:
    """The inputs with a padding mask; padding on the left gets position ids that start at the first real
    token, where the model takes them.
    """
    if is_source:
        return inputs.but(source_keep_mask=keep_mask)
    positions = None
    if side == "left" and adapter.positions_argument is not None and not adapter.facts.is_keepleft:
        positions = (keep_mask.long().cumsum(1) - 1).clamp(min=0)
    return inputs.but(keep_mask=keep_mask, positions=positions)


def unpad(
    adapter: ModelAdapter, inputs: Inputs, row: int, keep_mask: Tensor, side: str, is_source: bool
) -> Inputs:
    """One row alone, without its padding."""
    row_inputs = inputs.select_rows(slice(row, row + 1))
    if is_source:
        assert row_inputs.source is not None
        return row_inputs.but(source=row_inputs.source[:, keep_mask[row]])
    row_inputs = row_inputs.select_positions(keep_mask[row])
    positions = (
        torch.arange(row_inputs.tokens.shape[1])[None]
        if side == "left" and adapter.positions_argument and not adapter.facts.is_keepleft
        else None
    )
    return row_inputs.but(positions=positions)


def refill_padding(
    adapter: ModelAdapter, inputs: Inputs, keep_mask: Tensor, is_source: bool, seed: int
) -> Inputs:
    """The same inputs with other tokens in the padding."""
    if not is_source:
        return inputs.blend(adapter.resample(inputs, 300 + seed), ~keep_mask)
    source = inputs.source
    assert source is not None
    assert adapter.source_sampler is not None
    new = adapter.source_sampler.resample(source, 300 + seed)
    return inputs.but(
        source=torch.where(
            keep_mask.view(*keep_mask.shape, *[1] * (source.dim() - 2)), source, new.to(source.dtype)
        )
    )
