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
from keepleft.auditing import guard, rounding
from keepleft.auditing.checks import batch, cache, future, labels, nan, packing, padding
from keepleft.auditing.inquiry import PROBES, Inquiry
from keepleft.auditing.report import KINDS, Report
from keepleft.auditing.roles import ASKED, OTHERWISE
from keepleft.auditing.seen import Seen
from keepleft.auditing.subject import Call, CallError, Reader, Subject, UnfitError
from keepleft.auditing.ways import BUDGETS, COARSE, Way


def audit(target: Callable[..., Any], example: Tensor | Mapping[str, Any] | None = None, *, claim: Mask = causal,
          checks: Sequence[str] | None = None, budget: str = "standard", probes: Sequence[str] | None = None,
          prefill: Callable[..., Any] | None = None, step: Callable[..., Any] | None = None,
          reorder: Callable[..., Any] | None = None, layers: int | None = None, vocab: int | None = None, time: int = 1,
          limit: float | None = 60.0, tell: Callable[[str], None] | None = None) -> Report:
    """Audit a module or any callable against a claim; the report names every leak, and what could not be checked.

    example: ids (B, T), features (B, T, D), or a dict of forward arguments; ours and Hugging Face's models need none.
    checks: some of future, padding, packing, cache, batch, nan, labels; budget: quick, standard or full.
    prefill(tokens) → (scores, state) and step(tokens, state) → scores: a cache that is not among the arguments;
    reorder(state, rows) puts its rows into another order. layers: how often a mask that forgets (window) is applied in turn.
    vocab: how many ids there are; time=0 where it is (T, B, D); limit: seconds for one call.
    """
    if not isinstance(claim, Mask):
        raise TypeError(f"the claim is {claim!r}: give a mask such as kl.causal, kl.causal & kl.window(3) or kl.full")
    chosen = _among("check", checks, KINDS)
    tried = _among("probe", probes, PROBES)
    if budget not in BUDGETS:
        raise ValueError(f"there is no budget {budget!r}: there are {', '.join(BUDGETS)}")
    _sensible(prefill, step, layers, vocab, time, limit)
    began = clock.monotonic()
    with torch.inference_mode(False), torch.enable_grad():
        subject = Subject(target, example, vocab=vocab, time=time, limit=limit, claim=claim)
        inquiry = Inquiry(subject, claim, layers, BUDGETS[budget], chosen, tried, tell=tell or (lambda _: None))
        claimed: Table = ()
        measured: Table = ()
        try:
            with _chance(), _threads(inquiry), guard.kept(subject.module), guard.woken(subject.module) as asleep:
                if asleep:
                    many = "weight is" if asleep == 1 else "weights are"
                    inquiry.note(f"{asleep} {many} all zero and would hide what stands behind: woken for the audit")
                _audited(inquiry, prefill, step, reorder)
                claimed, measured = _influence(inquiry)
        except UnfitError as error:
            inquiry.skip("the audit", error, fatal=True)
        except CallError as error:
            inquiry.skip("the audit", f"{subject.name} broke off: {error}", fatal=True)
    if subject.mutated:
        inquiry.skip("the verdict", f"{subject.name} changes what it is given in place: copy the input first", fatal=True)
    if subject.moves:
        inquiry.note("calls change its buffers (running statistics, say): they were put back before each call")
    return Report(subject.name, repr(claim), budget, tuple(inquiry.findings.values()), tuple(inquiry.skipped),
                  tuple(inquiry.notes), tuple(inquiry.checked), tuple(inquiry.paths), tuple(inquiry.blocked), claimed, measured,
                  clock.monotonic() - began, subject.calls,
                  {"torch": torch.__version__, "python": platform.python_version(), "device": str(subject.device)})


FARTHEST = 600  # positions, for a window to show
Table = tuple[tuple[Any, ...], ...]


@contextmanager
def _chance() -> Iterator[None]:
    """Everyone's random numbers go on afterwards as if nothing had been."""
    own, many = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(own)
            np.random.set_state(many)


@contextmanager
def _threads(inquiry: Inquiry) -> Iterator[None]:
    """One thread for a small model on a CPU: more would only wait for each other."""
    before = torch.get_num_threads()
    if inquiry.subject.device.type == "cpu" and not inquiry.large:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _sensible(prefill: Any, step: Any, layers: Any, vocab: Any, time: Any, limit: Any) -> None:
    if (prefill is None) != (step is None):
        raise ValueError("prefill= and step= belong together: give both, or neither")
    for name, value in (("layers", layers), ("vocab", vocab)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} is {value!r}: it must be a whole number, at least 1")
    if time not in (0, 1):
        raise ValueError(f"time is {time!r}: it is 1 for (B, T, …) and 0 for (T, B, …)")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
        raise ValueError(f"limit is {limit!r}: it must be seconds, more than 0, or None")


def _among(what: str, given: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    if given is None:
        return tuple(known)
    given = [given] if isinstance(given, str) else given
    for name in given:
        if name not in known:
            raise ValueError(f"there is no {what} {name!r}: there are {', '.join(known)}")
    return tuple(name for name in known if name in given)


def _audited(inquiry: Inquiry, prefill: Any, step: Any, reorder: Any) -> None:
    """Every check on the paths that matter most, and then, where there is time, on all of them."""
    _first(inquiry)
    _learned(inquiry)
    whole = inquiry.budget
    for budget in (replace(BUDGETS["quick"], name=whole.name, seconds=whole.seconds), *((whole,) if whole.broad else ())):
        inquiry.budget = budget
        inquiry.lengths = _lengths(inquiry)
        _round(inquiry, prefill, step, reorder)
    for name in inquiry.checks:
        if name not in inquiry.checked and name in inquiry.undone:
            inquiry.blocked.append(inquiry.undone[name])


def _round(inquiry: Inquiry, prefill: Any, step: Any, reorder: Any) -> None:
    ways = list(offered(inquiry))
    few = [way for way in ways if way.mask == "absent" and way.dtype is None and way.batch == 2 and not way.wrapped]
    few = few if inquiry.budget.broad else few[:1] if inquiry.brief else few[:2]
    every = [] if inquiry.brief else ways
    if inquiry.brief:
        ways = [way for way in ways if way.batch == 2 and way.dtype is None][:5]
    half = inquiry.subject.dtype in COARSE  # too coarse for a loss to be explained
    steps: dict[str, Callable[[], None]] = {
        "future": lambda: future.future(inquiry, ways),
        "batch": lambda: batch.batch(inquiry, few, every),
        "nan": lambda: nan.nan(inquiry, few, every),
        "padding": lambda: padding.padding(inquiry, few, every),
        "packing": lambda: packing.packing(inquiry, few),
        "cache": lambda: cache.cache(inquiry, few, prefill, step, reorder),
        "labels": lambda: labels.labels(inquiry, [way.but(dtype=torch.float32) for way in few] if half else few),
    }
    for name, go in steps.items():
        if name not in inquiry.checks:
            continue
        if name == "future" and inquiry.silent:
            inquiry.skip("future", f"the claim {inquiry.claim} allows every position to read every other")
            continue
        if inquiry.late:
            if name in inquiry.checked:
                inquiry.skip(f"{name}, further paths", inquiry.up)
            elif not any(line.startswith(f"{name}: ") for line in inquiry.skipped):
                inquiry.fail(name, inquiry.up)
            continue
        calls = inquiry.done
        inquiry.tell(name)
        go()
        if name in inquiry.checked or any(line.startswith(f"{name}: ") for line in inquiry.skipped):
            continue
        if inquiry.done > calls:
            inquiry.checked.append(name)
        else:
            inquiry.fail(name, "nothing of it could be checked; the lines above say why")


def _first(inquiry: Inquiry) -> None:
    """Does it run at all, the same each time, with an output for each position and numbers in it?"""
    subject, way = inquiry.subject, Way()
    with subject.on(way):
        try:
            _begun(inquiry, way)
        except CallError as error:
            raise UnfitError(f"{subject.name} does not run on {_shown(subject)}: {error}") from error
        one, other = subject.call(2), subject.call(2, seed=1)
        weights = [p._version for p in _weights(subject)]
        first = subject.run(one, way)
        if [p._version for p in _weights(subject)] != weights:
            raise UnfitError(f"{subject.name} changes its own weights when it is called: nothing can be compared; keep forward "
                             "free of that")
        sound = first.isfinite().flatten(2).any(2)
        if not sound.any():
            raise UnfitError(f"{subject.name} gives nothing but NaN or infinity: its weights or its input are broken")
        if not sound.all() and "nan" not in inquiry.checks:
            first_bad = int((~sound).nonzero()[0, 1])
            raise UnfitError(f"{subject.name} gives NaN at position {first_bad}: let the nan check look at it")
        subject.run(other, way)
        again = subject.run(one, way)
        change = float(rounding.moved(first, again).max()) / rounding.scale(first)
        if change > 1e-3:
            raise UnfitError(f"{subject.name} gives another output for the same input ({change:.2g} of the largest): it keeps "
                             "state between calls or draws random numbers of its own; reset it in forward, or wrap it so that "
                             "each call begins anew")
        if _draws(subject, one, train=False):
            raise UnfitError(f"{subject.name} draws random numbers in eval mode: nothing can be compared; draw them in train "
                             "mode only")
        if change:
            inquiry.note(f"the same input gives outputs {change:.2g} of the largest apart: kernels are not deterministic")
        if not float(rounding.moved(first, subject.run(other, way)).max()):
            raise UnfitError(f"{subject.name} gives the same output whatever it is given: nothing can be seen of what it reads")
        if subject.reader is not None and subject.reader.name == "mask":
            _polarity(subject, way)


def _begun(inquiry: Inquiry, way: Way) -> None:
    """The first call. Some models take one length only; some give every position's scores only when targets are given."""
    subject = inquiry.subject
    first = subject.main
    for rival in subject.rivals():  # which of two sequences does the output follow?
        for main, looked in ((first, rival), (rival, first)):
            try:
                subject.look(main, looked)
                subject.run(subject.call(2), way)
                return
            except (CallError, UnfitError, ValueError):
                subject.look(first, None)
    try:
        subject.run(subject.call(2), way)
    except CallError:
        given = subject.given.get(subject.main)
        if given is None or given.shape[subject.time] == subject.length or given.shape[subject.time] < 2:
            raise
        subject.length = given.shape[subject.time]
        subject.run(subject.call(2), way)
        inquiry.note(f"it takes the example's length, {subject.length}, but not every other")
    except UnfitError:
        if subject.sig.role("targets") is None:
            raise
        subject.last_only = True
        subject.run(subject.call(2), way)


def _polarity(subject: Subject, way: Way) -> None:
    """A bare `mask`: is True a real token, or padding? What changes nothing says nothing of padding."""
    call = subject.call(2)
    assert subject.reader is not None
    outs: list[Tensor | None] = []
    for value in (None, torch.ones(2, subject.length, dtype=torch.bool), torch.zeros(2, subject.length, dtype=torch.bool)):
        try:
            outs.append(subject.run(call if value is None else call.but(extra={subject.reader.name: value}), way))
        except CallError:
            outs.append(None)
    if outs[1] is None and outs[2] is None:
        subject.reader = None  # it is no mask of tokens
    elif outs[0] is not None and outs[2] is not None and torch.equal(outs[0], outs[2]) and not (
            outs[1] is not None and torch.equal(outs[0], outs[1])):
        subject.reader = Reader(subject.reader.name, "drop")


def _shown(subject: Subject) -> str:
    call = subject.call(2)
    return f"{subject.main} of shape {tuple(call.tokens.shape)}"


def _learned(inquiry: Inquiry) -> None:
    """What the first calls show: how many layers, whether it runs in double precision, which lengths may matter."""
    subject, way = inquiry.subject, Way()
    call = subject.call(2)
    with subject.on(way), Seen() as seen:
        subject.run(call, way)
    if inquiry.layers is None and seen.attentions:
        inquiry.layers = max(seen.attentions, subject.facts.layers or 0)
    elif inquiry.layers is None:
        inquiry.layers = subject.facts.layers or 1
    module = subject.module
    inquiry.quantised = module is not None and any("quantized" in type(part).__module__ for part in module.modules())
    if inquiry.quantised:
        inquiry.note("the model is quantised, and one scale may serve all tokens: changes up to 0.2 of the largest output are "
                     "taken for rounding")
    inquiry.double = False
    if inquiry.brief:
        inquiry.note("it is large, so the quick budget tries less, and in the model's own precision only")
    if module is not None and not inquiry.quantised and not inquiry.brief and subject.dtype != torch.float64 and _small(module):
        fine = way.but(dtype=torch.float64)
        try:
            with subject.on(fine):
                subject.run(call, fine)
            inquiry.double = True
        except CallError as error:
            inquiry.note(f"it does not run in float64 ({error}), so rounding is told from leaks less finely")
    if module is not None:
        subject.drops = _draws(subject, call)
        subject.random = subject.drops and _draws(subject, call)
        if subject.random:
            inquiry.note("in training it draws random numbers besides dropout: only calls of the same shape are compared there")


def _weights(subject: Subject) -> list[Tensor]:
    return [p for p in subject.module.parameters() if not p.is_inference()] if subject.module is not None else []


def _draws(subject: Subject, call: Call, *, train: bool = True) -> bool:
    """Does the output depend on chance?"""
    way, outs = Way(train=train), []
    try:
        for subject.seed in (0, 1):
            with subject.on(way):
                outs.append(subject.run(call, way))
    except CallError:
        return False
    finally:
        subject.seed = 0
    return not torch.equal(torch.nan_to_num(outs[0]), torch.nan_to_num(outs[1]))


def _small(module: nn.Module) -> bool:
    """Is there room for a copy twice as large?"""
    return sum(p.numel() * p.element_size() for p in module.parameters()) < 4 << 30


def _lengths(inquiry: Inquiry) -> list[int]:
    """Below, at and above every whole number in the configuration, and twice as long; what matters most first."""
    most, out = inquiry.budget.longest, dict.fromkeys([*_beyond(inquiry), 1, 2])
    for n in inquiry.subject.facts.numbers:
        some = (n + 1, min(2 * n + 1, max(most, n + 2)), n, n - 1, n + 2)
        out |= dict.fromkeys(length for length in some if 1 <= length <= most)
    beyond = sorted(n for n in inquiry.subject.facts.numbers if n >= most)
    if beyond and inquiry.budget.broad:
        told = ", ".join(map(str, beyond[:8])) + (" …" if len(beyond) > 8 else "")
        inquiry.skip("lengths beyond the budget's", f"{told}: texts of up to {most} were tried")
    known = [n for n in out if n != inquiry.subject.length]
    kept: list[int] = []
    cost = 0
    for n in known:
        if n in _beyond(inquiry):
            kept.append(n)
        elif len(kept) < inquiry.budget.lengths and (cost + n * n <= _worth(inquiry) or inquiry.budget.seconds is None):
            kept.append(n)
            cost += n * n
    return kept


def _beyond(inquiry: Inquiry) -> list[int]:
    """A window is seen only in texts that are longer than it reaches through all layers."""
    window = window_size(inquiry.claim)
    if window is None:
        return []
    needed = (window - 1) * (inquiry.layers or 1) + 2
    if needed > FARTHEST:
        inquiry.fail("future", f"the window reaches {needed - 1:,} positions through {inquiry.layers} layers, and texts of up "
                     f"to {FARTHEST} are tried: audit a smaller window")
        return []
    return [needed, needed + 3] if needed > inquiry.subject.length - 2 else []


def _worth(inquiry: Inquiry) -> int:
    """How many pairs of positions the lengths may come to: fewer for a large model."""
    pairs = 30_000 if inquiry.budget.name == "quick" else 300_000
    return int(pairs * min(1.0, 2e6 / max(inquiry.subject.weights, 1)))


def offered(inquiry: Inquiry) -> Iterator[Way]:
    """The code paths of this model, the plainest first."""
    subject, broad = inquiry.subject, inquiry.budget.broad
    module: Any = subject.module
    plain = Way()
    yield plain
    if module is not None:
        yield plain.but(train=True)
    offers: list[Way] = []
    if subject.facts.hugging and getattr(module, "_can_set_attn_implementation", lambda: False)():
        now = getattr(module.config, "_attn_implementation", None)
        for name in ("eager", "sdpa", *(("flex_attention",) if inquiry.budget.name == "full" else ())):
            if name != now:
                offers.append(plain.but(implementation=name))
        for name in ("flash_attention_2", *(() if inquiry.budget.name == "full" else ("flex_attention",))):
            if getattr(module, f"_supports_{name.removesuffix('_2').removesuffix('ention')}", False):
                inquiry.skip(f"{name} attention", "it needs a GPU and its package" if "flash" in name else
                             "it compiles for minutes on a CPU; budget='full' does")
    if module is not None:
        offers += [plain.but(flag=flag) for flag in guard.flags(module)[:6]]
    yield from offers
    if broad:
        yield from (way.but(train=True) for way in offers)
    weights = subject.sig.role("weights") or ("output_attentions" if subject.facts.hugging else None)
    if weights is not None:
        now = bool(subject.sig.defaults.get(weights) or False)
        eager = {"implementation": "eager"} if any(way.implementation == "eager" for way in offers) else {}
        yield plain.but(asked=((weights, not now),), **eager)
        if broad:
            yield plain.but(asked=((weights, not now),), train=True, **eager)
    more = [name for name, value in subject.sig.defaults.items() if isinstance(value, bool) and name != weights
            and ASKED.search(name) and not OTHERWISE.search(name)]
    yield from (plain.but(asked=((name, not subject.sig.defaults[name]),)) for name in more[:6])
    use = subject.sig.role("use_cache")
    if use is not None and broad:
        yield from (plain.but(asked=((use, value),)) for value in (True, False))
    if subject.reader is not None:
        yield plain.but(mask="ones")
        yield from (way.but(mask="ones") for way in (offers if broad else ()))
        if broad:
            yield plain.but(mask="ones", train=True)
            if subject.reader.form == "keep":
                yield plain.but(mask="boolean")
            if subject.facts.hugging:
                yield from (way.but(mask="square") for way in (plain, *offers))
    yield from (plain.but(batch=n) for n in ((1, 3) if broad else (3,)))
    if broad:
        yield plain.but(train=True, batch=1)
        if subject.reader is not None:
            yield plain.but(mask="ones", batch=1)
    if subject.wrapped:
        yield plain.but(wrapped=True)
    if module is not None and not inquiry.quantised and (broad or subject.weights < 1e7):
        for kind in (torch.bfloat16, torch.float32, torch.float64)[:3 if broad else 2]:
            if kind != subject.dtype and (kind != torch.float64 or inquiry.double):
                yield plain.but(dtype=kind)
        if broad and subject.dtype == torch.float32:
            yield plain.but(autocast=True)


def _influence(inquiry: Inquiry) -> tuple[Table, Table]:
    """Claimed and measured: one source at a time, on the plain path."""
    subject = inquiry.subject
    if subject.selector is None or (inquiry.late and not inquiry.findings):
        return (), ()
    length, way = subject.length, Way()
    measured = torch.zeros(length, length)
    try:
        with subject.on(way):
            base: Call = subject.call(1, seed=7)
            out = subject.run(base, way)
            new = subject.words.others(base.tokens, 8)
            for k in range(length):
                tokens = base.tokens.clone()
                tokens[:, k] = new[:, k]
                measured[:, k] = rounding.moved(out, subject.run(base.but(tokens=tokens), way))[0].float().cpu()
    except (CallError, UnfitError):
        return (), ()
    claimed = tuple(tuple(bool(seen) for seen in row) for row in inquiry.allowed(length).tolist())
    return claimed, tuple(tuple(float(x) for x in row) for row in (measured / rounding.scale(out)).tolist())
