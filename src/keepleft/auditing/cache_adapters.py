"""Adapters to the caches of models: a sequence in chunks, whatever the cache is called and wherever it is
kept.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from keepleft.attention.kv_cache import DynamicCache, StaticCache
from keepleft.auditing import module_state, outputs
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.introspect import ARGUMENT_NAMES, role_of
from keepleft.auditing.model_adapter import CallError, ModelAdapter
from keepleft.models.state import DecoderState
from keepleft.models.transformer import CausalModel, EncoderDecoder

CACHE_ARGUMENTS = tuple(ARGUMENT_NAMES["cache"].split())
STATE_ARGUMENTS = frozenset((*CACHE_ARGUMENTS, "states", "carry", "memory"))
GROWING_CACHE = "a growing cache"
SPARE_SLOTS = 3  # of a static cache, beyond the length of the text
# keepleft's own: cropping them is not audited
OWN_CACHES = (DecoderState, DynamicCache, StaticCache)
# positions of the new tokens, for models that keep their cache inside
POSITION_ARGUMENTS = tuple(ARGUMENT_NAMES["slots"].split())
# by custom these take the whole sequence so far, and only its last token is computed
FULL_PREFIX_ARGUMENTS = ("incremental_state",)
# methods that read a prompt, with those that take a step
_METHOD_PAIRS = (
    ("start", "step"),
    ("prefill", "step"),
    ("prefill", "decode"),
    ("prefill", "decode_step"),
    ("prefill", "decode_one"),
)
_STEP_METHODS = ("step", "decode_step", "decode_one", "forward_step")
_INIT_STATE_METHOD = re.compile(
    r"^(init|initial|allocate|empty|zero|new|make|create|begin|get_initial)_\w*(states?|caches?|hidden)$"
)
_SET_UP_METHOD = re.compile(r"^(setup|set_up|set|init|initialize|allocate|make|create|enable)_(kv_)?caches?$")
_STATE_WORDS = frozenset(
    "cache caches past state states mem mems kv hx cx h c h0 c0 hidden cell carry incremental "
    "inference".split()
)
_NON_STATE_WORDS = frozenset(
    "encoder decoder cross mask output return use position positions ids implementation size".split()
)
_STATE_AFFIX = re.compile(
    r"^(new|next|last|final|prev|previous|past|present|initial|init)_(?=\w)|_(n|0|t|x|in|out|new|next)$"
)


class CacheCallables(NamedTuple):
    """A cache that is not among the model's arguments, as the caller of the audit describes it."""

    prefill: Callable[..., Any] | None = None  # (tokens) → (logits, state), or state
    step: Callable[..., Any] | None = None  # (tokens, state) → logits, or (logits, state)
    reorder: Callable[..., Any] | None = None  # (state, rows) → state, or None where it works in place


# (inputs, start, size, state, cache kind, path) → logits of the tokens from start to start + size, new state
StepFunction = Callable[[Inputs, int, int, Any, str, CodePath], tuple[Tensor, Any]]


@dataclass
class CacheStepper:
    """Takes a model through a sequence in chunks, with its cache as the state between them."""

    adapter: ModelAdapter
    step_fn: StepFunction
    cache_kinds: tuple[str, ...] = ("its cache",)
    reorder_fn: Callable[..., Any] | None = None
    accepts_mask_and_positions: bool = False
    single_token: bool = False  # one token at a time only
    # as the last step left them: full passes in between change nothing of what the next sequence meets
    kept_state: module_state.StateSnapshot = field(default_factory=list)
    kept_on: module_state.StateSnapshot | None = None  # what the path began with when it was kept

    def step(
        self, inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        """Logits of the tokens from start to start + size, and the new state; None as state starts anew."""
        snapshot = self.adapter.state_snapshot
        self.adapter.state_snapshot = []  # a cache may be kept in buffers: they stay as a step leaves them
        if self.kept_on is snapshot:  # of another path, the buffers have another dtype
            module_state.restore_state(self.kept_state)
        try:
            with torch.no_grad():
                return self.step_fn(inputs, start, size, state, cache_kind, path)
        finally:
            self.kept_state = self.adapter.snapshot_state()
            self.kept_on = snapshot
            self.adapter.state_snapshot = snapshot

    def reorder(self, state: Any, rows: Tensor) -> Any:
        """The state with its rows in another order; None where there is no method for it."""
        rows = rows.to(self.adapter.device)
        if self.reorder_fn is not None:
            return self._reordered("reorder", self.reorder_fn, state, _unwrap_state(state), rows)
        for name in ("reorder_cache", "reorder", "keep", "batch_select_indices", "select_rows"):
            if callable(getattr(state, name, None)):
                return self._reordered(name, getattr(state, name), state, rows)
        for name in ("reorder_cache", "_reorder_cache", "reorder_incremental_state", "reorder_state"):
            method = getattr(self.adapter.module, name, None)
            if callable(method) and state is not True:
                return self._reordered(name, method, state, _unwrap_state(state), rows)
        return None

    def crop(self, state: Any, half: int) -> Any:
        """The state after the first half of its tokens; None where there is no method for it.

        Some methods take how many tokens to keep, some how many to drop: for a half that is the same number.
        """
        cache = _unwrap_state(state)
        # a recurrent state cannot be cropped, and transformers marks its models so
        is_stateful = getattr(self.adapter.module, "_is_stateful", False)
        if is_stateful or isinstance(cache, (*OWN_CACHES, dict, list)):
            return None
        for name in ("crop", "truncate", "trim", "rollback", "rewind"):
            method = getattr(state, name, None)
            if not callable(method):
                continue

            def crop_to(count: int, method: Callable[..., Any] = method) -> Any:
                try:
                    return self.adapter.call_method(method, count)
                except ValueError:  # transformers takes how many to drop as a negative number
                    return self.adapter.call_method(method, -count)

            try:
                return self._new_state(name, state, lambda: crop_to(half))
            except CallError as error:
                if isinstance(error.__cause__, AttributeError):  # some of its layers cannot
                    return None
                raise
        return None

    def _reordered(self, name: str, method: Callable[..., Any], state: Any, *args: Any) -> Any:
        return self._new_state(name, state, lambda: self.adapter.call_method(method, *args))

    def _new_state(self, name: str, state: Any, run: Callable[[], Any]) -> Any:
        """The new state: what a method returns, or the old state where it works in place."""
        try:
            out = run()
        except NotImplementedError:
            return None
        except Exception as error:
            raise CallError(f"{name} does not work: {type(error).__name__}: {error}") from error
        if out is None:
            return state
        return _StateHolder(out) if isinstance(state, _StateHolder) else out


def find_stepper(adapter: ModelAdapter, callables: CacheCallables) -> CacheStepper | None:
    """An adapter to this model's cache; None where it has none. Raises CallError where it seems to have one
    that cannot be used.
    """
    module = adapter.module
    reorder = callables.reorder
    if callables.prefill is not None and callables.step is not None:
        return _from_callables(adapter, callables.prefill, callables.step, reorder)
    if adapter.facts.is_keepleft:
        if not isinstance(module, CausalModel):
            return None
        if adapter.facts.entry_point is not None:
            raise CallError(
                f"the head of {adapter.name} gives no logits for each token, so nothing is generated from a "
                "cache"
            )
        return _from_keepleft_model(adapter, module)
    for prefill_name, step_name in _METHOD_PAIRS:
        prefill = getattr(module, prefill_name, None)
        step = getattr(module, step_name, None)
        if callable(prefill) and callable(step):
            return _from_callables(adapter, prefill, step, reorder)
    init_stepper = _from_init_method(adapter, reorder)
    if init_stepper is not None:
        return init_stepper
    if adapter.signature.argument_for("start") is not None:
        return _from_start_argument(adapter, reorder)
    cache_argument = next((name for name in CACHE_ARGUMENTS if name in adapter.signature.names), None)
    state_arguments = tuple(name for name in adapter.signature.names if _may_be_state(adapter, name))
    cache_error: CallError | None = None
    candidates: list[tuple[str, ...]] = [(name,) for name in state_arguments]
    if cache_argument is not None:
        candidates.insert(0, (cache_argument,))
    for names in dict.fromkeys([state_arguments, *candidates] if len(state_arguments) > 1 else candidates):
        is_known_cache = names == (cache_argument,)
        try:
            return _from_cache_argument(adapter, names, reorder, is_known_cache=is_known_cache)
        except CallError as error:
            cache_error = error if is_known_cache else cache_error
    for name in POSITION_ARGUMENTS:
        if name in adapter.signature.names and not cache_argument:
            return _from_position_argument(adapter, name, reorder)
    if cache_error is not None:
        raise cache_error
    return None


def _may_be_state(adapter: ModelAdapter, name: str) -> bool:
    """Does the name of this argument suggest a state that the model keeps between calls?"""
    name_parts = set(name.lower().split("_"))
    return (
        role_of(name) in (None, "cache")
        and adapter.signature.defaults.get(name, False) is None
        and name not in adapter.example_arguments
        and (bool(name_parts & _STATE_WORDS) or name in CACHE_ARGUMENTS)
        and not name_parts & _NON_STATE_WORDS
    )


def _depends_on_state(stepper: CacheStepper) -> bool:
    """Does a step depend on the tokens before it?"""
    adapter = stepper.adapter
    last_logits = []
    inputs = adapter.make_inputs(2, 4, seed=6)
    other_inputs = inputs.blend(adapter.resample(inputs, 7), (torch.arange(4) < 3)[None])
    for variant in (inputs, other_inputs):
        _, state = stepper.step(variant, 0, 3, None, stepper.cache_kinds[0], CodePath())
        last_logits.append(stepper.step(variant, 3, 1, state, stepper.cache_kinds[0], CodePath())[0])
    return not torch.equal(*last_logits)


# -- keepleft models ---------------------------------------------------------------------------


def _from_keepleft_model(adapter: ModelAdapter, model: CausalModel) -> CacheStepper:
    """`start` and `step`, with every kind of cache."""

    def advance(
        inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        tokens = adapter.to_device(inputs.tokens[:, start : start + size])
        if state is not None:
            return adapter.invoke(model.step, {}, tokens, state), state
        options: dict[str, Any] = {"cache": cache_kind}
        if cache_kind == "static":
            options["capacity"] = inputs.tokens.shape[1]
        if isinstance(model, EncoderDecoder):
            options["memory"] = adapter.invoke(model.encode_memory, {}, adapter.to_device(inputs.source))
        logits, new_state = adapter.invoke(model.start, options, tokens)
        return logits, new_state

    all_windowed = all(getattr(mask, "size", None) or "window" in repr(mask) for mask in model.decoder.masks)
    return CacheStepper(adapter, advance, ("dynamic", "static", *(("ring",) if all_windowed else ())))


# -- methods of the model, or callables of the caller ------------------------------------------


@dataclass
class _StateHolder:
    """A state that may be None because the callables keep it themselves."""

    value: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "value":
            raise AttributeError(name)
        return getattr(self.value, name)


def _unwrap_state(state: Any) -> Any:
    return state.value if isinstance(state, _StateHolder) else state


def _from_callables(
    adapter: ModelAdapter,
    prefill: Callable[..., Any],
    step: Callable[..., Any],
    reorder: Callable[..., Any] | None,
) -> CacheStepper:
    state_first = _state_first(step)

    def advance(
        inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        tokens = adapter.to_device(inputs.tokens[:, start : start + size])
        if state is None:
            source = () if inputs.source is None else (adapter.to_device(inputs.source),)
            logits, new_state = _split_output(adapter.invoke(prefill, {}, *source, tokens))
            if logits is None:
                raise CallError("prefill gives no logits: let it return (logits, state)")
            return logits, _StateHolder(new_state)
        if state.value is None:
            out = adapter.invoke(step, {}, tokens)
        else:
            arguments = (state.value, tokens) if state_first else (tokens, state.value)
            out = adapter.invoke(step, {}, *arguments)
        logits, new_state = _split_output(out)
        if logits is None:
            raise CallError("step gives no logits: let it return logits, or (logits, state)")
        return logits, _StateHolder(state.value if new_state is None else new_state)

    return CacheStepper(adapter, advance, reorder_fn=reorder)


def _state_first(step: Callable[..., Any]) -> bool:
    """Does a step take its state before the tokens?"""
    try:
        names = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        return False
    return bool(names) and names[0] in STATE_ARGUMENTS


def _split_output(out: Any) -> tuple[Tensor | None, Any]:
    """Logits and state; None for what is missing."""
    if isinstance(out, Tensor):
        return out, None
    if isinstance(out, tuple | list) and len(out) == 2:
        if isinstance(out[0], Tensor):
            return out[0], out[1]
        if isinstance(out[1], Tensor):
            return out[1], out[0]
    logits = outputs.find(out, outputs.PREFERRED_OUTPUTS)
    state = outputs.find(out, (*CACHE_ARGUMENTS, "states"))
    return logits, state


def _from_init_method(adapter: ModelAdapter, reorder: Callable[..., Any] | None) -> CacheStepper | None:
    """A method that makes an empty state, and one that takes a token and a state."""
    module = adapter.module
    if module is None or adapter.facts.is_huggingface:
        return None
    step = next((method for name in _STEP_METHODS if callable(method := getattr(module, name, None))), None)
    init_methods = [
        method
        for name in dir(type(module))
        if _INIT_STATE_METHOD.match(name) and callable(method := getattr(module, name, None))
    ]
    if step is None or not init_methods or _num_required_arguments(step) < 2:
        return None
    inputs = adapter.make_inputs(3, 2, seed=5)
    last_error: CallError | None = None
    for init_state in init_methods:
        candidates = []
        for flat in (False, True):
            stepper = _token_stepper(adapter, init_state, step, flat, reorder)
            try:
                first_logits, _ = stepper.step(inputs, 0, 1, None, stepper.cache_kinds[0], CodePath())
            except CallError as error:
                last_error = error
                continue
            full_logits = adapter.run(inputs, CodePath())[:, :1]
            if first_logits.shape == full_logits.shape:
                differs = not torch.allclose(first_logits, full_logits, rtol=1e-3, atol=1e-5)
                candidates.append((differs, flat, stepper))
        if candidates:
            return min(candidates, key=lambda candidate: candidate[:2])[2]
    raise last_error or CallError(
        "its step gives no logits for each row: give prefill= and step= to check its cache"
    )


def _num_required_arguments(step: Callable[..., Any]) -> int:
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
    """One token after another; flat: as (B,), without a time axis."""
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
            has_parts = num_state_arguments > 1 and isinstance(state.value, tuple | list)
            state_parts = tuple(state.value) if has_parts else (state.value,)
            out = adapter.invoke(
                step, {}, *((*state_parts, tokens) if state_first else (tokens, *state_parts))
            )
            if len(state_parts) > 1 and isinstance(out, tuple) and len(out) == 1 + len(state_parts):
                out = out[0], out[1:]
            step_logits, new_state = _split_output(out)
            if step_logits is None:
                raise CallError("step gives no logits: let it return logits, or (logits, state)")
            has_time_axis = step_logits.dim() > 2 and step_logits.shape[1] == 1
            logits.append(step_logits if has_time_axis else step_logits[:, None])
            state = _StateHolder(state.value if new_state is None else new_state)
        return torch.cat(logits, 1), state

    return CacheStepper(adapter, advance, reorder_fn=reorder, single_token=True)


def _init_arguments(
    init_state: Callable[..., Any], rows: int, length: int, dtype: torch.dtype, device: torch.device
) -> list[Any]:
    """The arguments for an empty state, by the names of its parameters."""
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
    """A state with its floating tensors cast to the path's dtype."""
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast_state(item, dtype) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast_state(item, dtype) for item in value)
    return value


# -- a cache inside the model, and an argument that says where new tokens stand ----------------


def _from_start_argument(adapter: ModelAdapter, reorder: Callable[..., Any] | None) -> CacheStepper:
    """forward(tokens, start_pos)"""
    name = adapter.signature.argument_for("start")
    assert name is not None
    return _internal_cache_stepper(adapter, name, lambda start, size: start, reorder)


def _from_position_argument(
    adapter: ModelAdapter, name: str, reorder: Callable[..., Any] | None
) -> CacheStepper:
    """forward(tokens, input_pos). Raises CallError where these are mere positions and nothing is cached."""
    error: CallError | None = None
    for set_up in (None, *_set_up_methods(adapter)):
        stepper = _internal_cache_stepper(
            adapter, name, lambda start, size: torch.arange(start, start + size), reorder, set_up
        )
        try:
            with module_state.preserve_state(adapter.module):
                if _depends_on_state(stepper):
                    return stepper
        except CallError as call_error:  # without its caches, perhaps
            error = call_error
    raise error or CallError(
        f"given {name}, it keeps nothing from call to call: set its caches up first, or give prefill= and "
        "step= to check one"
    )


def _set_up_methods(adapter: ModelAdapter) -> list[Callable[..., Any]]:
    """Methods that make the caches of a model, as setup_caches(batch, length) does."""
    module = adapter.module
    return [
        method
        for name in (dir(type(module)) if module is not None else ())
        if _SET_UP_METHOD.match(name) and callable(method := getattr(module, name, None))
    ]


def _internal_cache_stepper(
    adapter: ModelAdapter,
    name: str,
    argument_value: Callable[[int, int], Any],
    reorder: Callable[..., Any] | None,
    set_up: Callable[..., Any] | None = None,
) -> CacheStepper:
    """`set_up`: called before each sequence."""

    def advance(
        inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        if set_up is not None and state is None:
            rows, length = inputs.tokens.shape[:2]
            arguments = _init_arguments(set_up, rows, length, path.dtype or adapter.dtype, adapter.device)
            adapter.invoke(set_up, {}, *arguments)
        chunk = _slice_inputs(adapter, inputs, start, size)
        chunk = chunk.but(extra={**chunk.extra, name: argument_value(start, size)})
        return adapter.select_output(adapter.run_raw(chunk, path), chunk.tokens.shape[0], size), True

    return CacheStepper(adapter, advance, reorder_fn=reorder, accepts_mask_and_positions=True)


def _slice_inputs(adapter: ModelAdapter, inputs: Inputs, start: int, size: int) -> Inputs:
    """A chunk: its tokens and their positions, and the mask of all tokens so far."""
    rows, length = inputs.tokens.shape[:2]
    required = adapter.signature.required
    keep_mask = inputs.keep_mask
    positions = inputs.positions
    padding_argument = adapter.padding_argument
    if (
        keep_mask is None
        and padding_argument is not None
        and padding_argument.name in required
        and padding_argument.form != "lengths"
    ):
        keep_mask = torch.ones(rows, length, dtype=torch.bool)
    if positions is None and adapter.positions_argument in required:
        positions = torch.arange(length).expand(rows, length)
    return inputs.select_positions(slice(start, start + size)).but(
        keep_mask=None if keep_mask is None else keep_mask[:, : start + size],
        positions=None if positions is None else positions[:, start : start + size],
    )


# -- a cache among the arguments ---------------------------------------------------------------


class InferenceParams:
    """The object that Megatron, FlashAttention and Mamba pass around: keys and values by layer, and how many
    tokens were read.

    The caller counts them, unless the model does.
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
        """Has anything been put into it?"""
        return bool(self.key_value_memory_dict)

    def advance(self, size: int) -> None:
        if self.seqlen_offset == self.last_offsets[0]:
            self.seqlen_offset += size
        if self.sequence_len_offset == self.last_offsets[1]:
            self.sequence_len_offset += size
        self.last_offsets = self.seqlen_offset, self.sequence_len_offset


CacheFactory = Callable[[int, int], Any]  # (rows, length) → an empty cache, or None


def _from_cache_argument(
    adapter: ModelAdapter, names: tuple[str, ...], reorder: Callable[..., Any] | None, *, is_known_cache: bool
) -> CacheStepper:
    """forward(tokens, cache) → an output with the new cache; a cache that is filled in place is given empty.

    names: one cache, or several states that belong together. is_known_cache: the name alone says that it is a
    cache; others must prove it. Raises CallError where it is none, or cannot be used.
    """
    use_cache_argument = adapter.signature.argument_for("use_cache")
    if use_cache_argument is None and adapter.facts.is_huggingface:
        use_cache_argument = "use_cache"
    use_cache = {} if use_cache_argument is None else {use_cache_argument: True}
    probe_inputs = adapter.make_inputs(2, 3, seed=5).but(extra=use_cache)
    with torch.no_grad():
        out = adapter.run_raw(probe_inputs, CodePath())
    name = names[0]
    full_prefix = name in FULL_PREFIX_ARGUMENTS
    returns_cache = not full_prefix and _returned_state(out, names) is not None
    make_cache: CacheFactory = lambda rows, length: None
    if not returns_cache:
        factory = _find_cache_factory(adapter, probe_inputs, name) if len(names) == 1 else None
        if factory is None:
            raise CallError(
                f"the model takes {name}, but gives none back: give prefill= and step= to check its cache"
            )
        make_cache = factory
    cache_kinds: dict[str, CacheFactory] = {GROWING_CACHE: make_cache}
    if adapter.facts.is_huggingface and is_known_cache:
        cache_kinds |= _huggingface_caches(adapter)

    def advance(
        inputs: Inputs, start: int, size: int, state: Any, cache_kind: str, path: CodePath
    ) -> tuple[Tensor, Any]:
        chunk = (
            _slice_inputs(adapter, inputs, 0, start + size)
            if full_prefix
            else _slice_inputs(adapter, inputs, start, size)
        )
        cache = cache_kinds[cache_kind](*inputs.tokens.shape[:2]) if state is None else state
        cache_arguments = {} if cache is None else cache if len(names) > 1 else {name: cache}
        out = adapter.run_raw(chunk.but(extra={**use_cache, **cache_arguments}), path)
        if isinstance(cache, InferenceParams):
            adapter.call_method(cache.advance, size)
        returned_cache = _returned_state(out, names) if returns_cache else None
        logits = adapter.select_output(out, chunk.tokens.shape[0], size)
        return logits, cache if returned_cache is None else returned_cache

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


def _find_cache_factory(adapter: ModelAdapter, inputs: Inputs, name: str) -> CacheFactory | None:
    """An empty object that the model fills when it is given as its cache."""
    factories: tuple[CacheFactory, ...] = (lambda *_: {}, lambda *_: [], InferenceParams)
    for factory in factories:
        cache = factory(*inputs.tokens.shape[:2])
        try:
            with torch.no_grad():
                adapter.run_raw(inputs.but(extra={**inputs.extra, name: cache}), CodePath())
        except CallError:
            continue
        if cache:
            return factory
    return None


def _huggingface_caches(adapter: ModelAdapter) -> dict[str, CacheFactory]:
    """A static cache, where transformers has one for this model."""
    try:
        from transformers import StaticCache
    except ImportError:
        return {}
    module = adapter.module
    if adapter.facts.is_encoder_decoder or not getattr(
        module, "_can_compile_fullgraph", getattr(module, "_supports_static_cache", False)
    ):
        return {}
    config = cast(Any, module).config.get_text_config(decoder=True)

    def make_static_cache(rows: int, length: int) -> Any:
        return StaticCache(config=config, max_cache_len=length + SPARE_SLOTS)

    return {"a static cache": make_static_cache}


def _returned_state(out: Any, names: tuple[str, ...]) -> Any:
    """The state for the next call in an output: one value, or a dict by name where there are several; None
    where one is missing.
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


def _returned_cache(out: Any, name: str) -> Any:
    """The new cache in an output: by its name, or else the last part of a tuple."""
    cache = outputs.find(out, (name, *CACHE_ARGUMENTS, "present", "presents", "new_cache", "kv"))
    if cache is None:
        cache = _match_by_stem(dict(outputs.named_parts(out)), name)
    if cache is not None:
        return cache
    if isinstance(out, tuple | list) and len(out) > 1:
        last = out[-1]
        is_empty = isinstance(last, dict | tuple | list) and all(
            value is None for _, value in outputs.named_parts(last)
        )
        return None if last is None or is_empty or (isinstance(last, Tensor) and last.dim() < 1) else last
    return None


def _match_by_stem(parts: dict[Any, Any], name: str) -> Any:
    return next(
        (value for key, value in parts.items() if isinstance(key, str) and _stem(key) == _stem(name)), None
    )


def _stem(name: str) -> str:
    """h for h0, hx, hn and h_n; cache for new_cache and cache_out."""
    name = _STATE_AFFIX.sub("", name.lower())
    return name[:-1] if len(name) == 2 and name[-1] in "0nxt" else name
