"""`audit`: does a model attend only where its claim says? The entry point, and the schedule of the checks."""

from __future__ import annotations

import platform
import random
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepleft.attention.masks import Mask, causal
from keepleft.auditing import isolation, module_state, rounding
from keepleft.auditing.cache_adapters import CacheCallables
from keepleft.auditing.call_forms import AuditAdapter
from keepleft.auditing.checks import batch, cache, future, labels, nan, packing, padding
from keepleft.auditing.checks.findings import remedy
from keepleft.auditing.checks.padded_loss import check_padded_loss
from keepleft.auditing.code_paths import (
    BUDGETS,
    ESSENTIAL,
    HALF_DTYPES,
    CodePath,
    code_paths,
    lengths_to_try,
    untried_paths,
)
from keepleft.auditing.first_calls import inspect_behaviour, smoke_test
from keepleft.auditing.likely_cause import likely_cause
from keepleft.auditing.model_adapter import CallError, ModelAdapter, UnauditableError
from keepleft.auditing.progress import AuditProgress, ProgressReporter
from keepleft.auditing.report import KINDS, AuditReport
from keepleft.auditing.session import PROBES, AuditSession

InfluenceTable = tuple[tuple[Any, ...], ...]  # (T, T)
# of the time of a budget, in the first round: a slow model gets something of each kind before more of any
FIRST_ROUND_SHARES = {
    "future": 0.35,
    "batch": 0.15,
    "nan": 0.1,
    "padding": 0.15,
    "packing": 0.1,
    "cache": 0.1,
}


def audit(
    target: Callable[..., Any],
    example: Tensor | Mapping[str, Any] | None = None,
    *,
    claim: Mask = causal,
    checks: Sequence[str] | None = None,
    budget: str = "standard",
    probes: Sequence[str] | None = None,
    prefill: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    reorder: Callable[..., Any] | None = None,
    adapter: AuditAdapter | None = None,
    layers: int | None = None,
    vocab: int | None = None,
    time: int = 1,
    limit: float | None = 60.0,
    on_progress: Callable[[AuditProgress], None] | None = None,
) -> AuditReport:
    """Audit a module or any callable against a claim. The report names every leak, and whatever could not be
    checked.

    example: token ids (B, T), features (B, T, D), or a dict of forward arguments; models of keepleft and of
    Hugging Face need none. checks: some of future, padding, packing, cache, batch, nan, labels. budget:
    quick, standard or full. prefill(tokens) → (logits, state) and step(tokens, state) → logits: a cache that
    is not among the arguments; reorder(state, rows) puts its rows into another order. adapter: how to call a
    model whose arguments or output are out of the ordinary. layers: how often a
    mask that forgets (window) is applied in turn. vocab: the number of token ids. time: 0 for a model that
    takes (T, B, D). limit: seconds for one call. on_progress: is called with each AuditProgress; what it
    raises ends the audit.
    """
    if not isinstance(claim, Mask):
        raise TypeError(
            f"the claim is {claim!r}: give a mask such as kl.causal, kl.causal & kl.window(3) or kl.full"
        )
    selected_checks = _select_names("check", checks, KINDS)
    selected_probes = _select_names("probe", probes, PROBES)
    if budget not in BUDGETS:
        raise ValueError(f"there is no budget {budget!r}: there are {', '.join(BUDGETS)}")
    _validate_arguments(prefill, step, layers, vocab, time, limit)
    started_at = clock.monotonic()
    with torch.inference_mode(False), torch.enable_grad():
        audited = ModelAdapter(
            target,
            example,
            vocab_size=vocab,
            time_axis=time,
            timeout_seconds=limit,
            claim=claim,
            form=adapter,
        )
        session = AuditSession(
            audited,
            claim,
            layers,
            BUDGETS[budget],
            selected_checks,
            selected_probes,
            progress=ProgressReporter(
                on_progress, seconds=BUDGETS[budget].seconds, count_calls=lambda: audited.num_calls
            ),
        )
        claimed: InfluenceTable = ()
        measured: InfluenceTable = ()
        not_tried: tuple[str, ...] = ()
        try:
            with (
                _preserve_rng_state(),
                _limit_threads(session),
                module_state.preserve_state(audited.module),
                module_state.preserve_contents(audited.module),
                isolation.randomize_zero_weights(audited.module) as num_zero_weights,
            ):
                session.num_randomized = num_zero_weights
                if num_zero_weights:
                    weights_phrase = "weight is" if num_zero_weights == 1 else "weights are"
                    session.note(
                        f"{num_zero_weights} {weights_phrase} all zero and would hide what lies behind "
                        f"{'it' if num_zero_weights == 1 else 'them'}: randomised for the audit"
                    )
                _run_checks(session, CacheCallables(prefill, step, reorder))
                not_tried = untried_paths(session)
                claimed, measured = _measure_influence(session)
                if cause := likely_cause(claimed, measured, session.layers):
                    session.explain_future(cause, [remedy("future", kind) for kind in ("", "attention")])
        except UnauditableError as error:
            session.skip("the audit", error, fatal=True)
        except CallError as error:
            session.skip("the audit", f"{audited.name} broke off: {error}", fatal=True)
    if audited.main_argument in audited.mutated_arguments:
        session.skip(
            "the verdict",
            f"{audited.name} changes what it is given in place: copy the input first",
            fatal=True,
        )
    elif audited.mutated_arguments:
        session.note(f"it changes {', '.join(sorted(audited.mutated_arguments))} in place: copy them first")
    if audited.mutates_buffers:
        session.note(
            "calls change its buffers (running statistics, say): they were restored before each call"
        )
    return AuditReport(
        audited.name,
        repr(claim),
        budget,
        tuple(session.findings.values()),
        tuple(session.skipped),
        tuple(session.notes),
        tuple(session.checked),
        tuple(session.path_labels),
        tuple(session.blocked),
        claimed,
        measured,
        clock.monotonic() - started_at,
        audited.model_seconds,
        audited.num_calls,
        {"torch": torch.__version__, "python": platform.python_version(), "device": str(audited.device)},
        not_tried,
    )


# -- arguments and surroundings ----------------------------------------------------------------


def _select_names(kind: str, requested: Sequence[str] | None, available: Sequence[str]) -> tuple[str, ...]:
    if requested is None:
        return tuple(available)
    requested = requested.replace(",", " ").split() if isinstance(requested, str) else requested
    for name in requested:
        if name not in available:
            raise ValueError(f"there is no {kind} {name!r}: there are {', '.join(available)}")
    return tuple(name for name in available if name in requested)


def _validate_arguments(
    prefill: object, step: object, layers: object, vocab: object, time: object, limit: object
) -> None:
    if (prefill is None) != (step is None):
        raise ValueError("prefill= and step= belong together: give both, or neither")
    for name, value in (("layers", layers), ("vocab", vocab)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} is {value!r}: it must be a whole number, at least 1")
    if time not in (0, 1):
        raise ValueError(f"time is {time!r}: it is 1 for (B, T, …) and 0 for (T, B, …)")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
        raise ValueError(f"limit is {limit!r}: it must be seconds, more than 0, or None")


@contextmanager
def _preserve_rng_state() -> Iterator[None]:
    """Restore the random state of Python, NumPy and PyTorch afterwards."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def _limit_threads(session: AuditSession) -> Iterator[None]:
    """One thread for a small model on a CPU: more would only wait for each other."""
    num_threads = torch.get_num_threads()
    if session.adapter.device.type == "cpu" and not session.is_large:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


# -- the schedule ------------------------------------------------------------------------------


def _run_checks(session: AuditSession, cache_callables: CacheCallables) -> None:
    """Every check on the paths that matter most, and then, where the budget allows, on all of them; a large
    model gets one pass of every kind before more of any.
    """
    smoke_test(session)
    inspect_behaviour(session)
    full_budget = session.budget
    budgets = [full_budget.of_round(BUDGETS["quick"])]
    if session.is_large:
        budgets.insert(0, full_budget.of_round(ESSENTIAL))
    if full_budget.exhaustive:
        budgets.append(full_budget)
    session.progress.num_passes = len(budgets)
    for budget in budgets:
        session.budget = budget
        session.lengths = lengths_to_try(session)
        _run_checks_once(session, cache_callables, FIRST_ROUND_SHARES if budget is budgets[0] else {})
        session.limit_check(1.0)
        if "future" in session.checks and session.takes_every_length:
            future.every_length(session)
    for name in session.checks:
        if name not in session.checked and name in session.unchecked:
            session.blocked.append(session.unchecked[name])


def _run_checks_once(
    session: AuditSession, cache_callables: CacheCallables, time_shares: Mapping[str, float]
) -> None:
    """time_shares: how much of the time a check may take, by its name; all of it where it is not there."""
    all_paths = paths = list(code_paths(session))
    main_paths = [path for path in paths if path.is_usual]
    if session.essential:
        all_paths = []
        main_paths = main_paths[:1]
        paths = [path for path in paths if path.batch == 2 and path.dtype is None][:3]
    elif not session.budget.exhaustive:
        main_paths = main_paths[:2]
    label_paths = main_paths
    if session.adapter.dtype in HALF_DTYPES:  # too coarse to tell which logits explain a loss
        label_paths = [path.but(dtype=torch.float32) for path in main_paths]
    check_runs: dict[str, Callable[[], None]] = {
        "future": lambda: future.future(session, paths),
        "batch": lambda: batch.batch(session, main_paths, all_paths),
        "nan": lambda: nan.nan(session, main_paths, all_paths),
        "padding": lambda: _check_padding(session, main_paths, all_paths),
        "packing": lambda: packing.packing(session, main_paths),
        "cache": lambda: cache.cache(session, main_paths, cache_callables),
        "labels": lambda: labels.labels(session, label_paths),
    }
    check_runs = {name: run_check for name, run_check in check_runs.items() if name in session.checks}
    session.progress.start_pass(list(check_runs))
    for name, run_check in check_runs.items():
        session.progress.start_check(name)
        session.limit_check(time_shares.get(name, 0.1 if time_shares else 1.0))
        _run_check(session, name, run_check)
        if session.progress.is_last_pass:
            session.progress.end_check(*session.outcome(name))


def _check_padding(
    session: AuditSession, main_paths: Sequence[CodePath], all_paths: Sequence[CodePath]
) -> None:
    """Of outputs, and of the loss that the model gives itself."""
    padding.padding(session, main_paths, all_paths)
    loss_paths = () if session.essential else main_paths[:2]
    for path in session.within_budget(loss_paths, "padding, the loss"):
        check_padded_loss(session, path)


def _run_check(session: AuditSession, name: str, run_check: Callable[[], None]) -> None:
    """Run one check, and record whether it was made."""

    def was_skipped() -> bool:
        return any(line.startswith(f"{name}: ") for line in session.skipped)

    if name == "future" and session.claims_nothing:
        if name not in session.unchecked:
            session.skip("future", f"the claim {session.claim} allows every position to read every other")
        return
    if session.out_of_time:
        if name in session.checked:
            session.skip(f"{name}, further paths", session.out_of_time_message)
        elif not was_skipped():
            session.mark_unchecked(name, session.out_of_time_message)
        return
    comparisons_before = session.num_comparisons
    run_check()
    if name in session.checked or was_skipped():
        return
    if session.num_comparisons > comparisons_before:
        session.checked.append(name)
    else:
        session.mark_unchecked(name, "nothing of it could be checked; the lines above say why")


# -- the influence map -------------------------------------------------------------------------


def _measure_influence(session: AuditSession) -> tuple[InfluenceTable, InfluenceTable]:
    """Which position may influence which, and which one does, by how much: one source changed at a time, on
    the plain path. Empty where that could not be measured.
    """
    adapter = session.adapter
    if adapter.selector is None or (session.out_of_time and not session.findings):
        return (), ()
    length = adapter.length
    path = CodePath()
    # a large model gets all sources in one batch, unless its rows move each other
    batch_size = length if session.is_large and not session.has_finding("batch") else 1
    measured = torch.zeros(length, length)
    try:
        with adapter.on_path(path):
            inputs = adapter.make_inputs(1, seed=7).select_rows(torch.zeros(batch_size, dtype=torch.long))
            output = adapter.run(inputs, path)
            new_tokens = adapter.sampler.resample(inputs.tokens, 8)
            for start in range(0, length, batch_size):
                sources = torch.arange(start, start + batch_size)
                tokens = inputs.tokens.clone()
                tokens[torch.arange(batch_size), sources] = new_tokens[torch.arange(batch_size), sources]
                changed_output = adapter.run(inputs.but(tokens=tokens), path)
                change = rounding.max_change(output, changed_output)
                measured[:, sources] = change.T.float().cpu()
    except (CallError, UnauditableError):
        return (), ()
    relative = (measured / rounding.scale(output)).tolist()
    claimed = session.allowed_mask(length).tolist()
    return tuple(map(tuple, claimed)), tuple(map(tuple, relative))
