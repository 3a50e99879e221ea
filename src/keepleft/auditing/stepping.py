"""How a model is taken through a text piece by piece: whatever its cache is called and wherever it is kept."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import outputs
from keepleft.auditing.roles import NAMES, role_of
from keepleft.auditing.subject import Call, CallError, Subject
from keepleft.auditing.ways import Way

CACHES = tuple(NAMES["cache"].split())
STATES = frozenset((*CACHES, "states", "carry", "memory"))
GROWING = "a growing cache"
PLACES = ("input_pos", "cache_position", "cache_positions", "input_positions")  # where new tokens stand; the cache lies inside
PREFIXED = ("incremental_state",)  # by custom the whole text so far is given, and its last token is read
_KEPT = frozenset("cache caches past state states mem mems kv hx cx h c h0 c0 hidden cell carry incremental inference".split())
_NOT_KEPT = frozenset("encoder decoder cross mask output return use position positions ids implementation size".split())
_BEGIN = re.compile(r"^(init|initial|allocate|empty|zero|new|make|create|begin|get_initial)_\w*(states?|caches?|hidden)$")
_TURN = re.compile(r"^(new|next|last|final|prev|previous|past|present|initial|init)_(?=\w)|_(n|0|t|x|in|out|new|next)$")


@dataclass
class Stepper:
    """`go` gives a piece and the state so far; None as state begins anew."""

    subject: Subject
    step: Callable[[Call, int, int, Any, str, Way], tuple[Tensor, Any]]
    kinds: tuple[str, ...] = ("its cache",)
    reorder: Callable[..., Any] | None = None
    told: bool = False    # can it be told which tokens are real, and where they stand?
    single: bool = False  # one token at a time only

    def go(self, call: Call, at: int, size: int, state: Any, kind: str, way: Way) -> tuple[Tensor, Any]:
        held, self.subject.buffers = self.subject.buffers, []  # a cache may be kept in buffers: they stay as a step leaves them
        try:
            with torch.no_grad():
                return self.step(call, at, size, state, kind, way)
        finally:
            self.subject.buffers = held

    def turned(self, state: Any, rows: Tensor) -> Any:
        """The state with its rows in another order; None where it has no way of its own."""
        rows = rows.to(self.subject.device)
        if self.reorder is not None:
            out = self.reorder(state, rows)
            return state if out is None else out
        for name in ("reorder_cache", "reorder", "keep", "batch_select_indices", "select_rows"):
            if callable(getattr(state, name, None)):
                return self._done(name, getattr(state, name), state, rows)
        for name in ("reorder_cache", "_reorder_cache", "reorder_incremental_state", "reorder_state"):
            method = getattr(self.subject.module, name, None)
            if callable(method) and state is not True:
                return self._done(name, method, state, _held(state), rows)
        return None

    def cropped(self, state: Any, half: int) -> Any:
        """The state with the first half of what it has read; None where it has no way of its own. Some are told how much to
        keep, some how much to drop: for a half that is the same."""
        if getattr(self.subject.module, "_is_stateful", False):  # a running sum cannot be taken back, and it says so
            return None
        for name in ("crop", "truncate", "trim", "rollback", "rewind"):
            if not isinstance(_held(state), dict | list) and callable(getattr(state, name, None)):
                method = getattr(state, name)

                def cut(count: int, method: Callable[..., Any] = method) -> Any:
                    try:
                        return method(count)
                    except ValueError:  # transformers takes how much to drop, below zero
                        return method(-count)

                try:
                    return self._done(name, cut, state, half)
                except CallError as error:
                    if isinstance(error.__cause__, AttributeError):  # some of its layers cannot
                        return None
                    raise
        return None

    def _done(self, name: str, method: Callable[..., Any], state: Any, *given: Any) -> Any:
        try:
            out = method(*given)
        except NotImplementedError:
            return None
        except Exception as error:
            raise CallError(f"{name} does not work: {type(error).__name__}: {error}") from error
        return state if out is None else _Held(out) if isinstance(state, _Held) else out


def stepper(subject: Subject, prefill: Callable[..., Any] | None, step: Callable[..., Any] | None,
            reorder: Callable[..., Any] | None) -> Stepper | None:
    """The way this model offers, if it offers one."""
    module: Any = subject.module
    if prefill is not None and step is not None:
        return _by_calls(subject, prefill, step, reorder)
    if subject.facts.ours:
        return _ours(subject) if hasattr(module, "start") else None
    for first, more in (("start", "step"), ("prefill", "step"), ("prefill", "decode"), ("prefill", "decode_step"),
                        ("prefill", "decode_one")):
        if module is not None and callable(getattr(module, first, None)) and callable(getattr(module, more, None)):
            return _by_calls(subject, getattr(module, first), getattr(module, more), reorder)
    begun = _by_beginning(subject, reorder)
    if begun is not None:
        return begun
    if subject.sig.role("start") is not None:
        return _by_start(subject, reorder)
    known = next((name for name in CACHES if name in subject.sig.names), None)
    like = tuple(name for name in subject.sig.names if _kept(subject, name))
    refused: CallError | None = None
    for names in dict.fromkeys((like if len(like) > 1 else (), (known,) if known else (), *((name,) for name in like))):
        if names:
            try:
                return _by_argument(subject, names, reorder, sure=names == (known,))
            except CallError as error:
                refused = error if names == (known,) else refused
    for name in PLACES:
        if name in subject.sig.names and not known:
            return _by_place(subject, name, reorder)
    if refused is not None:
        raise refused
    return None


def _kept(subject: Subject, name: str) -> bool:
    """May this argument be what a model keeps between calls?"""
    parts = set(name.lower().split("_"))
    return (role_of(name) in (None, "cache") and subject.sig.defaults.get(name, False) is None and name not in subject.given
            and (bool(parts & _KEPT) or name in CACHES) and not parts & _NOT_KEPT)


def _cut(subject: Subject, call: Call, at: int, size: int) -> Call:
    """A piece: where its tokens stand, and which of all tokens so far are real."""
    keep, positions, (rows, length) = call.keep, call.positions, call.tokens.shape[:2]
    required = subject.sig.required
    if keep is None and subject.reader is not None and subject.reader.name in required and subject.reader.form != "lengths":
        keep = torch.ones(rows, length, dtype=torch.bool)
    if positions is None and subject.positions in required:
        positions = torch.arange(length).expand(rows, length)
    return call.but(tokens=call.tokens[:, at:at + size], keep=None if keep is None else keep[:, :at + size],
                    positions=None if positions is None else positions[:, at:at + size])


def _held(state: Any) -> Any:
    return state.value if isinstance(state, _Held) else state


def _remembers(stepper: Stepper) -> bool:
    """Does a step depend on what came before it?"""
    subject, outs = stepper.subject, []
    call = subject.call(2, 4, seed=6)
    other = torch.cat([subject.words.others(call.tokens, 7)[:, :3].to(call.tokens.dtype), call.tokens[:, 3:]], 1)
    for one in (call, call.but(tokens=other)):
        _, state = stepper.go(one, 0, 3, None, stepper.kinds[0], Way())
        outs.append(stepper.go(one, 3, 1, state, stepper.kinds[0], Way())[0])
    return not torch.equal(*outs)


def _by_beginning(subject: Subject, reorder: Callable[..., Any] | None) -> Stepper | None:
    """A method that makes an empty state, and one that takes a token a step further."""
    module: Any = subject.module
    if module is None or subject.facts.hugging:
        return None
    step = next((method for name in ("step", "decode_step", "decode_one", "forward_step")
                 if callable(method := getattr(module, name, None))), None)
    makers = [method for name in dir(type(module)) if _BEGIN.match(name) and callable(method := getattr(module, name, None))]
    if step is None or not makers or _asks(step) < 2:
        return None
    refused: CallError | None = None
    for make in makers:
        fitting = []
        for flat in (False, True):
            found = _stepping(subject, make, step, flat, reorder)
            probe = subject.call(3, 2, seed=5)
            try:
                first, _ = found.go(probe, 0, 1, None, found.kinds[0], Way())
            except CallError as error:
                refused = error
                continue
            whole = subject.run(probe, Way())[:, :1]
            if first.shape == whole.shape:
                fitting.append((not torch.allclose(first, whole, rtol=1e-3, atol=1e-5), flat, found))
        if fitting:
            return min(fitting, key=lambda one: one[:2])[2]
    raise refused or CallError("its step gives no scores for each row: give prefill= and step= to check its cache")


def _asks(step: Callable[..., Any]) -> int:
    """How many arguments must be given."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return 2
    return sum(one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


def _stepping(subject: Subject, make: Callable[..., Any], step: Callable[..., Any], flat: bool,
              reorder: Callable[..., Any] | None) -> Stepper:
    """One token after another; flat: without an axis of time."""
    spread = _asks(step) - 1
    turned = _state_first(step)

    def go(call: Call, at: int, size: int, state: Any, kind: str, way: Way) -> tuple[Tensor, Any]:
        rows, length = call.tokens.shape[:2]
        if state is None:
            with_ = _wanted(make, rows, length, way.dtype or subject.dtype, subject.device)
            state = _Held(_cast(subject.invoke(make, {}, *with_), way.dtype))
        scores = []
        for n in range(at, at + size):
            tokens = subject.placed(call.tokens[:, n] if flat else call.tokens[:, n:n + 1])
            parts = tuple(state.value) if spread > 1 and isinstance(state.value, tuple | list) else (state.value,)
            out = subject.invoke(step, {}, *((*parts, tokens) if turned else (tokens, *parts)))
            if len(parts) > 1 and isinstance(out, tuple) and len(out) == 1 + len(parts):
                out = out[0], out[1:]
            found, held = _divided(out)
            if found is None:
                raise CallError("step gives no scores: let it return scores, or (scores, state)")
            scores.append(found if found.dim() > 2 and found.shape[1] == 1 else found[:, None])
            state = _Held(state.value if held is None else held)
        return torch.cat(scores, 1), state

    return Stepper(subject, go, reorder=reorder, single=True)


def _wanted(make: Callable[..., Any], rows: int, length: int, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """What an empty state is made from, by the names of its arguments."""
    out: list[Any] = []
    for name, one in inspect.signature(make).parameters.items():
        if one.kind not in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            continue
        if "dtype" in name:
            out.append(dtype)
        elif "device" in name:
            out.append(device)
        elif "len" in name or "seq" in name or "capacity" in name:
            out.append(length)
        elif "batch" in name or one.default is one.empty:
            out.append(rows)
        else:
            out.append(one.default)
    return out


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A state in the precision that is computed in."""
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(part, dtype) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast(part, dtype) for part in value)
    return value


def _by_calls(subject: Subject, prefill: Callable[..., Any], step: Callable[..., Any],
              reorder: Callable[..., Any] | None) -> Stepper:
    """prefill(tokens) → (scores, state) or state; step(tokens, state) → scores, or (scores, state)."""
    turned = _state_first(step)

    def go(call: Call, at: int, size: int, state: Any, kind: str, way: Way) -> tuple[Tensor, Any]:
        tokens = subject.placed(call.tokens[:, at:at + size])
        source = () if call.source is None or state is not None else (subject.placed(call.source),)
        if state is None:
            out = subject.invoke(prefill, {}, *source, tokens)
            scores, held = _divided(out)
            if scores is None:
                raise CallError("prefill gives no scores: let it return (scores, state)")
            return scores, _Held(held)
        given = (state.value, tokens) if turned else (tokens, state.value)
        out = subject.invoke(step, {}, *given) if state.given else subject.invoke(step, {}, tokens)
        scores, held = _divided(out)
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


def _divided(out: Any) -> tuple[Tensor | None, Any]:
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
    return _inside(subject, name, lambda at, size: at, reorder)


def _by_place(subject: Subject, name: str, reorder: Callable[..., Any] | None) -> Stepper:
    """forward(tokens, input_pos), with a cache inside; without one they are positions, and nothing is kept."""
    found = _inside(subject, name, lambda at, size: torch.arange(at, at + size), reorder)
    if not _remembers(found):
        raise CallError(f"given {name}, it keeps nothing from call to call: set its caches up first, or give "
                        "prefill= and step= to check one")
    return found


def _inside(subject: Subject, name: str, value: Callable[[int, int], Any], reorder: Callable[..., Any] | None) -> Stepper:
    def go(call: Call, at: int, size: int, state: Any, kind: str, way: Way) -> tuple[Tensor, Any]:
        piece = _cut(subject, call, at, size)
        piece = piece.but(extra={**piece.extra, name: value(at, size)})
        return subject.chosen(subject.raw(piece, way), piece.tokens.shape[0], size), True

    return Stepper(subject, go, reorder=reorder, told=True)


class _Params:
    """What Megatron, FlashAttention and Mamba hand around: keys and values by layer, and how much was read. The caller counts,
    unless the model does."""

    def __init__(self, rows: int, length: int) -> None:
        self.max_batch_size, self.batch_size_offset, self.lengths_per_sample = rows, 0, None
        self.max_seqlen = self.max_sequence_length = length
        self.seqlen_offset = self.sequence_len_offset = 0
        self.key_value_memory_dict: dict[Any, Any] = {}
        self.counted = (0, 0)

    def __bool__(self) -> bool:
        """Was anything put into it?"""
        return bool(self.key_value_memory_dict)

    def read(self, size: int) -> None:
        if self.seqlen_offset == self.counted[0]:
            self.seqlen_offset += size
        if self.sequence_len_offset == self.counted[1]:
            self.sequence_len_offset += size
        self.counted = self.seqlen_offset, self.sequence_len_offset


def _by_argument(subject: Subject, names: tuple[str, ...], reorder: Callable[..., Any] | None, *, sure: bool) -> Stepper:
    """forward(tokens, cache) → output with the new cache; a cache that is filled in place is handed in empty.
    sure: its name alone says that it is a cache; others must show it."""
    sig = subject.sig
    use = sig.role("use_cache")
    flag = {use: True} if use is not None else {"use_cache": True} if subject.facts.hugging else {}
    probe = subject.call(2, 3, seed=5).but(extra=flag)
    fresh: Callable[[int, int], Any] = lambda rows, length: None
    with torch.no_grad():
        out = subject.raw(probe, Way())
    name = names[0]
    whole = name in PREFIXED
    if whole or _carried(out, names) is None:
        makers: tuple[Callable[[int, int], Any], ...] = (lambda *_: {}, lambda *_: [], _Params)
        fresh = next((made for made in makers if len(names) == 1 and _filled(subject, probe, name, made)), fresh)
        if fresh(1, 1) is None:
            raise CallError(f"the model takes {name}, but gives none back: give prefill= and step= to check its cache")
    kinds: dict[str, Callable[[int, int], Any]] = {GROWING: fresh}
    if subject.facts.hugging and sure:
        kinds |= _hugging(subject)

    def go(call: Call, at: int, size: int, state: Any, kind: str, way: Way) -> tuple[Tensor, Any]:
        piece = _cut(subject, call, 0, at + size) if whole else _cut(subject, call, at, size)
        begun = kinds[kind](*call.tokens.shape[:2]) if state is None else state
        given = {} if begun is None else begun if len(names) > 1 else {name: begun}
        out = subject.raw(piece.but(extra={**flag, **given}), way)
        new = _carried(out, names) if fresh(1, 1) is None else None
        if isinstance(begun, _Params):
            begun.read(size)
        return subject.chosen(out, piece.tokens.shape[0], size), begun if new is None else new

    def ones(call: Call, at: int, size: int, state: Any, kind: str, way: Way) -> tuple[Tensor, Any]:
        scores = []
        for n in range(at, at + size):
            found, state = go(call, n, 1, state, kind, way)
            scores.append(found)
        return torch.cat(scores, 1), state

    found = Stepper(subject, ones if whole else go, tuple(kinds), reorder, told=not whole, single=whole)
    if not sure and not _remembers(found):
        raise CallError(f"what it gives back for {name} changes nothing when it is given again")
    return found


def _filled(subject: Subject, probe: Call, name: str, made: Callable[[int, int], Any]) -> bool:
    """Is something put into an empty one?"""
    empty = made(*probe.tokens.shape[:2])
    try:
        with torch.no_grad():
            subject.raw(probe.but(extra={**probe.extra, name: empty}), Way())
    except CallError:
        return False
    return bool(empty)


def _carried(out: Any, names: tuple[str, ...]) -> Any:
    """What an output gives for the next call: one value, or by name where there are several; None if one is missing."""
    if len(names) == 1:
        return _new(out, names[0])
    held = dict(outputs.named(out))
    found = {name: _alike(held, name) for name in names}
    if not any(isinstance(key, str) for key in held):
        rest = list(held.values())[1:]
        if len(rest) == 1 and isinstance(rest[0], tuple | list):
            rest = list(rest[0])
        found = dict(zip(names, rest, strict=True)) if len(rest) == len(names) else {}
    return found if found and all(value is not None for value in found.values()) else None


def _alike(held: dict[Any, Any], name: str) -> Any:
    return next((value for key, value in held.items() if isinstance(key, str) and _stem(key) == _stem(name)), None)


def _stem(name: str) -> str:
    """h for h0, hx, hn and h_n; cache for new_cache and cache_out."""
    name = _TURN.sub("", name.lower())
    return name[:-1] if len(name) == 2 and name[-1] in "0nxt" else name


def _new(out: Any, name: str) -> Any:
    """The new cache in an output: by its name, or the last part of a tuple that is no output for each position."""
    found = outputs.find(out, (name, *CACHES, "present", "presents", "new_cache", "kv"))
    if found is not None:
        return found
    held = dict(outputs.named(out))
    if (found := _alike(held, name)) is not None:
        return found
    if isinstance(out, tuple | list) and len(out) > 1 and not isinstance(out, dict):
        last = out[-1]
        nothing = isinstance(last, dict | tuple | list) and all(value is None for _, value in outputs.named(last))
        return None if last is None or nothing or (isinstance(last, Tensor) and last.dim() < 1) else last
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
