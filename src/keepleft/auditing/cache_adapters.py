"""How a model is taken through a text piece by piece: whatever its cache is called and wherever it is kept."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.attention.kv_cache import DynamicCache, StaticCache
from keepleft.auditing import outputs
from keepleft.auditing.argument_roles import ARGUMENT_NAMES, role_of
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.model_adapter import CallError, Inputs, ModelAdapter
from keepleft.models.state import DecoderState

CACHE_ARGUMENTS = tuple(ARGUMENT_NAMES["cache"].split())
STATE_ARGUMENTS = frozenset((*CACHE_ARGUMENTS, "states", "carry", "memory"))
GROWING_CACHE = "a growing cache"
# keepleft's: cutting them back is not a part of the audit
OWN_CACHES = (DecoderState, DynamicCache, StaticCache)
# where new tokens stand; the cache lies inside
POSITION_ARGUMENTS = ("input_pos", "cache_position", "cache_positions", "input_positions")
# by custom the whole text so far is given, and its last token is read
FULL_PREFIX_ARGUMENTS = ("incremental_state",)
_STATE_WORDS = frozenset(
    "cache caches past state states mem mems kv hx cx h c h0 c0 hidden cell carry incremental inference".split()
)
_NON_STATE_WORDS = frozenset(
    "encoder decoder cross mask output return use position positions ids implementation size".split()
)
_INIT_STATE_METHOD = re.compile(
    r"^(init|initial|allocate|empty|zero|new|make|create|begin|get_initial)_\w*(states?|caches?|hidden)$"
)
_STATE_AFFIX = re.compile(
    r"^(new|next|last|final|prev|previous|past|present|initial|init)_(?=\w)|_(n|0|t|x|in|out|new|next)$"
)


@dataclass
class CacheStepper:
    """`step` gives a piece and the state so far; None as state begins anew."""

    adapter: ModelAdapter
    step_fn: Callable[[Inputs, int, int, Any, str, CodePath], tuple[Tensor, Any]]
    cache_kinds: tuple[str, ...] = ("its cache",)
    reorder_fn: Callable[..., Any] | None = None
    accepts_mask_and_positions: bool = False  # can it be told which tokens are real, and where they stand?
    single_token: bool = False  # one token at a time only

    def step(
        self, inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        snapshot = self.adapter.buffer_snapshot
        self.adapter.buffer_snapshot = []  # a cache may be kept in buffers: they stay as a step leaves them
        try:
            with torch.no_grad():
                return self.step_fn(inputs, start, size, state, cache_kind, path)
        finally:
            self.adapter.buffer_snapshot = snapshot

    def reorder(self, state: Any, rows: Tensor) -> Any:
        """The state with its rows in another order; None where it has no way of its own."""
        rows = rows.to(self.adapter.device)
        if self.reorder_fn is not None:
            out = self.reorder_fn(state, rows)
            return state if out is None else out
        for name in ("reorder_cache", "reorder", "keep", "batch_select_indices", "select_rows"):
            if callable(getattr(state, name, None)):
                return self._call_method(name, getattr(state, name), state, rows)
        for name in ("reorder_cache", "_reorder_cache", "reorder_incremental_state", "reorder_state"):
            method = getattr(self.adapter.module, name, None)
            if callable(method) and state is not True:
                return self._call_method(name, method, state, _unwrap_state(state), rows)
        return None

    def crop(self, state: Any, half: int) -> Any:
        """The state with the first half of what it has read; None where it has no way of its own.

        Some are told how much to keep, some how much to drop: for a half that is the same.
        """
        if getattr(
            self.adapter.module, "_is_stateful", False
        ):  # a running sum cannot be taken back, and it says so
            return None
        if isinstance(_unwrap_state(state), OWN_CACHES):
            return None
        for name in ("crop", "truncate", "trim", "rollback", "rewind"):
            if not isinstance(_unwrap_state(state), dict | list) and callable(getattr(state, name, None)):
                method = getattr(state, name)

                def crop_to(count: int, method: Callable[..., Any] = method) -> Any:
                    try:
                        return method(count)
                    except ValueError:  # transformers takes how much to drop, below zero
                        return method(-count)

                try:
                    return self._call_method(name, crop_to, state, half)
                except CallError as error:
                    if isinstance(error.__cause__, AttributeError):  # some of its layers cannot
                        return None
                    raise
        return None

    def _call_method(self, name: str, method: Callable[..., Any], state: Any, *args: Any) -> Any:
        try:
            out = method(*args)
        except NotImplementedError:
            return None
        except Exception as error:
            raise CallError(f"{name} does not work: {type(error).__name__}: {error}") from error
        return state if out is None else _StateHolder(out) if isinstance(state, _StateHolder) else out


def find_stepper(
    adapter: ModelAdapter,
    prefill: Callable[..., Any] | None,
    step: Callable[..., Any] | None,
    reorder: Callable[..., Any] | None,
) -> CacheStepper | None:
    """The way this model offers, if it offers one."""
    module: Any = adapter.module
    if prefill is not None and step is not None:
        return _from_callables(adapter, prefill, step, reorder)
    if adapter.facts.is_keepleft:
        return _from_keepleft_model(adapter) if hasattr(module, "start") else None
    for prefill_name, step_name in (
        ("start", "step"),
        ("prefill", "step"),
        ("prefill", "decode"),
        ("prefill", "decode_step"),
        ("prefill", "decode_one"),
    ):
        if (
            module is not None
            and callable(getattr(module, prefill_name, None))
            and callable(getattr(module, step_name, None))
        ):
            return _from_callables(
                adapter, getattr(module, prefill_name), getattr(module, step_name), reorder
            )
    init_stepper = _from_init_method(adapter, reorder)
    if init_stepper is not None:
        return init_stepper
    if adapter.signature.argument_for("start") is not None:
        return _from_start_argument(adapter, reorder)
    cache_argument = next((name for name in CACHE_ARGUMENTS if name in adapter.signature.names), None)
    state_arguments = tuple(name for name in adapter.signature.names if _may_be_state(adapter, name))
    cache_error: CallError | None = None
    for names in dict.fromkeys(
        (
            state_arguments if len(state_arguments) > 1 else (),
            (cache_argument,) if cache_argument else (),
            *((name,) for name in state_arguments),
        )
    ):
        if names:
            try:
                return _from_cache_argument(
                    adapter, names, reorder, is_known_cache=names == (cache_argument,)
                )
            except CallError as error:
                cache_error = error if names == (cache_argument,) else cache_error
    for name in POSITION_ARGUMENTS:
        if name in adapter.signature.names and not cache_argument:
            return _from_position_argument(adapter, name, reorder)
    if cache_error is not None:
        raise cache_error
    return None


def _may_be_state(adapter: ModelAdapter, name: str) -> bool:
    """May this argument be what a model keeps between calls?"""
    name_parts = set(name.lower().split("_"))
    return (
        role_of(name) in (None, "cache")
        and adapter.signature.defaults.get(name, False) is None
        and name not in adapter.example_arguments
        and (bool(name_parts & _STATE_WORDS) or name in CACHE_ARGUMENTS)
        and not name_parts & _NON_STATE_WORDS
    )


def _slice_inputs(adapter: ModelAdapter, inputs: Inputs, start: int, size: int) -> Inputs:
    """A piece: where its tokens stand, and which of all tokens so far are real."""
    keep_mask = inputs.keep_mask
    positions = inputs.positions
    (rows, length) = inputs.tokens.shape[:2]
    required = adapter.signature.required
    if (
        keep_mask is None
        and adapter.padding_argument is not None
        and adapter.padding_argument.name in required
        and adapter.padding_argument.form != "lengths"
    ):
        keep_mask = torch.ones(rows, length, dtype=torch.bool)
    if positions is None and adapter.positions_argument in required:
        positions = torch.arange(length).expand(rows, length)
    return inputs.but(
        tokens=inputs.tokens[:, start : start + size],
        keep_mask=None if keep_mask is None else keep_mask[:, : start + size],
        positions=None if positions is None else positions[:, start : start + size],
    )


def _unwrap_state(state: Any) -> Any:
    return state.value if isinstance(state, _StateHolder) else state


def _depends_on_state(stepper: CacheStepper) -> bool:
    """Does a step depend on what came before it?"""
    adapter, last_logits = stepper.adapter, []
    inputs = adapter.make_inputs(2, 4, seed=6)
    other_tokens = torch.cat(
        [adapter.sampler.resample(inputs.tokens, 7)[:, :3].to(inputs.tokens.dtype), inputs.tokens[:, 3:]], 1
    )
    for variant in (inputs, inputs.but(tokens=other_tokens)):
        _, state = stepper.step(variant, 0, 3, None, stepper.cache_kinds[0], CodePath())
        last_logits.append(stepper.step(variant, 3, 1, state, stepper.cache_kinds[0], CodePath())[0])
    return not torch.equal(*last_logits)


def _from_init_method(adapter: ModelAdapter, reorder: Callable[..., Any] | None) -> CacheStepper | None:
    """A method that makes an empty state, and one that takes a token a step further."""
    module: Any = adapter.module
    if module is None or adapter.facts.is_huggingface:
        return None
    step = next(
        (
            method
            for name in ("step", "decode_step", "decode_one", "forward_step")
            if callable(method := getattr(module, name, None))
        ),
        None,
    )
    init_methods = [
        method
        for name in dir(type(module))
        if _INIT_STATE_METHOD.match(name) and callable(method := getattr(module, name, None))
    ]
    if step is None or not init_methods or _num_required_arguments(step) < 2:
        return None
    last_error: CallError | None = None
    for init_state in init_methods:
        candidates = []
        for flat in (False, True):
            stepper = _token_stepper(adapter, init_state, step, flat, reorder)
            inputs = adapter.make_inputs(3, 2, seed=5)
            try:
                first_logits, _ = stepper.step(inputs, 0, 1, None, stepper.cache_kinds[0], CodePath())
            except CallError as error:
                last_error = error
                continue
            full_logits = adapter.run(inputs, CodePath())[:, :1]
            if first_logits.shape == full_logits.shape:
                candidates.append(
                    (not torch.allclose(first_logits, full_logits, rtol=1e-3, atol=1e-5), flat, stepper)
                )
        if candidates:
            return min(candidates, key=lambda candidate: candidate[:2])[2]
    raise last_error or CallError(
        "its step gives no scores for each row: give prefill= and step= to check its cache"
    )


def _num_required_arguments(step: Callable[..., Any]) -> int:
    """How many arguments must be given."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return 2
    return sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )


def _token_stepper(
    adapter: ModelAdapter,
    init_state: Callable[..., Any],
    step: Callable[..., Any],
    flat: bool,
    reorder: Callable[..., Any] | None,
) -> CacheStepper:
    """One token after another; flat: without an axis of time."""
    num_state_arguments = _num_required_arguments(step) - 1
    state_first = _state_first(step)

    def advance(
        inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        rows, length = inputs.tokens.shape[:2]
        if state is None:
            init_arguments = _init_arguments(
                init_state, rows, length, path.dtype or adapter.dtype, adapter.device
            )
            state = _StateHolder(_cast_state(adapter.invoke(init_state, {}, *init_arguments), path.dtype))
        logits = []
        for n in range(start, start + size):
            tokens = adapter.to_device(inputs.tokens[:, n] if flat else inputs.tokens[:, n : n + 1])
            state_parts = (
                tuple(state.value)
                if num_state_arguments > 1 and isinstance(state.value, tuple | list)
                else (state.value,)
            )
            out = adapter.invoke(
                step, {}, *((*state_parts, tokens) if state_first else (tokens, *state_parts))
            )
            if len(state_parts) > 1 and isinstance(out, tuple) and len(out) == 1 + len(state_parts):
                out = out[0], out[1:]
            step_logits, new_state = _split_output(out)
            if step_logits is None:
                raise CallError("step gives no scores: let it return scores, or (scores, state)")
            logits.append(
                step_logits if step_logits.dim() > 2 and step_logits.shape[1] == 1 else step_logits[:, None]
            )
            state = _StateHolder(state.value if new_state is None else new_state)
        return torch.cat(logits, 1), state

    return CacheStepper(adapter, advance, reorder_fn=reorder, single_token=True)


def _init_arguments(
    init_state: Callable[..., Any], rows: int, length: int, dtype: torch.dtype, device: torch.device
) -> list[Any]:
    """What an empty state is made from, by the names of its arguments."""
    arguments: list[Any] = []
    for name, parameter in inspect.signature(init_state).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            continue
        if "dtype" in name:
            arguments.append(dtype)
        elif "device" in name:
            arguments.append(device)
        elif "len" in name or "seq" in name or "capacity" in name:
            arguments.append(length)
        elif "batch" in name or parameter.default is parameter.empty:
            arguments.append(rows)
        else:
            arguments.append(parameter.default)
    return arguments


def _cast_state(value: Any, dtype: torch.dtype | None) -> Any:
    """A state in the precision that is computed in."""
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast_state(item, dtype) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast_state(item, dtype) for item in value)
    return value


def _from_callables(
    adapter: ModelAdapter,
    prefill: Callable[..., Any],
    step: Callable[..., Any],
    reorder: Callable[..., Any] | None,
) -> CacheStepper:
    """prefill(tokens) → (scores, state) or state; step(tokens, state) → scores, or (scores, state)."""
    state_first = _state_first(step)

    def advance(
        inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        tokens = adapter.to_device(inputs.tokens[:, start : start + size])
        source = () if inputs.source is None or state is not None else (adapter.to_device(inputs.source),)
        if state is None:
            out = adapter.invoke(prefill, {}, *source, tokens)
            logits, new_state = _split_output(out)
            if logits is None:
                raise CallError("prefill gives no scores: let it return (scores, state)")
            return logits, _StateHolder(new_state)
        arguments = (state.value, tokens) if state_first else (tokens, state.value)
        out = adapter.invoke(step, {}, *arguments) if state.is_explicit else adapter.invoke(step, {}, tokens)
        logits, new_state = _split_output(out)
        if logits is None:
            raise CallError("step gives no scores: let it return scores, or (scores, state)")
        return logits, _StateHolder(state.value if new_state is None else new_state)

    return CacheStepper(adapter, advance, reorder_fn=reorder)


@dataclass
class _StateHolder:
    """A state that may be kept by the callables themselves."""

    value: Any

    @property
    def is_explicit(self) -> bool:
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
    return bool(names) and names[0] in STATE_ARGUMENTS


def _split_output(out: Any) -> tuple[Tensor | None, Any]:
    """Scores and state: the first floating tensor, and what else there is."""
    if isinstance(out, Tensor):
        return out, None
    if isinstance(out, tuple | list) and len(out) == 2:
        if isinstance(out[0], Tensor):
            return out[0], out[1]
        if isinstance(out[1], Tensor) and not isinstance(out[0], Tensor):
            return out[1], out[0]
    logits = outputs.find(out, outputs.PREFERRED_OUTPUTS)
    state = outputs.find(out, (*CACHE_ARGUMENTS, "states"))
    return logits, state


def _from_keepleft_model(adapter: ModelAdapter) -> CacheStepper:
    """start and step, with every kind of cache."""
    model: Any = adapter.module

    def advance(
        inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        tokens = adapter.to_device(inputs.tokens[:, start : start + size])
        if state is not None:
            return adapter.invoke(model.step, {}, tokens, state), state
        memory = (
            {} if inputs.source is None else {"memory": model.encode_memory(adapter.to_device(inputs.source))}
        )
        capacity = {"capacity": inputs.tokens.shape[1]} if cache_kind == "static" else {}
        logits, new_state = adapter.invoke(
            lambda tokens: model.start(tokens, cache=cache_kind, **memory, **capacity), {}, tokens
        )
        return logits, new_state

    all_windowed = all(getattr(mask, "size", None) or "window" in repr(mask) for mask in model.decoder.masks)
    return CacheStepper(adapter, advance, ("dynamic", "static", *(("ring",) if all_windowed else ())))


def _from_start_argument(adapter: ModelAdapter, reorder: Callable[..., Any] | None) -> CacheStepper:
    """forward(tokens, start_pos), with a cache inside."""
    name = adapter.signature.argument_for("start")
    assert name is not None
    return _internal_cache_stepper(adapter, name, lambda start, size: start, reorder)


def _from_position_argument(
    adapter: ModelAdapter, name: str, reorder: Callable[..., Any] | None
) -> CacheStepper:
    """forward(tokens, input_pos), with a cache inside; without one they are positions, and nothing is kept."""
    stepper = _internal_cache_stepper(
        adapter, name, lambda start, size: torch.arange(start, start + size), reorder
    )
    if not _depends_on_state(stepper):
        raise CallError(
            f"given {name}, it keeps nothing from call to call: set its caches up first, or give "
            "prefill= and step= to check one"
        )
    return stepper


def _internal_cache_stepper(
    adapter: ModelAdapter,
    name: str,
    argument_value: Callable[[int, int], Any],
    reorder: Callable[..., Any] | None,
) -> CacheStepper:
    def advance(
        inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        piece = _slice_inputs(adapter, inputs, start, size)
        piece = piece.but(extra={**piece.extra, name: argument_value(start, size)})
        return adapter.select_output(adapter.run_raw(piece, path), piece.tokens.shape[0], size), True

    return CacheStepper(adapter, advance, reorder_fn=reorder, accepts_mask_and_positions=True)


class _InferenceParams:
    """What Megatron, FlashAttention and Mamba hand around: keys and values by layer, and how much was read.

    The caller counts, unless the model does.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.max_batch_size = rows
        self.batch_size_offset = 0
        self.lengths_per_sample = None
        self.max_seqlen = self.max_sequence_length = length
        self.seqlen_offset = self.sequence_len_offset = 0
        self.key_value_memory_dict: dict[Any, Any] = {}
        self.last_offsets = (0, 0)

    def __bool__(self) -> bool:
        """Was anything put into it?"""
        return bool(self.key_value_memory_dict)

    def advance(self, size: int) -> None:
        if self.seqlen_offset == self.last_offsets[0]:
            self.seqlen_offset += size
        if self.sequence_len_offset == self.last_offsets[1]:
            self.sequence_len_offset += size
        self.last_offsets = self.seqlen_offset, self.sequence_len_offset


def _from_cache_argument(
    adapter: ModelAdapter, names: tuple[str, ...], reorder: Callable[..., Any] | None, *, is_known_cache: bool
) -> CacheStepper:
    """forward(tokens, cache) → output with the new cache; a cache that is filled in place is handed in empty.
    is_known_cache: its name alone says that it is a cache; others must show it."""
    signature = adapter.signature
    use_cache_argument = signature.argument_for("use_cache")
    use_cache = (
        {use_cache_argument: True}
        if use_cache_argument is not None
        else {"use_cache": True}
        if adapter.facts.is_huggingface
        else {}
    )
    probe_inputs = adapter.make_inputs(2, 3, seed=5).but(extra=use_cache)
    make_cache: Callable[[int, int], Any] = lambda rows, length: None
    with torch.no_grad():
        out = adapter.run_raw(probe_inputs, CodePath())
    name = names[0]
    full_prefix = name in FULL_PREFIX_ARGUMENTS
    if full_prefix or _returned_state(out, names) is None:
        cache_factories: tuple[Callable[[int, int], Any], ...] = (
            lambda *_: {},
            lambda *_: [],
            _InferenceParams,
        )
        make_cache = next(
            (
                factory
                for factory in cache_factories
                if len(names) == 1 and _fills_empty_cache(adapter, probe_inputs, name, factory)
            ),
            make_cache,
        )
        if make_cache(1, 1) is None:
            raise CallError(
                f"the model takes {name}, but gives none back: give prefill= and step= to check its cache"
            )
    cache_kinds: dict[str, Callable[[int, int], Any]] = {GROWING_CACHE: make_cache}
    if adapter.facts.is_huggingface and is_known_cache:
        cache_kinds |= _huggingface_caches(adapter)

    def advance(
        inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        piece = (
            _slice_inputs(adapter, inputs, 0, start + size)
            if full_prefix
            else _slice_inputs(adapter, inputs, start, size)
        )
        cache = cache_kinds[cache_kind](*inputs.tokens.shape[:2]) if state is None else state
        cache_arguments = {} if cache is None else cache if len(names) > 1 else {name: cache}
        out = adapter.run_raw(piece.but(extra={**use_cache, **cache_arguments}), path)
        returned_cache = _returned_state(out, names) if make_cache(1, 1) is None else None
        if isinstance(cache, _InferenceParams):
            cache.advance(size)
        return adapter.select_output(
            out, piece.tokens.shape[0], size
        ), cache if returned_cache is None else returned_cache

    def advance_singly(
        inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        logits = []
        for n in range(start, start + size):
            step_logits, state = advance(inputs, n, 1, state, cache_kind, path)
            logits.append(step_logits)
        return torch.cat(logits, 1), state

    stepper = CacheStepper(
        adapter,
        advance_singly if full_prefix else advance,
        tuple(cache_kinds),
        reorder,
        accepts_mask_and_positions=not full_prefix,
        single_token=full_prefix,
    )
    if not is_known_cache and not _depends_on_state(stepper):
        raise CallError(f"what it gives back for {name} changes nothing when it is given again")
    return stepper


def _fills_empty_cache(
    adapter: ModelAdapter, inputs: Inputs, name: str, factory: Callable[[int, int], Any]
) -> bool:
    """Is something put into an empty one?"""
    cache = factory(*inputs.tokens.shape[:2])
    try:
        with torch.no_grad():
            adapter.run_raw(inputs.but(extra={**inputs.extra, name: cache}), CodePath())
    except CallError:
        return False
    return bool(cache)


def _returned_state(out: Any, names: tuple[str, ...]) -> Any:
    """What an output gives for the next call: one value, or by name where there are several; None if one is
    missing.
    """
    if len(names) == 1:
        return _returned_cache(out, names[0])
    parts = dict(outputs.named_parts(out))
    states = {name: _match_by_stem(parts, name) for name in names}
    if not any(isinstance(key, str) for key in parts):
        other_values = list(parts.values())[1:]
        if len(other_values) == 1 and isinstance(other_values[0], tuple | list):
            other_values = list(other_values[0])
        states = dict(zip(names, other_values, strict=True)) if len(other_values) == len(names) else {}
    return states if states and all(value is not None for value in states.values()) else None


def _match_by_stem(parts: dict[Any, Any], name: str) -> Any:
    return next(
        (value for key, value in parts.items() if isinstance(key, str) and _stem(key) == _stem(name)), None
    )


def _stem(name: str) -> str:
    """h for h0, hx, hn and h_n; cache for new_cache and cache_out."""
    name = _STATE_AFFIX.sub("", name.lower())
    return name[:-1] if len(name) == 2 and name[-1] in "0nxt" else name


def _returned_cache(out: Any, name: str) -> Any:
    """The new cache in an output: by its name, or the last part of a tuple that is no output for each
    position.
    """
    cache = outputs.find(out, (name, *CACHE_ARGUMENTS, "present", "presents", "new_cache", "kv"))
    if cache is not None:
        return cache
    parts = dict(outputs.named_parts(out))
    if (cache := _match_by_stem(parts, name)) is not None:
        return cache
    if isinstance(out, tuple | list) and len(out) > 1 and not isinstance(out, dict):
        last = out[-1]
        is_empty = isinstance(last, dict | tuple | list) and all(
            value is None for _, value in outputs.named_parts(last)
        )
        return None if last is None or is_empty or (isinstance(last, Tensor) and last.dim() < 1) else last
    return None


def _huggingface_caches(adapter: ModelAdapter) -> dict[str, Callable[[int, int], Any]]:
    """A cache with fixed slots, where transformers has one for this model."""
    try:
        from transformers import StaticCache
    except ImportError:
        return {}
    module: Any = adapter.module
    if adapter.facts.is_encoder_decoder or not getattr(
        module, "_can_compile_fullgraph", getattr(module, "_supports_static_cache", False)
    ):
        return {}
    config = module.config.get_text_config(decoder=True)
    return {"a static cache": lambda rows, length: StaticCache(config=config, max_cache_len=length + 3)}
