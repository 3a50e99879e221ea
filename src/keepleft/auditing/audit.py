"""One call: does a model look where it says it looks?"""

from __future__ import annotations

import platform
import random
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepleft.attention.masks import Mask, causal, window_size
from keepleft.auditing import isolation, rounding
from keepleft.auditing.argument_roles import EXCLUDED_ARGUMENTS, EXTRA_ARGUMENTS
from keepleft.auditing.checks import batch, cache, future, labels, nan, packing, padding
from keepleft.auditing.code_paths import BUDGETS, HALF_DTYPES, CodePath
from keepleft.auditing.model_adapter import CallError, Inputs, ModelAdapter, PaddingArgument, UnauditableError
from keepleft.auditing.op_counter import OpCounter
from keepleft.auditing.report import KINDS, AuditReport
from keepleft.auditing.session import PROBES, AuditSession


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
    layers: int | None = None,
    vocab: int | None = None,
    time: int = 1,
    limit: float | None = 60.0,
    on_progress: Callable[[str], None] | None = None,
) -> AuditReport:
    """Audit a module or any callable against a claim; the report names every leak, and what could not be
    checked.

    example: ids (B, T), features (B, T, D), or a dict of forward arguments; ours and Hugging Face's models
    need none. checks: some of future, padding, packing, cache, batch, nan, labels; budget: quick, standard or
    full. prefill(tokens) → (scores, state) and step(tokens, state) → scores: a cache that is not among the
    arguments; reorder(state, rows) puts its rows into another order. layers: how often a mask that forgets
    (window) is applied in turn. vocab: how many ids there are; time=0 where it is (T, B, D); limit: seconds
    for one call.
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
        adapter = ModelAdapter(
            target, example, vocab_size=vocab, time_axis=time, timeout_seconds=limit, claim=claim
        )
        session = AuditSession(
            adapter,
            claim,
            layers,
            BUDGETS[budget],
            selected_checks,
            selected_probes,
            on_progress=on_progress or (lambda _: None),
        )
        claimed: InfluenceTable = ()
        measured: InfluenceTable = ()
        try:
            with (
                _preserve_rng_state(),
                _limit_threads(session),
                isolation.preserve_state(adapter.module),
                isolation.randomize_zero_weights(adapter.module) as num_zero_weights,
            ):
                if num_zero_weights:
                    weights_phrase = "weight is" if num_zero_weights == 1 else "weights are"
                    session.note(
                        f"{num_zero_weights} {weights_phrase} all zero and would hide what stands behind: woken for the audit"
                    )
                _run_checks(session, prefill, step, reorder)
                claimed, measured = _measure_influence(session)
        except UnauditableError as error:
            session.skip("the audit", error, fatal=True)
        except CallError as error:
            session.skip("the audit", f"{adapter.name} broke off: {error}", fatal=True)
    if adapter.mutates_inputs:
        session.skip(
            "the verdict",
            f"{adapter.name} changes what it is given in place: copy the input first",
            fatal=True,
        )
    if adapter.mutates_buffers:
        session.note(
            "calls change its buffers (running statistics, say): they were put back before each call"
        )
    return AuditReport(
        adapter.name,
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
        adapter.num_calls,
        {"torch": torch.__version__, "python": platform.python_version(), "device": str(adapter.device)},
    )


MAX_WINDOW_LENGTH = 600  # positions, for a window to show
InfluenceTable = tuple[tuple[Any, ...], ...]


@contextmanager
def _preserve_rng_state() -> Iterator[None]:
    """Everyone's random numbers go on afterwards as if nothing had been."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
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


def _validate_arguments(prefill: Any, step: Any, layers: Any, vocab: Any, time: Any, limit: Any) -> None:
    if (prefill is None) != (step is None):
        raise ValueError("prefill= and step= belong together: give both, or neither")
    for name, value in (("layers", layers), ("vocab", vocab)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} is {value!r}: it must be a whole number, at least 1")
    if time not in (0, 1):
        raise ValueError(f"time is {time!r}: it is 1 for (B, T, …) and 0 for (T, B, …)")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
        raise ValueError(f"limit is {limit!r}: it must be seconds, more than 0, or None")


def _select_names(kind: str, requested: Sequence[str] | None, available: Sequence[str]) -> tuple[str, ...]:
    if requested is None:
        return tuple(available)
    requested = [requested] if isinstance(requested, str) else requested
    for name in requested:
        if name not in available:
            raise ValueError(f"there is no {kind} {name!r}: there are {', '.join(available)}")
    return tuple(name for name in available if name in requested)


def _run_checks(session: AuditSession, prefill: Any, step: Any, reorder: Any) -> None:
    """Every check on the paths that matter most, and then, where there is time, on all of them."""
    _smoke_test(session)
    _inspect(session)
    full_budget = session.budget
    for budget in (
        replace(BUDGETS["quick"], name=full_budget.name, seconds=full_budget.seconds),
        *((full_budget,) if full_budget.exhaustive else ()),
    ):
        session.budget = budget
        session.lengths = _lengths_to_try(session)
        _run_checks_once(session, prefill, step, reorder)
    for name in session.checks:
        if name not in session.checked and name in session.unchecked:
            session.blocked.append(session.unchecked[name])


def _run_checks_once(session: AuditSession, prefill: Any, step: Any, reorder: Any) -> None:
    paths = list(code_paths(session))
    main_paths = [
        path
        for path in paths
        if path.mask == "absent" and path.dtype is None and path.batch == 2 and not path.wrapped
    ]
    main_paths = (
        main_paths
        if session.budget.exhaustive
        else main_paths[:1]
        if session.reduced_coverage
        else main_paths[:2]
    )
    all_paths = [] if session.reduced_coverage else paths
    if session.reduced_coverage:
        paths = [path for path in paths if path.batch == 2 and path.dtype is None][:5]
    is_half = session.adapter.dtype in HALF_DTYPES  # too coarse for a loss to be explained
    check_runs: dict[str, Callable[[], None]] = {
        "future": lambda: future.future(session, paths),
        "batch": lambda: batch.batch(session, main_paths, all_paths),
        "nan": lambda: nan.nan(session, main_paths, all_paths),
        "padding": lambda: padding.padding(session, main_paths, all_paths),
        "packing": lambda: packing.packing(session, main_paths),
        "cache": lambda: cache.cache(session, main_paths, prefill, step, reorder),
        "labels": lambda: labels.labels(
            session, [path.but(dtype=torch.float32) for path in main_paths] if is_half else main_paths
        ),
    }
    for name, run_check in check_runs.items():
        if name not in session.checks:
            continue
        if name == "future" and session.claims_nothing:
            session.skip("future", f"the claim {session.claim} allows every position to read every other")
            continue
        if session.out_of_time:
            if name in session.checked:
                session.skip(f"{name}, further paths", session.out_of_time_message)
            elif not any(line.startswith(f"{name}: ") for line in session.skipped):
                session.mark_unchecked(name, session.out_of_time_message)
            continue
        comparisons_before = session.num_comparisons
        session.on_progress(name)
        run_check()
        if name in session.checked or any(line.startswith(f"{name}: ") for line in session.skipped):
            continue
        if session.num_comparisons > comparisons_before:
            session.checked.append(name)
        else:
            session.mark_unchecked(name, "nothing of it could be checked; the lines above say why")


def _smoke_test(session: AuditSession) -> None:
    """Does it run at all, the same each time, with an output for each position and numbers in it?"""
    adapter, path = session.adapter, CodePath()
    with adapter.on_path(path):
        try:
            _first_call(session, path)
        except CallError as error:
            raise UnauditableError(
                f"{adapter.name} does not run on {_describe_inputs(adapter)}: {error}"
            ) from error
        inputs, other_inputs = adapter.make_inputs(2), adapter.make_inputs(2, seed=1)
        versions = [p._version for p in _parameters(adapter)]
        output = adapter.run(inputs, path)
        if [p._version for p in _parameters(adapter)] != versions:
            raise UnauditableError(
                f"{adapter.name} changes its own weights when it is called: nothing can be compared; keep forward "
                "free of that"
            )
        finite = output.isfinite().flatten(2).any(2)
        if not finite.any():
            raise UnauditableError(
                f"{adapter.name} gives nothing but NaN or infinity: its weights or its input are broken"
            )
        if not finite.all() and "nan" not in session.checks:
            first_nan = int((~finite).nonzero()[0, 1])
            raise UnauditableError(
                f"{adapter.name} gives NaN at position {first_nan}: let the nan check look at it"
            )
        adapter.run(other_inputs, path)
        repeated = adapter.run(inputs, path)
        change = float(rounding.max_change(output, repeated).max()) / rounding.scale(output)
        if change > 1e-3:
            raise UnauditableError(
                f"{adapter.name} gives another output for the same input ({change:.2g} of the largest): it keeps "
                "state between calls or draws random numbers of its own; reset it in forward, or wrap it so that "
                "each call begins anew"
            )
        if _is_random(adapter, inputs, train=False):
            raise UnauditableError(
                f"{adapter.name} draws random numbers in eval mode: nothing can be compared; draw them in train "
                "mode only"
            )
        if change:
            session.note(
                f"the same input gives outputs {change:.2g} of the largest apart: kernels are not deterministic"
            )
        if not float(rounding.max_change(output, adapter.run(other_inputs, path)).max()):
            raise UnauditableError(
                f"{adapter.name} gives the same output whatever it is given: nothing can be seen of what it reads"
            )
        if adapter.padding_argument is not None and adapter.padding_argument.name == "mask":
            _detect_mask_polarity(adapter, path)


def _first_call(session: AuditSession, path: CodePath) -> None:
    """The first call.

    Some models take one length only; some give every position's scores only when targets are given.
    """
    adapter = session.adapter
    first_argument = adapter.main_argument
    for candidate in adapter.other_sequences():  # which of two sequences does the output follow?
        for main_argument, source_argument in ((first_argument, candidate), (candidate, first_argument)):
            try:
                adapter.set_inputs(main_argument, source_argument)
                adapter.run(adapter.make_inputs(2), path)
                return
            except (CallError, UnauditableError, ValueError):
                adapter.set_inputs(first_argument, None)
    try:
        adapter.run(adapter.make_inputs(2), path)
    except CallError:
        example = adapter.example_arguments.get(adapter.main_argument)
        if (
            example is None
            or example.shape[adapter.time_axis] == adapter.length
            or example.shape[adapter.time_axis] < 2
        ):
            raise
        adapter.length = example.shape[adapter.time_axis]
        adapter.run(adapter.make_inputs(2), path)
        session.note(f"it takes the example's length, {adapter.length}, but not every other")
    except UnauditableError:
        if adapter.signature.argument_for("targets") is None:
            raise
        adapter.needs_targets = True
        adapter.run(adapter.make_inputs(2), path)


def _detect_mask_polarity(adapter: ModelAdapter, path: CodePath) -> None:
    """A bare `mask`: is True a real token, or padding? What changes nothing says nothing of padding."""
    inputs = adapter.make_inputs(2)
    assert adapter.padding_argument is not None
    outputs: list[Tensor | None] = []
    for value in (
        None,
        torch.ones(2, adapter.length, dtype=torch.bool),
        torch.zeros(2, adapter.length, dtype=torch.bool),
    ):
        try:
            outputs.append(
                adapter.run(
                    inputs if value is None else inputs.but(extra={adapter.padding_argument.name: value}),
                    path,
                )
            )
        except CallError:
            outputs.append(None)
    if outputs[1] is None and outputs[2] is None:
        adapter.padding_argument = None  # it is no mask of tokens
    elif (
        outputs[0] is not None
        and outputs[2] is not None
        and torch.equal(outputs[0], outputs[2])
        and not (outputs[1] is not None and torch.equal(outputs[0], outputs[1]))
    ):
        adapter.padding_argument = PaddingArgument(adapter.padding_argument.name, "drop")


def _describe_inputs(adapter: ModelAdapter) -> str:
    inputs = adapter.make_inputs(2)
    return f"{adapter.main_argument} of shape {tuple(inputs.tokens.shape)}"


def _inspect(session: AuditSession) -> None:
    """What the first calls show: how many layers, whether it runs in double precision, which lengths may
    matter.
    """
    adapter, path = session.adapter, CodePath()
    inputs = adapter.make_inputs(2)
    with adapter.on_path(path), OpCounter() as op_counter:
        adapter.run(inputs, path)
    if session.layers is None and op_counter.num_attentions:
        session.layers = max(op_counter.num_attentions, adapter.facts.layers or 0)
    elif session.layers is None:
        session.layers = adapter.facts.layers or 1
    module = adapter.module
    session.quantized = module is not None and any(
        "quantized" in type(submodule).__module__ for submodule in module.modules()
    )
    if session.quantized:
        session.note(
            "the model is quantised, and one scale may serve all tokens: changes up to 0.2 of the largest output are "
            "taken for rounding"
        )
    session.supports_float64 = False
    if session.reduced_coverage:
        session.note("it is large, so the quick budget tries less, and in the model's own precision only")
    if (
        module is not None
        and not session.quantized
        and not session.reduced_coverage
        and adapter.dtype != torch.float64
        and _fits_float64_copy(module)
    ):
        float64_path = path.but(dtype=torch.float64)
        try:
            with adapter.on_path(float64_path):
                adapter.run(inputs, float64_path)
            session.supports_float64 = True
        except CallError as error:
            session.note(f"it does not run in float64 ({error}), so rounding is told from leaks less finely")
    if module is not None:
        adapter.has_functional_dropout = _is_random(adapter, inputs)
        adapter.random_in_training = adapter.has_functional_dropout and _is_random(adapter, inputs)
        if adapter.random_in_training:
            session.note(
                "in training it draws random numbers besides dropout: only calls of the same shape are compared there"
            )


def _parameters(adapter: ModelAdapter) -> list[Tensor]:
    return (
        [p for p in adapter.module.parameters() if not p.is_inference()] if adapter.module is not None else []
    )


def _is_random(adapter: ModelAdapter, inputs: Inputs, *, train: bool = True) -> bool:
    """Does the output depend on chance?"""
    path, outputs = CodePath(train=train), []
    try:
        for adapter.seed in (0, 1):
            with adapter.on_path(path):
                outputs.append(adapter.run(inputs, path))
    except CallError:
        return False
    finally:
        adapter.seed = 0
    return not torch.equal(torch.nan_to_num(outputs[0]), torch.nan_to_num(outputs[1]))


def _fits_float64_copy(module: nn.Module) -> bool:
    """Is there room for a copy twice as large?"""
    return sum(p.numel() * p.element_size() for p in module.parameters()) < 4 << 30


def _lengths_to_try(session: AuditSession) -> list[int]:
    """Below, at and above every whole number in the configuration, and twice as long; what matters most
    first.
    """
    max_length = session.budget.max_length
    candidates = dict.fromkeys([*_lengths_beyond_window(session), 1, 2])
    for n in session.adapter.facts.config_numbers:
        nearby_lengths = (n + 1, min(2 * n + 1, max(max_length, n + 2)), n, n - 1, n + 2)
        candidates |= dict.fromkeys(length for length in nearby_lengths if 1 <= length <= max_length)
    too_long = sorted(n for n in session.adapter.facts.config_numbers if n >= max_length)
    if too_long and session.budget.exhaustive:
        lengths_text = ", ".join(map(str, too_long[:8])) + (" …" if len(too_long) > 8 else "")
        session.skip("lengths beyond the budget's", f"{lengths_text}: texts of up to {max_length} were tried")
    remaining = [n for n in candidates if n != session.adapter.length]
    selected: list[int] = []
    cost = 0
    for n in remaining:
        if n in _lengths_beyond_window(session):
            selected.append(n)
        elif len(selected) < session.budget.max_lengths and (
            cost + n * n <= _length_cost_limit(session) or session.budget.seconds is None
        ):
            selected.append(n)
            cost += n * n
    return selected


def _lengths_beyond_window(session: AuditSession) -> list[int]:
    """A window is seen only in texts that are longer than it reaches through all layers."""
    window = window_size(session.claim)
    if window is None:
        return []
    min_length = (window - 1) * (session.layers or 1) + 2
    if min_length > MAX_WINDOW_LENGTH:
        session.mark_unchecked(
            "future",
            f"the window reaches {min_length - 1:,} positions through {session.layers} layers, and texts of up "
            f"to {MAX_WINDOW_LENGTH} are tried: audit a smaller window",
        )
        return []
    return [min_length, min_length + 3] if min_length > session.adapter.length - 2 else []


def _length_cost_limit(session: AuditSession) -> int:
    """How many pairs of positions the lengths may come to: fewer for a large model."""
    position_pairs = 30_000 if session.budget.name == "quick" else 300_000
    return int(position_pairs * min(1.0, 2e6 / max(session.adapter.num_parameters, 1)))


def code_paths(session: AuditSession) -> Iterator[CodePath]:
    """The code paths of this model, the plainest first."""
    adapter, exhaustive = session.adapter, session.budget.exhaustive
    module: Any = adapter.module
    default_path = CodePath()
    yield default_path
    if module is not None:
        yield default_path.but(train=True)
    alternatives: list[CodePath] = []
    if adapter.facts.is_huggingface and getattr(module, "_can_set_attn_implementation", lambda: False)():
        current = getattr(module.config, "_attn_implementation", None)
        for name in ("eager", "sdpa", *(("flex_attention",) if session.budget.name == "full" else ())):
            if name != current:
                alternatives.append(default_path.but(implementation=name))
        for name in ("flash_attention_2", *(() if session.budget.name == "full" else ("flex_attention",))):
            if getattr(module, f"_supports_{name.removesuffix('_2').removesuffix('ention')}", False):
                session.skip(
                    f"{name} attention",
                    "it needs a GPU and its package"
                    if "flash" in name
                    else "it compiles for minutes on a CPU; budget='full' does",
                )
    if module is not None:
        alternatives += [default_path.but(flag=flag) for flag in isolation.implementation_flags(module)[:6]]
    yield from alternatives
    if exhaustive:
        yield from (path.but(train=True) for path in alternatives)
    weights_argument = adapter.signature.argument_for("weights") or (
        "output_attentions" if adapter.facts.is_huggingface else None
    )
    if weights_argument is not None:
        current = bool(adapter.signature.defaults.get(weights_argument) or False)
        eager_option = (
            {"implementation": "eager"}
            if any(path.implementation == "eager" for path in alternatives)
            else {}
        )
        yield default_path.but(extra_arguments=((weights_argument, not current),), **eager_option)
        if exhaustive:
            yield default_path.but(
                extra_arguments=((weights_argument, not current),), train=True, **eager_option
            )
    extra_arguments = [
        name
        for name, value in adapter.signature.defaults.items()
        if isinstance(value, bool)
        and name != weights_argument
        and EXTRA_ARGUMENTS.search(name)
        and not EXCLUDED_ARGUMENTS.search(name)
    ]
    yield from (
        default_path.but(extra_arguments=((name, not adapter.signature.defaults[name]),))
        for name in extra_arguments[:6]
    )
    use_cache_argument = adapter.signature.argument_for("use_cache")
    if use_cache_argument is not None and exhaustive:
        yield from (
            default_path.but(extra_arguments=((use_cache_argument, value),)) for value in (True, False)
        )
    if adapter.padding_argument is not None:
        yield default_path.but(mask="ones")
        yield from (path.but(mask="ones") for path in (alternatives if exhaustive else ()))
        if exhaustive:
            yield default_path.but(mask="ones", train=True)
            if adapter.padding_argument.form == "keep":
                yield default_path.but(mask="boolean")
            if adapter.facts.is_huggingface:
                yield from (path.but(mask="square") for path in (default_path, *alternatives))
    yield from (default_path.but(batch=n) for n in ((1, 3) if exhaustive else (3,)))
    if exhaustive:
        yield default_path.but(train=True, batch=1)
        if adapter.padding_argument is not None:
            yield default_path.but(mask="ones", batch=1)
    if adapter.is_wrapped:
        yield default_path.but(wrapped=True)
    if module is not None and not session.quantized and (exhaustive or adapter.num_parameters < 1e7):
        for dtype in (torch.bfloat16, torch.float32, torch.float64)[: 3 if exhaustive else 2]:
            if dtype != adapter.dtype and (dtype != torch.float64 or session.supports_float64):
                yield default_path.but(dtype=dtype)
        if exhaustive and adapter.dtype == torch.float32:
            yield default_path.but(autocast=True)


def _measure_influence(session: AuditSession) -> tuple[InfluenceTable, InfluenceTable]:
    """Claimed and measured: one source at a time, on the plain path."""
    adapter = session.adapter
    if adapter.selector is None or (session.out_of_time and not session.findings):
        return (), ()
    length, path = adapter.length, CodePath()
    measured = torch.zeros(length, length)
    try:
        with adapter.on_path(path):
            inputs: Inputs = adapter.make_inputs(1, seed=7)
            output = adapter.run(inputs, path)
            new_tokens = adapter.sampler.resample(inputs.tokens, 8)
            for k in range(length):
                tokens = inputs.tokens.clone()
                tokens[:, k] = new_tokens[:, k]
                measured[:, k] = (
                    rounding.max_change(output, adapter.run(inputs.but(tokens=tokens), path))[0].float().cpu()
                )
    except (CallError, UnauditableError):
        return (), ()
    claimed = tuple(tuple(bool(allowed) for allowed in row) for row in session.allowed_mask(length).tolist())
    return claimed, tuple(
        tuple(float(x) for x in row) for row in (measured / rounding.scale(output)).tolist()
    )
