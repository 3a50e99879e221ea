"""Around a call: a time limit, weights that are woken or cast for a while, modes and flags that go back to
what they were.
"""

from __future__ import annotations

import math
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from keepleft.auditing.argument_roles import FLAG_NAME_PARTS, IMPLEMENTATION_ATTRIBUTE, IMPLEMENTATION_NAMES


class CallTimeoutError(BaseException):
    """A call took longer than it may.

    Not an Exception, so that a model's own `except Exception` does not swallow it.
    """


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Stop what runs longer. Only the main thread can be stopped; elsewhere there is no limit."""
    enforceable = (
        seconds is not None
        and hasattr(signal, "SIGALRM")
        and threading.current_thread() is threading.main_thread()
    )
    if not enforceable:
        yield
        return
    assert seconds is not None

    def on_alarm(*_: Any) -> None:
        raise CallTimeoutError(f"a call took longer than {seconds:g} s")

    previous_handler = signal.signal(signal.SIGALRM, on_alarm)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
        signal.signal(signal.SIGALRM, previous_handler)


@contextmanager
def randomize_zero_weights(module: nn.Module | None, seed: int = 0) -> Iterator[int]:
    """Weights that are all zero (a gate, an output projection before training) hide what stands behind them:
    for a while they are not zero. Says how many there are.
    """
    rng, zero_weights = torch.Generator().manual_seed(seed), []
    try:
        for p in module.parameters() if module is not None else ():
            if (
                p.requires_grad
                and p.is_floating_point()
                and p.numel()
                and p.device.type != "meta"
                and not _has_nonzero(p)
            ):
                fan_in = p.shape[-1] if p.dim() > 1 else 4
                original = p.detach().clone() if p.detach().signbit().any() else None
                try:
                    with torch.no_grad():
                        p.copy_(torch.randn(p.shape, generator=rng) / math.sqrt(max(1, fan_in)) * 0.5)
                except RuntimeError:  # it cannot be written: sharded, or made for inference
                    continue
                zero_weights.append((p, original))
        yield len(zero_weights)
    finally:
        with torch.no_grad():
            for p, original in zero_weights:
                p.zero_() if original is None else p.copy_(original)


def _has_nonzero(weight: Tensor) -> bool:
    """Is any of it not zero? What cannot be looked at counts as awake."""
    try:
        return bool(weight.detach().count_nonzero())
    except (RuntimeError, NotImplementedError):
        return True


@contextmanager
def cast_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The same module with floating weights and buffers of another kind; afterwards it has its own objects
    back.
    """
    converted: dict[int, Any] = {}
    originals: list[tuple[nn.Module, str, Any, bool]] = []

    def convert(tensor: Tensor, is_parameter: bool) -> Any:
        if id(tensor) not in converted:
            new = tensor.detach().to(dtype)
            converted[id(tensor)] = (
                nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
            )
        return converted[id(tensor)]

    try:
        for submodule in module.modules():
            for is_parameter, tensors in ((True, submodule._parameters), (False, submodule._buffers)):
                for name, tensor in list(tensors.items()):
                    if tensor is not None and tensor.is_floating_point() and tensor.dtype != dtype:
                        originals.append((submodule, name, tensor, is_parameter))
                        setattr(submodule, name, convert(tensor, is_parameter))
        yield
    finally:
        for submodule, name, tensor, _ in originals:
            setattr(submodule, name, tensor)


@contextmanager
def preserve_modes(module: nn.Module) -> Iterator[None]:
    """Train and eval, part by part, as before afterwards."""
    original_modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, mode in original_modes:
            submodule.training = mode


@contextmanager
def preserve_state(module: nn.Module | None) -> Iterator[None]:
    """Buffers (running statistics, caches), modes and attributes are as before afterwards, and what was added
    is gone.
    """
    if module is None:
        yield
        return
    snapshot = snapshot_buffers(module)
    saved = [
        (
            submodule,
            dict(vars(submodule)),
            dict(submodule._parameters),
            dict(submodule._buffers),
            set(submodule._non_persistent_buffers_set),
        )
        for submodule in module.modules()
        if not isinstance(submodule, torch.jit.ScriptModule)
    ]
    try:
        yield
    finally:
        for submodule, attributes, parameters, buffers, non_persistent in saved:
            vars(submodule).clear()
            vars(submodule).update(attributes)
            submodule._parameters.clear()
            submodule._parameters.update(parameters)
            submodule._buffers.clear()
            submodule._buffers.update(buffers)
            submodule._non_persistent_buffers_set.clear()
            submodule._non_persistent_buffers_set.update(non_persistent)
        restore_buffers(snapshot)


BufferSnapshot = list[tuple[Tensor, int, Tensor]]


def snapshot_buffers(module: nn.Module | None) -> BufferSnapshot:
    """Every buffer with its version and its value."""
    return [
        (b, b._version, b.detach().clone())
        for b in (module.buffers() if module is not None else ())
        if b.device.type != "meta" and not b.is_inference()
    ]


def restore_buffers(snapshot: BufferSnapshot) -> bool:
    """Put buffers back that have changed since; says whether any had."""
    changed = [
        (b, value) for b, version, value in snapshot if b._version != version and b.shape == value.shape
    ]
    with torch.no_grad():
        for b, value in changed:
            b.copy_(value)
    for n, (b, _, value) in enumerate(snapshot):
        snapshot[n] = (b, b._version, value)
    return bool(changed)


class BoundsCheck(TorchFunctionMode):
    """Look-ups beyond the end of a table are refused before a GPU stumbles over them: it would not get up
    again.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = [*args, *kwargs.values()]
        int_dtypes = (torch.int64, torch.int32)
        ids = next(
            (value for value in arguments[1:] if isinstance(value, Tensor) and value.dtype in int_dtypes),
            None,
        )
        if ids is not None and ids.numel() and isinstance(arguments[0], Tensor):
            axis_size = None
            if func in (torch.gather, Tensor.gather, torch.index_select, Tensor.index_select):
                axis = kwargs.get("dim", next((value for value in args[1:] if isinstance(value, int)), 0))
                axis_size = arguments[0].shape[axis]
            elif func is Tensor.__getitem__ and arguments[1] is ids:
                axis_size = arguments[0].shape[0]
            if axis_size is not None and int(ids.max()) >= axis_size:
                raise IndexError(f"{int(ids.max())} is beyond the end of an axis of {axis_size}")
            if func in (F.cross_entropy, F.nll_loss):
                num_classes = arguments[0].shape[min(1, arguments[0].dim() - 1)]
                ignore_index = kwargs.get("ignore_index", (*args, *[-100] * 5)[4])
                invalid = ids[(ids != ignore_index) & ((ids < 0) | (ids >= num_classes))]
                if len(invalid):
                    raise IndexError(
                        f"Target {int(invalid[0])} is out of bounds: there are {num_classes} kinds"
                    )
        if func in (F.embedding, torch.embedding):
            embedding_table = next(
                value for value in arguments if isinstance(value, Tensor) and value.is_floating_point()
            )
            indices = next(
                value for value in arguments if isinstance(value, Tensor) and not value.is_floating_point()
            )
            if indices.numel() and int(indices.max()) >= len(embedding_table):
                raise IndexError(
                    f"{int(indices.max())} is beyond the end of a table of {len(embedding_table)}"
                )
        return func(*args, **kwargs)


_DROPOUT_NAME = re.compile(
    r"drop(out)?(_p|_prob|_rate|out)?$|^(attn|attention|resid|embd|hidden|activation)\w*(drop|pdrop)\w*$|p_drop"
)


class _NoDropout(TorchFunctionMode):
    """Dropout drops nothing, wherever it is called from."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout):
            return args[0] if args else kwargs["input"]
        if kwargs.get("dropout_p"):
            kwargs["dropout_p"] = 0.0
        if func is F.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        return func(*args, **kwargs)


@contextmanager
def train_mode(module: nn.Module, enabled: bool, *, patch_functional: bool = False) -> Iterator[None]:
    """Train mode with every dropout at 0, or eval mode; patch_functional: also where it is only called, not
    kept in an attribute.
    """
    with ExitStack() as stack:
        module.train(enabled)
        if enabled and patch_functional:
            stack.enter_context(_NoDropout())
        if enabled:
            for submodule in module.modules():
                for name, value in list(vars(submodule).items()):
                    is_dropout_rate = name == "p" and isinstance(submodule, nn.modules.dropout._DropoutNd)
                    if (
                        isinstance(value, float)
                        and 0 < value < 1
                        and (is_dropout_rate or _DROPOUT_NAME.search(name))
                    ):
                        setattr(submodule, name, 0.0)
                        stack.callback(setattr, submodule, name, value)
        yield


def implementation_flags(module: nn.Module) -> list[tuple[str, Any]]:
    """Attributes that choose between implementations, each with a value that it does not have now."""
    alternatives: dict[tuple[str, Any], None] = {}
    for submodule in module.modules():
        for name, value in vars(submodule).items():
            if isinstance(value, bool) and any(fragment in name.lower() for fragment in FLAG_NAME_PARTS):
                alternatives[name, not value] = None
            elif (
                isinstance(value, str)
                and value.lower() in IMPLEMENTATION_NAMES
                and IMPLEMENTATION_ATTRIBUTE.search(name)
            ):
                alternatives |= dict.fromkeys(
                    (name, implementation) for implementation in ("eager", "sdpa") if implementation != value
                )
    return list(alternatives)


@contextmanager
def with_flag(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """An attribute of that name, wherever it stands, has another value for a while."""
    originals = [
        (submodule, vars(submodule)[name])
        for submodule in module.modules()
        if isinstance(vars(submodule).get(name), type(value))
    ]
    for submodule, _ in originals:
        setattr(submodule, name, value)
    try:
        yield
    finally:
        for submodule, original in originals:
            setattr(submodule, name, original)
