"""How a model is taken through a text piece by piece: whatever its cache is called and wherever it is kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import outputs
from keepleft.auditing.roles import NAMES
from keepleft.auditing.subject import Call, CallError, Subject
from keepleft.auditing.ways import Way

CACHES = tuple(NAMES["cache"].split())
STATES = frozenset((*CACHES, "states", "carry", "memory"))
GROWING = "a growing cache"


@dataclass
class Stepper:
    """`go` gives a piece and the state so far; None as state begins anew."""

    subject: Subject
    step: Callable[[Call, int, int, Any, str, Way], tuple[Tensor, Any]]
    kinds: tuple[str, ...] = ("its cache",)
    reorder: Callable[..., Any] | None = None

    def go(self, call: Call, at: int, size: int, state: Any, kind: str, way: Way) -> tuple[Tensor, Any]:
        with torch.no_grad():
            return self.step(call, at, size, state, kind, way)

    def turned(self, state: Any, rows: Tensor) -> Any:
        """The state with its rows in another order; None where it has no way of its own."""
        rows = rows.to(self.subject.device)
        if self.reorder is not None:
            out = self.reorder(state, rows)
            return state if out is None else out
        for name in ("reorder_cache", "reorder", "keep", "batch_select_indices", "select_rows"):
            method = getattr(state, name, None)
            if callable(method):
                try:
                    out = method(rows)
                except Exception as error:
                    raise CallError(f"{name} does not work: {type(error).__name__}: {error}") from error
                return state if out is None else out
        return None


def stepper(subject: Subject, prefill: Callable[..., Any] | None, step: Callable[..., Any] | None,
            reorder: Callable[..., Any] | None) -> Stepper | None:
    """The way this model offers, if it offers one."""
    if (prefill is None) != (step is None):
        raise ValueError("prefill= and step= belong together: give both, or neither")
    module: Any = subject.module
    if prefill is not None and step is not None:
        return _by_calls(subject, prefill, step, reorder)
    if subject.facts.ours:
        return _ours(subject) if hasattr(module, "start") else None
    for first, more in (("start", "step"), ("prefill", "step"), ("prefill", "decode"), ("prefill", "decode_step"),
                        ("prefill", "decode_one")):
        if module is not None and callable(getattr(module, first, None)) and callable(getattr(module, more, None)):
            return _by_calls(subject, getattr(module, first), getattr(module, more), reorder)
    if subject.sig.role("start") is not None:
        return _by_start(subject, reorder)
    name = next((name for name in CACHES if name in subject.sig.names), None)
    if name is not None:
        return _by_argument(subject, name, reorder)
    return None


def _cut(call: Call, at: int, size: int) -> Call:
    return call.but(tokens=call.tokens[:, at:at + size])


def _by_calls(subject: Subject, prefill: Callable[..., Any], step: Callable[..., Any],
              reorder: Callable[..., Any] | None) -> Stepper:
    """prefill(tokens) → (scores, state) or state; step(tokens, state) → scores, or (scores, state)."""
    turned = _state_first(step)

    def go(call: Call, at: int, size: int, state: Any, kind: str, way: Way) -> tuple[Tensor, Any]:
        tokens = subject.placed(call.tokens[:, at:at + size])
        source = () if call.source is None or state is not None else (subject.placed(call.source),)
        if state is None:
            out = subject.invoke(prefill, {}, *source, tokens)
            scores, held = _divided(out, size)
            if scores is None:
                raise CallError("prefill gives no scores: let it return (scores, state)")
            return scores, _Held(held)
        given = (state.value, tokens) if turned else (tokens, state.value)
        out = subject.invoke(step, {}, *given) if state.given else subject.invoke(step, {}, tokens)
        scores, held = _divided(out, size)
        if scores is None:
            raise CallError("step gives no scores: let it return scores, or (scores, state)")
        return scores, _Held(state.value if held is None else held)

    return Stepper(subject, go, reorder=reorder)


@dataclass
class _Held:
    """A state that may be kept by the callables themselves."""

    value: Any

    @property
    def given(self) -> bool:
        return self.value is not None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "value":
            raise AttributeError(name)
        return getattr(self.value, name)


def _state_first(step: Callable[..., Any]) -> bool:
    try:
        names = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        return False
    return bool(names) and names[0] in STATES


def _divided(out: Any, size: int) -> tuple[Tensor | None, Any]:
    """Scores and state: the first floating tensor, and what else there is."""
    if isinstance(out, Tensor):
        return out, None
    if isinstance(out, tuple | list) and len(out) == 2:
        if isinstance(out[0], Tensor):
            return out[0], out[1]
        if isinstance(out[1], Tensor) and not isinstance(out[0], Tensor):
            return out[1], out[0]
    scores = outputs.find(out, outputs.PREFERRED)
    held = outputs.find(out, (*CACHES, "states"))
    return scores, held


def _ours(subject: Subject) -> Stepper:
    """start and step, with every kind of cache."""
    model: Any = subject.module

    def go(call: Call, at: int, size: int, state: Any, kind: str, way: Way) -> tuple[Tensor, Any]:
        tokens = subject.placed(call.tokens[:, at:at + size])
        if state is not None:
            return subject.invoke(model.step, {}, tokens, state), state
        memory = {} if call.source is None else {"memory": model.read(subject.placed(call.source))}
        capacity = {"capacity": call.tokens.shape[1]} if kind == "static" else {}
        scores, made = subject.invoke(lambda tokens: model.start(tokens, cache=kind, **memory, **capacity), {}, tokens)
        return scores, made

    windows = all(getattr(mask, "size", None) or "window" in repr(mask) for mask in model.decoder.masks)
    return Stepper(subject, go, ("growing", "static", *(("ring",) if windows else ())))


def _by_start(subject: Subject, reorder: Callable[..., Any] | None) -> Stepper:
    """forward(tokens, start_pos), with a cache inside."""
    name = subject.sig.role("start")
    assert name is not None

    def go(call: Call, at: int, size: int, state: Any, kind: str, way: Way) -> tuple[Tensor, Any]:
        piece = _cut(call, at, size)
        piece = piece.but(extra={**piece.extra, name: at})
        return subject.chosen(subject.raw(piece, way), piece.tokens.shape[0], size), True

    return Stepper(subject, go, reorder=reorder)


def _by_argument(subject: Subject, name: str, reorder: Callable[..., Any] | None) -> Stepper | None:
    """forward(tokens, cache) → output with the new cache; a cache that is filled in place is handed in empty."""
    sig = subject.sig
    use = sig.role("use_cache")
    flag = {use: True} if use is not None else {"use_cache": True} if subject.facts.hugging else {}
    probe = subject.call(2, 3, seed=5).but(extra=flag)
    fresh: Callable[[], Any] = lambda: None
    with torch.no_grad():
        out = subject.raw(probe, Way())
    if _new(out, name) is None:
        for made in (dict, list):
            empty: Any = made()
            try:
                with torch.no_grad():
                    subject.invoke_kept(probe.but(extra={**flag, name: empty}))
            except CallError:
                continue
            if empty:
                fresh = made
                break
        else:
            raise CallError(f"the model takes {name}, but gives none back: give prefill= and step= to check its cache")
    kinds: dict[str, Callable[[int, int], Any]] = {GROWING: lambda rows, length: fresh()}
    if subject.facts.hugging:
        kinds |= _hugging(subject)

    def go(call: Call, at: int, size: int, state: Any, kind: str, way: Way) -> tuple[Tensor, Any]:
        piece = _cut(call, at, size)
        begun = kinds[kind](len(call.tokens), call.tokens.shape[1]) if state is None else state
        given = dict(flag) if begun is None else {**flag, name: begun}
        out = subject.raw(piece.but(extra=given), way)
        new = _new(out, name)
        return subject.chosen(out, piece.tokens.shape[0], size), begun if new is None else new

    return Stepper(subject, go, tuple(kinds), reorder)


def _new(out: Any, name: str) -> Any:
    """The new cache in an output: by its name, or the last part of a tuple that is no output for each position."""
    found = outputs.find(out, (name, *CACHES, "present", "presents", "new_cache", "kv"))
    if found is not None:
        return found
    if isinstance(out, tuple | list) and len(out) > 1 and not isinstance(out, dict):
        last = out[-1]
        return last if last is not None and not (isinstance(last, Tensor) and last.dim() < 1) else None
    return None


def _hugging(subject: Subject) -> dict[str, Callable[[int, int], Any]]:
    """A cache with fixed slots, where transformers has one for this model."""
    try:
        from transformers import StaticCache
    except ImportError:
        return {}
    module: Any = subject.module
    if subject.facts.pair or not getattr(module, "_can_compile_fullgraph", getattr(module, "_supports_static_cache", False)):
        return {}
    config = module.config.get_text_config(decoder=True)
    return {"a static cache": lambda rows, length: StaticCache(config=config, max_cache_len=length + 3)}
