"""Two calls whose outputs must agree at some positions: bit for bit where the computation is the same, up to
rounding where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keepleft.auditing import interventions, localize, rounding
from keepleft.auditing.checks.findings import format_size, locate, locate_nan, make_probe, remedy
from keepleft.auditing.checks.reproducer import nan_script, script
from keepleft.auditing.code_paths import HALF_DTYPES, CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import UnauditableError
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession


@dataclass(frozen=True)
class CallPair:
    """Two calls, the positions that must agree, and the message where they do not."""

    kind: str
    first: Inputs
    second: Inputs
    first_positions: Tensor  # (n, 2) row and position in the first call
    second_positions: Tensor  # (n, 2) in the second
    exact: bool  # is it the same computation, which gives the same bits?
    # (row and position in the second call, module, size of the change) → a sentence
    describe: Callable[[int, int, str, str], str]
    source: int | None = None
    variant: str = ""  # tells findings of one kind in one module apart
    path_note: str = ""
    # positions of the source that must agree as well: (row, position) in the first call and in the second
    source_positions: Sequence[tuple[tuple[int, int], tuple[int, int]]] = ()


def agree(session: AuditSession, path: CodePath, call_pair: CallPair) -> bool:
    """Compare the two calls, and report where they do not agree. Returns whether they do. What an earlier
    round has compared is not compared again.
    """
    key = (
        call_pair.kind,
        call_pair.variant,
        call_pair.exact,
        path,
        call_pair.first.fingerprint,
        call_pair.second.fingerprint,
        call_pair.first_positions.numpy().tobytes(),
        call_pair.second_positions.numpy().tobytes(),
    )
    agreements = session.run_cache.agreements
    if key not in agreements:
        agreements[key] = _agree(session, path, call_pair)
    return agreements[key]


def _agree(session: AuditSession, path: CodePath, call_pair: CallPair) -> bool:
    """Compare two calls that have not been compared yet."""
    adapter = session.adapter
    if adapter.random_in_training and path.train and not call_pair.exact:
        return True
    if not call_pair.exact and session.has_finding("future"):
        session.skip(
            f"{call_pair.kind} by comparison",
            "a pass itself looks where it must not, so passes of other shapes differ: fix that first",
        )
        return True
    a, b = (session.cached_run(inputs, path) for inputs in (call_pair.first, call_pair.second))
    session.run_cache.keep_longest(call_pair.first)
    first, second = (
        out[tuple(positions.to(out.device).unbind(1))]
        for out, positions in ((a, call_pair.first_positions), (b, call_pair.second_positions))
    )
    if first.shape != second.shape:
        shapes = " and of ".join(str(tuple(out.shape[1:])) for out in (first, second))
        raise UnauditableError(
            f"the size of what {adapter.name} gives at a position follows the inputs: it is of {shapes}; "
            "give output= to pick its logits"
        )
    nan_masks = [out.isnan().flatten(1).any(1).cpu() for out in (first, second)]
    if bool((nan_masks[0] | nan_masks[1]).any()) and not _tolerates_nan(session, path, call_pair):
        return _report_nan(session, path, call_pair, (a, b), nan_masks)
    valid = ~(nan_masks[0] | nan_masks[1])
    if not bool(valid.any()):
        return True
    path_label = _path_label(session, path, call_pair, call_pair.second)
    if call_pair.second.keep_mask is not None:
        path_label = path_label.replace("no mask", "a mask of the real tokens")
    scale = rounding.scale(first)
    change = _position_changes(first, second, scale) * valid
    limit = 0.0 if call_pair.exact else rounding.tolerance(session, path)
    if not bool((change / scale > limit).any()):
        return True
    if path.dropout and not interventions.draws_alike(adapter, path, call_pair.first, call_pair.second):
        return True
    n = int(change.argmax())
    relative = float(change[n]) / scale
    row, reader = call_pair.first_positions[n].tolist()
    second_row, second_reader = call_pair.second_positions[n].tolist()
    if call_pair.exact and not rounding.is_real_change(
        session,
        path,
        call_pair.first,
        call_pair.second,
        row,
        reader,
        relative,
        _jittered_pairs(session, path, call_pair, row, reader, relative),
    ):
        return True
    if (
        not call_pair.exact
        and (path.dtype or adapter.dtype) not in (torch.float32, torch.float64)
        and float(change.median()) / scale <= limit
    ):
        return True  # in half precision, rounding may tip a discrete choice (an expert, say) at one position
    whole_row = call_pair.kind == "batch" and call_pair.exact  # no position of the row may change
    location, line = _locate_in_source(session, path, call_pair, limit) or locate(
        session,
        make_probe(session, path, call_pair.first, row, None if whole_row else reader),
        make_probe(session, path, call_pair.second, second_row, None if whole_row else second_reader),
        limit,
    )
    session.add_finding(
        Finding(
            call_pair.kind,
            second_reader,
            call_pair.source,
            relative,
            path_label,
            location.module,
            call_pair.describe(
                second_row, second_reader, location.module or adapter.name, format_size(relative)
            )
            + f"; {remedy(call_pair.kind, location.module_kind)}.",
            "substitution" if call_pair.exact else "comparison",
            line,
            script(
                session,
                path,
                call_pair.first,
                call_pair.second,
                (row, reader),
                (second_row, second_reader),
                up_to_rounding=not call_pair.exact,
            ),
        ),
        call_pair.variant,
    )
    return False


def _locate_in_source(
    session: AuditSession, path: CodePath, call_pair: CallPair, limit: float
) -> tuple[localize.Location, str] | None:
    """Where the difference enters, if that is in the encoder: the decoder's positions only show it later."""
    if not call_pair.source_positions or call_pair.first.source is None or call_pair.second.source is None:
        return None
    for n in sorted({0, len(call_pair.source_positions) // 2, len(call_pair.source_positions) - 1}):
        first, second = (
            replace(
                make_probe(session, path, inputs, row, position),
                batch=source.shape[0],
                length=source.shape[1],
            )
            for inputs, source, (row, position) in (
                (call_pair.first, call_pair.first.source, call_pair.source_positions[n][0]),
                (call_pair.second, call_pair.second.source, call_pair.source_positions[n][1]),
            )
        )
        location, line = locate(session, first, second, limit)
        if location.module:
            return location, line
    return None


def _position_changes(first: Tensor, second: Tensor, scale: float) -> Tensor:
    """(n,): the largest change at each position; a change to or from infinity is as large as the largest
    output.
    """
    first, second = (out.double() if out.dtype == torch.float64 else out.float() for out in (first, second))
    change = torch.where(first == second, 0.0, (first - second).abs()).flatten(1).amax(1)
    return torch.nan_to_num(change, nan=0.0, posinf=scale).cpu()


def _jittered_pairs(
    session: AuditSession, path: CodePath, call_pair: CallPair, row: int, reader: int, size: float
) -> list[tuple[Inputs, Inputs]]:
    """The same two calls with another token at the first or last compared position of the row.

    Only half precision needs it, whose rounding is as large as a leak may be. A change of two units in the
    last place or less counts as rounding.
    """
    dtype = path.dtype or session.adapter.dtype
    if dtype not in HALF_DTYPES or size <= 2 * torch.finfo(dtype).eps:
        return []
    positions = [
        position for r, position in call_pair.first_positions.tolist() if r == row and position != reader
    ]
    out = []
    for position in sorted({positions[0], positions[-1]}) if positions else ():
        replacement = session.adapter.resample(call_pair.first, 77)
        mask = replacement.mask_at(row, position)
        out.append((call_pair.first.blend(replacement, mask), call_pair.second.blend(replacement, mask)))
    return out


def _tolerates_nan(session: AuditSession, path: CodePath, call_pair: CallPair) -> bool:
    """Is NaN not to be reported here? Then only the positions without NaN are compared."""
    if "nan" not in session.checks:
        session.skip(
            f"{call_pair.kind} where outputs are NaN",
            "NaN compares with nothing; with nan among the checks it is said where it begins",
        )
        return True
    return path.dtype is not None  # the model need not support another precision than its own


def _report_nan(
    session: AuditSession,
    path: CodePath,
    call_pair: CallPair,
    outs: Sequence[Tensor],
    nan_masks: Sequence[Tensor],
) -> bool:
    """Report NaN at a compared position. Returns False: the calls do not agree."""
    adapter = session.adapter
    n = int(nan_masks[1].any())
    inputs, positions = (
        (call_pair.first, call_pair.first_positions),
        (call_pair.second, call_pair.second_positions),
    )[n]
    row, reader = positions[int(nan_masks[n].long().argmax())].tolist()
    path_label = _path_label(session, path, call_pair, inputs)
    first_nan = outs[n].isnan().flatten(2).any(2).nonzero()[0].tolist()
    name, line = locate_nan(session, make_probe(session, path, inputs, *first_nan))
    setting = (
        "where others of its row are padding"
        if inputs.keep_mask is not None or inputs.source_keep_mask is not None
        else "alone"
        if len(inputs.tokens) == 1
        else f"among {len(inputs.tokens)} rows"
    )
    session.add_finding(
        Finding(
            "nan",
            reader,
            call_pair.source,
            float("inf"),
            path_label,
            name,
            f"position {reader} of row {row} is NaN {setting}, through {name or adapter.name}; "
            f"{remedy('nan', '')}.",
            "comparison",
            line,
            nan_script(session, path, inputs, row, reader),
        )
    )
    return False


def _path_label(session: AuditSession, path: CodePath, call_pair: CallPair, inputs: Inputs) -> str:
    """Records the path as compared."""
    label = session.record_path(path, *inputs.tokens.shape[:2])
    return f"{label}, {call_pair.path_note}" if call_pair.path_note else label


def remaining_paths(
    session: AuditSession, check: str, paths: Sequence[CodePath], all_paths: Iterable[CodePath]
) -> list[CodePath]:
    """Those of all paths that this check has not taken yet; paths that differ in batch size count as one."""
    known_paths = {path.but(batch=2) for path in paths}
    out = [
        path
        for path in dict.fromkeys(path.but(batch=2) for path in all_paths)
        if path not in known_paths and (check, path) not in session.run_cache.visited
    ]
    session.run_cache.visited.update((check, path) for path in out)
    return out
