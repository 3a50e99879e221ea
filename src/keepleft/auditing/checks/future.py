"""Causality: does the output at a position change when only what it must not read has changed? Other tokens,
gradients, and a longer sequence are tried here, extreme values in `stress`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from keepleft.auditing import interventions, outputs, rounding
from keepleft.auditing.checks import findings, reproducer
from keepleft.auditing.checks.stress import magnitude_probe, poison_probe
from keepleft.auditing.code_paths import CodePath, lengths_beyond_window, lengths_to_try, nearby_lengths
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import CallError, perturb_rows
from keepleft.auditing.probe_inputs import (
    Perturbation,
    first_middle_last,
    perturbations,
    single_source_perturbations,
)
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession

MAX_BATCH_ROWS = 16  # perturbations tried in one call
MAX_BATCH_TOKENS = 4096  # tokens of such a call
MAX_REJECTED = 16  # changes at a length that turned out to be rounding, until the rest is left out
ON_PLAIN_INPUTS = "for plain words"


def future(session: AuditSession, paths: Sequence[CodePath]) -> None:
    """Every probe, the plainest path first."""
    adapter = session.adapter
    if session.claims_nothing:
        return
    change_names = [name for name, _ in adapter.sampler.special_changes(adapter.make_inputs(1).tokens)]
    plain_path, *other_paths = paths
    has_own_scores = not adapter.is_called_by_position  # others pass through one sum
    if "substitution" in session.probes:
        _check_path(session, plain_path, adapter.length, 1, session.budget.num_seeds, change_names)
    for n, path in enumerate([plain_path, *other_paths]):
        if session.out_of_time:
            break
        if "substitution" in session.probes:
            _check_path(session, path, adapter.length, path.batch, 1 if n else session.budget.num_seeds, ())
        if "length" in session.probes and n and not session.is_large and has_own_scores:
            _length_probe(session, path, _short_length_pairs(session))
    if "gradient" in session.probes:
        for path in [plain_path, plain_path.but(train=True)] if session.budget.exhaustive else [plain_path]:
            _gradient_probe(session, path, adapter.length)
    if "magnitude" in session.probes and has_own_scores:
        magnitude_probe(session, plain_path)
    if "poison" in session.probes and has_own_scores:
        poison_probe(session, plain_path)
    if "length" in session.probes:
        _length_probe(session, plain_path, _length_pairs(session))
    if "substitution" in session.probes:
        _check_other_outputs(session, plain_path)
    for n, length in enumerate(session.within_budget(session.lengths, "future, further lengths")):
        if "substitution" in session.probes and length > 1:
            _check_path(session, plain_path, length, MAX_BATCH_ROWS, 1, (), sweep=True)
            if session.budget.exhaustive and n < 8:
                _check_path(session, plain_path.but(train=True), length, MAX_BATCH_ROWS, 1, (), sweep=True)


def every_length(session: AuditSession) -> None:
    """Lengths that no number of the model names: every short one, and powers of two. Nothing where a leak is
    known: it would be the same.
    """
    plain_path = CodePath()
    longest = session.budget.every_length
    if session.has_finding("future") or session.claims_nothing:
        return
    if "length" in session.probes:
        _length_probe(session, plain_path, [(n, longest - n) for n in range(2, longest, 3)])
    for length in session.within_budget(lengths_to_try(session, every=True), "future, every short length"):
        if session.has_finding("future"):
            return
        if "substitution" in session.probes and length > 1:
            _check_path(session, plain_path, length, MAX_BATCH_ROWS, 1, (), sweep=True)


# -- substitution: other tokens where a position must not read ---------------------------------


def _check_other_outputs(session: AuditSession, path: CodePath) -> None:
    """Hold further outputs for each position to the claim too: a value head, heads that predict several
    tokens ahead.
    """
    adapter = session.adapter
    with session.skip_on_error("future, further outputs"):
        with adapter.on_path(path), torch.no_grad():
            main_selector = adapter.selector
            out = adapter.run_raw(adapter.make_inputs(2), path)
            selectors = outputs.selectors(out, 2, adapter.length, main_selector)
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
    """Try every perturbation on one path; the first leak ends it. sweep: one of many lengths, of which the
    model may not take all.
    """
    adapter = session.adapter
    label = f"future, {path.label(batch, length)}"
    key = (path, batch, length, seeds, len(change_names), session.budget.exhaustive and not sweep)
    if sweep and length >= session.run_cache.rejected_length:
        return
    if not session.run_cache.first_visit(key):
        return
    with session.skip_on_error(label), adapter.on_path(path):
        allowed = session.allowed_mask(length)
        candidates = perturbations(allowed, seeds, change_names)
        if session.is_large:  # all of them in one batch on the plain path, a few on the others
            candidates = perturbations(allowed, 1)
            if batch == 1 or path != CodePath() or sweep:
                candidates = first_middle_last(candidates)
            if batch == 1 and session.essential:
                candidates = candidates[len(candidates) // 2 :][:1]
            batch = 1 if batch == 1 else len(candidates)
        if session.budget.exhaustive and not sweep:
            candidates += single_source_perturbations(allowed)
        batch = max(1, min(batch, MAX_BATCH_TOKENS // length)) if sweep else batch
        if sweep and session.run_cache.rows_move_each_other:  # each row needs a call of its own
            batch = 1
            candidates = first_middle_last(candidates)
        if sweep and not session.budget.exhaustive and not _is_near_number(session, length):
            stride = max(1, -(-len(candidates) // batch))  # one batch; others at the next length
            candidates = candidates[length % stride :: stride]
        base = adapter.make_inputs(batch, length, seed=length)
        try:
            out = adapter.run(base, path)
        except CallError:
            if not sweep or session.accepts_length(path, length):
                raise
            return
        session.record_path(path, batch, length)
        scale = rounding.scale(out)
        if out.isnan().any() and path.dtype is None and not path.autocast:
            findings.add_nan_finding(session, path, base, out, ON_PLAIN_INPUTS)
        num_rejected = 0
        for n in range(0, len(candidates), batch):
            if sweep and num_rejected >= MAX_REJECTED:
                return  # it rounds everywhere
            if session.out_of_time and n:
                session.skip(label, "the time was up in the middle of it")
                return
            batch_candidates = candidates[n : n + batch]
            changed = perturb_rows(adapter, base, batch_candidates)
            change = rounding.max_change(out, adapter.run(changed, path))
            if not change.any():
                continue
            for row, perturbation in enumerate(batch_candidates):
                row_allowed = allowed if session.claim.is_uniform else session.allowed_mask(length, row)
                must_not_change = ~(row_allowed & perturbation.mask).any(1)
                row_change = change[row].cpu()
                hits = (row_change > 0) & must_not_change
                if not hits.any():
                    continue
                if _confirm(session, path, base, changed, row, hits, row_change, scale, perturbation):
                    return
                num_rejected += 1


def _is_near_number(session: AuditSession, length: int) -> bool:
    """Is this a length at which a number of the model's own may show, or the window of the claim?"""
    numbers = session.adapter.facts.config_numbers
    is_near = any(length in nearby_lengths(n, session.budget) for n in numbers)
    return is_near or length in lengths_beyond_window(session)


def _confirm(
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
    """Report a change where there must be none, if it is more than rounding and comes from this row itself.

    hits: (T,) the positions in question. change: (T,) how much each changes. Returns whether it is a leak.
    """
    adapter = session.adapter
    reader = int(torch.where(hits, change, -1.0).argmax())
    relative = float(change[reader]) / scale
    if relative == float("inf"):  # NaN is another kind of finding
        if path.dtype is None and not path.autocast:
            changed_output = adapter.run(changed, path)
            if changed_output.isnan().any():
                findings.add_nan_finding(session, path, changed, changed_output, ON_PLAIN_INPUTS)
        return False
    row_changed = base.blend(changed, base.mask_at(row))
    if len(base.tokens) > 1:  # does it come from other rows?
        row_change = rounding.max_change(adapter.run(base, path), adapter.run(row_changed, path))[row].cpu()
        if not (row_change[hits] > 0).any():
            session.run_cache.rows_move_each_other = True
            return False  # then the batch check finds it
        reader = int(torch.where(hits & (row_change > 0), row_change, -1.0).argmax())
        relative = float(row_change[reader]) / scale
    if path.dropout and not interventions.draws_alike(adapter, path, base, row_changed):
        return False  # experts that drop out parts of what they are given, say
    jittered_pairs = _jittered_pairs(session, base, row_changed, reader, perturbation)
    if not rounding.is_real_change(session, path, base, row_changed, row, reader, relative, jittered_pairs):
        return False
    source, source_changed, largest = _strongest_source(
        session, path, base, row_changed, row, reader, perturbation
    )
    size = max(relative, largest / scale)
    findings.add_future_finding(
        session, path, base, source_changed, row, reader, source, size, "substitution"
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
    """The position that changes the reader most when it alone is changed, with those inputs and the change;
    the first perturbed position, with all of them changed and 0, where no single one does.
    """
    adapter = session.adapter
    out = adapter.run(base, path)
    best = int(perturbation.mask.nonzero()[0])
    best_inputs = row_changed
    largest = 0.0
    for k in perturbation.mask.nonzero().flatten().tolist()[:64]:
        source_changed = base.blend(row_changed, base.mask_at(row, k))
        change = float(rounding.max_change(out, adapter.run(source_changed, path))[row, reader])
        if change > largest:
            best = k
            best_inputs = source_changed
            largest = change
    return best, best_inputs, largest


def _jittered_pairs(
    session: AuditSession, base: Inputs, row_changed: Inputs, reader: int, perturbation: Perturbation
) -> list[tuple[Inputs, Inputs]]:
    """The same perturbation with something else changed beside it: a longer sequence, or another token at
    either end.
    """
    adapter = session.adapter
    batch, length = base.tokens.shape[:2]
    out = []
    for extra_length in (1, 3):
        tail = adapter.make_inputs(batch, extra_length, 900 + extra_length)
        out.append((base.append(tail), row_changed.append(tail)))
    replacement = adapter.resample(base, 77)
    for position in (0, length - 1):
        if position != reader and not perturbation.mask[position]:
            mask = (torch.arange(length) == position)[None]
            out.append((base.blend(replacement, mask), row_changed.blend(replacement, mask)))
    return out


# -- gradients ---------------------------------------------------------------------------------


def _gradient_probe(session: AuditSession, path: CodePath, length: int) -> None:
    """The gradient of a position's output must be zero at every position that it must not read."""
    adapter = session.adapter
    if session.quantized:
        session.skip("future by gradients", "a quantised model has none")
        return
    allowed = session.allowed_mask(length)
    base = adapter.make_inputs(1, length, seed=length + 1)
    with session.skip_on_error(f"future by gradients, {path.label(1, length)}"), adapter.on_path(path):
        try:
            out, embeddings = interventions.run_with_grad(adapter, base, path)
        except interventions.UntracedError as error:
            session.skip("future by gradients", error)
            return
        session.record_path(path, 1, length)
        readers = sorted({0, length // 2, length - 1}) if session.is_large else range(length)
        for reader, gradient in _position_gradients(out, embeddings, readers):
            hidden = ~allowed[reader]
            largest = float(gradient.max())
            if largest <= 0 or not hidden.any() or not float(gradient[hidden].max()) > 0:
                continue
            source = int(torch.where(hidden, gradient, -1.0).argmax())
            relative = float(gradient[source]) / largest
            if relative < 1e-4 and not _persists_in_float64(session, path, base, reader, source, relative):
                continue
            changed = base.blend(adapter.resample(base, 11), base.mask_at(0, source))
            change = rounding.change_on_path(session, path, base, changed, 0, reader)
            # a change too small for the model's own precision is shown in float64
            finding_path = path if change or not session.supports_float64 else path.but(dtype=torch.float64)
            with adapter.on_path(finding_path):
                findings.add_future_finding(
                    session, finding_path, base, changed, 0, reader, source, change or relative, "gradient"
                )
            return


def _position_gradients(
    out: Tensor, embeddings: Tensor, readers: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """(T,) for each reader: the largest gradient of a random projection of its output at each position.

    Readers whose output has no gradient are left out.
    """
    rng = torch.Generator().manual_seed(5)
    for reader in readers:
        reader_output = out[0, reader].flatten()
        direction = torch.randn(reader_output.shape, generator=rng).to(reader_output)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (gradient,) = torch.autograd.grad(
                    (reader_output * direction).sum(), embeddings, retain_graph=True, allow_unused=True
                )
        except RuntimeError as error:
            raise CallError(f"no gradients: {str(error)[:160]}") from error
        if gradient is not None:
            size = gradient[0].abs().reshape(len(gradient[0]), -1).amax(1).double()
            yield reader, torch.nan_to_num(size, nan=0.0).cpu()


def _persists_in_float64(
    session: AuditSession, path: CodePath, base: Inputs, reader: int, source: int, relative: float
) -> bool:
    """Does a small gradient remain when rounding is finer?"""
    if not session.supports_float64:
        return relative > 1e-6
    float64_path = path.but(dtype=torch.float64)
    try:
        with session.adapter.on_path(float64_path):
            out, embeddings = interventions.run_with_grad(session.adapter, base, float64_path)
            ((_, gradient),) = _position_gradients(out, embeddings, range(reader, reader + 1))
    except (CallError, interventions.UntracedError, ValueError):
        return relative > 1e-6
    relative_float64 = float(gradient[source]) / max(float(gradient.max()), 1e-300)
    return relative_float64 > relative / 100 and (
        session.is_pure_float64(float64_path) or relative_float64 > 1e-6 or relative_float64 < 1e-9
    )


# -- length ------------------------------------------------------------------------------------


def _length_probe(session: AuditSession, path: CodePath, length_pairs: Sequence[tuple[int, int]]) -> None:
    """A sequence against its own prefix: not even the number of later positions may matter. length_pairs:
    (length of the prefix, how many positions follow)
    """
    adapter = session.adapter
    if path.train and (adapter.random_in_training or path.dropout):
        return  # each shape draws other numbers
    for dtype_path in dict.fromkeys([session.in_float64(path), path]):
        limit = rounding.tolerance(session, dtype_path)
        for short_length, extra_length in session.within_budget(length_pairs, "future by length"):
            long_length = short_length + extra_length
            if long_length >= session.run_cache.rejected_length:
                continue
            if not session.accepts_length(dtype_path, long_length):
                continue
            label = f"future by length, {dtype_path.label(1, long_length)}"
            with session.skip_on_error(label), adapter.on_path(dtype_path):
                long_allowed = session.allowed_mask(long_length)[:short_length]
                short_allowed = session.allowed_mask(short_length)
                if long_allowed[:, short_length:].any() or not torch.equal(
                    short_allowed, long_allowed[:, :short_length]
                ):
                    return  # the claim itself depends on the length
                if not _prefix_unchanged(session, dtype_path, short_length, long_length, limit):
                    return


def _length_pairs(session: AuditSession) -> list[tuple[int, int]]:
    """On the plain path: (length, how many positions follow)."""
    adapter = session.adapter
    exhaustive = session.budget.exhaustive
    pairs = [(adapter.length, extra_length) for extra_length in (1, adapter.length)]
    if session.essential:
        return [*pairs, *((n, 1) for n in session.lengths[:3] if n > 2)]
    pairs += [(adapter.length, 2), (3, 1), (5, 4)]
    pairs += [(n, 1) for n in session.lengths[: 24 if exhaustive else 12] if n > 2]
    max_length = session.budget.max_length // 2
    pairs += [(n, n) for n in session.lengths[: 6 if exhaustive else 2] if 2 < n <= max_length]
    return pairs


def _short_length_pairs(session: AuditSession) -> list[tuple[int, int]]:
    """On a further path."""
    length = session.adapter.length
    return [(length, 1), (length // 2, length)]


def _prefix_unchanged(
    session: AuditSession, path: CodePath, short_length: int, long_length: int, limit: float
) -> bool:
    """False where a prefix gives another output by itself than within the longer sequence; that is reported
    unless a leak of the future is known already. limit: the largest relative change that is rounding.
    """
    adapter = session.adapter
    long_inputs = adapter.make_inputs(1, long_length, seed=long_length + 40)
    short_inputs = long_inputs.select_positions(slice(short_length))
    session.record_path(path, 1, long_length)
    # a second time if they differ: a model may keep a table (of rotary angles, say) that an earlier call
    # filled in lower precision, and that only the longer sequence fills anew
    for _ in range(2):
        short_output = adapter.run(short_inputs, path)
        long_output = adapter.run(long_inputs, path)[:, :short_length]
        change = rounding.max_change(short_output, long_output)[0].cpu()
        scale = rounding.scale(short_output)
        if not float(change.max()) / scale > limit:
            return True
    if session.has_finding("future"):
        return False
    reader = int(change.argmax())
    short_probe, long_probe = (
        findings.make_probe(session, path, inputs, 0, reader) for inputs in (short_inputs, long_inputs)
    )
    location, line = findings.locate(session, short_probe, long_probe, limit)
    session.add_finding(
        Finding(
            "future",
            reader,
            short_length,
            float(change[reader]) / scale,
            path.label(1, long_length),
            location.module,
            f"position {reader} changes when {long_length - short_length} more positions follow, from "
            f"{short_length} to {long_length}: something depends on the length, through "
            f"{location.module or adapter.name}; let nothing depend on what comes later, not even its "
            "amount.",
            "length",
            line,
            reproducer.script(
                session, path, short_inputs, long_inputs, (0, reader), (0, reader), up_to_rounding=True
            ),
        ),
        "length",
    )
    return False
