"""Does a position move when only what it may not see has changed?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keepleft.auditing import outputs, rounding
from keepleft.auditing.checks import findings
from keepleft.auditing.checks.gradients import gradients
from keepleft.auditing.checks.length import length_probe
from keepleft.auditing.checks.perturbations import (
    Perturbation,
    perturb,
    perturbations,
    sampled_perturbations,
    single_source_perturbations,
)
from keepleft.auditing.checks.stress import magnitude_probe, poison_probe
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.model_adapter import Inputs
from keepleft.auditing.session import AuditSession

MAX_BATCH_ROWS = 16  # so many changes are tried at once
MAX_BATCH_TOKENS = 4096  # in at most so many tokens
ON_PLAIN_INPUTS = "for plain words"


def future(session: AuditSession, paths: Sequence[CodePath]) -> None:
    """All probes, on the plain path first."""
    adapter = session.adapter
    if session.claims_nothing:
        return
    change_names = [name for name, _ in adapter.sampler.special_changes(adapter.make_inputs(1).tokens)]
    plain_path, *other_paths = paths
    if "substitution" in session.probes:
        _check_path(session, plain_path, adapter.length, 1, session.budget.num_seeds, change_names)
    for n, path in enumerate([plain_path, *other_paths]):
        if session.out_of_time:
            break
        if "substitution" in session.probes:
            _check_path(session, path, adapter.length, path.batch, 1 if n else session.budget.num_seeds, ())
    if "gradient" in session.probes:
        for path in [plain_path, plain_path.but(train=True)] if session.budget.exhaustive else [plain_path]:
            gradients(session, path, adapter.length)
    if "magnitude" in session.probes:
        magnitude_probe(session, plain_path)
    if "poison" in session.probes:
        poison_probe(session, plain_path)
    if "length" in session.probes:
        length_probe(session, plain_path)
    if "substitution" in session.probes:
        _check_other_outputs(session, plain_path)
    for n, length in enumerate(session.within_budget(session.lengths, "future, further lengths")):
        if "substitution" in session.probes and length > 1:
            _check_path(session, plain_path, length, MAX_BATCH_ROWS, 1, (), sweep=True)
            if session.budget.exhaustive and n < 8:
                _check_path(session, plain_path.but(train=True), length, MAX_BATCH_ROWS, 1, (), sweep=True)


def _check_other_outputs(session: AuditSession, path: CodePath) -> None:
    """Further outputs for each position (a value head, heads that look several words ahead) are held to the
    claim too.
    """
    adapter = session.adapter
    with session.skip_on_error("future, further outputs"):
        with adapter.on_path(path), torch.no_grad():
            selectors = outputs.selectors(adapter.run_raw(adapter.make_inputs(2), path), 2, adapter.length)
        main_selector = adapter.selector
        for selector in selectors[:6]:
            if selector != main_selector and session.run_cache.first_visit(("output", selector)):
                try:
                    adapter.selector = selector
                    _check_path(session, path.but(output=str(selector)), adapter.length, path.batch, 1, ())
                finally:
                    adapter.selector = main_selector


def _check_path(
    session: AuditSession,
    path: CodePath,
    length: int,
    batch: int,
    seeds: int,
    change_names: Sequence[str],
    *,
    sweep: bool = False,
) -> None:
    """A complete sweep on one path."""
    adapter = session.adapter
    label = f"future, {path.label(batch, length)}"
    key = (path, batch, length, seeds, len(change_names), session.budget.exhaustive and not sweep)
    if sweep and length >= session.run_cache.rejected_length:
        return
    if not session.run_cache.first_visit(key):
        return
    if sweep and not session.accepts_length(path, length):
        return
    with session.skip_on_error(label), adapter.on_path(path):
        allowed = session.allowed_mask(length)
        candidates = perturbations(allowed, seeds, change_names)
        if session.is_large:  # all cuts at once on the plain path, a few on the others
            candidates = (
                perturbations(allowed, 1)
                if batch > 1 and path == CodePath()
                else sampled_perturbations(session, allowed)
            )
            batch = 1 if batch == 1 else len(candidates)
        if session.budget.exhaustive and not sweep:
            candidates += single_source_perturbations(allowed)
        batch = max(1, min(batch, MAX_BATCH_TOKENS // length)) if sweep else batch
        session.record_path(path, batch, length)
        base = adapter.make_inputs(batch, length, seed=length)
        out = adapter.run(base, path)
        scale = rounding.scale(out)
        if out.isnan().any() and path.dtype is None and not path.autocast:
            findings.add_nan_finding(session, path, base, out, ON_PLAIN_INPUTS)
        for n in range(0, len(candidates), batch):
            if session.out_of_time and n:
                session.skip(label, "the time was up in the middle of it")
                return
            batch_candidates = candidates[n : n + batch]
            token_rows = [
                perturb(session, base.tokens[row : row + 1], perturbation)
                for row, perturbation in enumerate(batch_candidates)
            ]
            token_rows += [base.tokens[row : row + 1] for row in range(len(token_rows), batch)]
            changed = base.but(tokens=torch.cat(token_rows))
            change = rounding.max_change(out, adapter.run(changed, path))
            if not change.any():
                continue
            for row, perturbation in enumerate(batch_candidates):
                hidden = (
                    ~(session.allowed_mask(length, row) & perturbation.mask).any(1)
                    if not session.claim.is_uniform
                    else ~(allowed & perturbation.mask).any(1)
                )
                hits = (change[row].cpu() > 0) & hidden
                if hits.any() and confirm(
                    session, path, base, changed, row, hits, change[row].cpu(), scale, perturbation
                ):
                    return


def confirm(
    session: AuditSession,
    path: CodePath,
    base: Inputs,
    changed: Inputs,
    row: int,
    hits: Tensor,
    change: Tensor,
    scale: float,
    perturbation: Perturbation,
) -> bool:
    """A change where there must be none: is it more than rounding, is it this row's own doing, and which
    source does it?
    """
    adapter = session.adapter
    reader = int(torch.where(hits, change, -1.0).argmax())
    relative = float(change[reader]) / scale
    if relative == float("inf"):  # it breaks: that is a matter of its own
        if path.dtype is None and not path.autocast:
            findings.add_nan_finding(session, path, changed, adapter.run(changed, path), ON_PLAIN_INPUTS)
        return False
    row_changed = base.but(tokens=base.tokens.clone())
    row_changed.tokens[row] = changed.tokens[row]
    if len(base.tokens) > 1:  # do other rows do it?
        row_change = rounding.max_change(adapter.run(base, path), adapter.run(row_changed, path))[row].cpu()
        if not (row_change[hits] > 0).any():
            return False  # the batch check sees to it
        reader = int(torch.where(hits & (row_change > 0), row_change, -1.0).argmax())
        relative = float(row_change[reader]) / scale
    if not rounding.is_real_change(
        session,
        path,
        base,
        row_changed,
        row,
        reader,
        relative,
        _jittered_pairs(session, base, row_changed, reader, perturbation),
    ):
        return False
    source, source_changed, largest = _strongest_source(
        session, path, base, row_changed, row, reader, perturbation
    )
    findings.add_future_finding(
        session,
        path,
        base,
        source_changed,
        row,
        reader,
        source,
        max(relative, largest / scale),
        "substitution",
    )
    return True


def _strongest_source(
    session: AuditSession,
    path: CodePath,
    base: Inputs,
    row_changed: Inputs,
    row: int,
    reader: int,
    perturbation: Perturbation,
) -> tuple[int, Inputs, float]:
    """The one position that moves the reader most, where one alone does."""
    adapter = session.adapter
    out = adapter.run(base, path)
    best = int(perturbation.mask.nonzero()[0])
    best_inputs = row_changed
    largest = 0.0
    for k in perturbation.mask.nonzero().flatten().tolist()[:64]:
        source_changed = base.but(tokens=base.tokens.clone())
        source_changed.tokens[row, k] = row_changed.tokens[row, k]
        change = float(rounding.max_change(out, adapter.run(source_changed, path))[row, reader])
        if change > largest:
            best = k
            best_inputs = source_changed
            largest = change
    return best, best_inputs, largest


def _jittered_pairs(
    session: AuditSession, base: Inputs, row_changed: Inputs, reader: int, perturbation: Perturbation
) -> list[tuple[Inputs, Inputs]]:
    """The same change with something else beside it: a longer text, other words where nothing was changed."""
    sampler, batch, length = session.adapter.sampler, *base.tokens.shape[:2]
    out = []
    for extra_length in (1, 3):
        tail = sampler.sample(batch, extra_length, 900 + extra_length)
        out.append(
            tuple(inputs.but(tokens=torch.cat([inputs.tokens, tail], 1)) for inputs in (base, row_changed))
        )
    for position in (0, length - 1):
        if position != reader and not perturbation.mask[position]:
            replacement = sampler.resample(base.tokens, 77)[:, position]
            changed_pair = []
            for inputs in (base, row_changed):
                tokens = inputs.tokens.clone()
                tokens[:, position] = replacement
                changed_pair.append(inputs.but(tokens=tokens))
            out.append(tuple(changed_pair))
    return out  # type: ignore[return-value]
