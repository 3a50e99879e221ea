"""Around a call: a time limit, a bounds check, and changes to weights, modes and flags that are undone."""

from __future__ import annotations

import copy
import math
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from keepleft.nn.loss import IGNORE_INDEX

TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
# -- limits ------------------------------------------------------------------------------------


class CallTimeoutError(BaseException):
    """A call took longer than its time limit.

    Not an Exception, so that a model's own `except Exception` does not swallow it.
    """


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise CallTimeoutError after so many seconds. Signals reach the main thread only; in others there is no
    limit.
    """
    enforceable = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if seconds is None or not enforceable:
        yield
        return

    def on_alarm(*_: Any) -> None:
        raise CallTimeoutError(f"a call took longer than {seconds:g} s")

    previous_handler = signal.signal(signal.SIGALRM, on_alarm)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
        signal.signal(signal.SIGALRM, previous_handler)


class BoundsCheck(TorchFunctionMode):
    """Raises IndexError for an index beyond the end of a table before the kernel runs: on a GPU it would fail
    an assertion, after which no further call in the process works.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = [*args, *kwargs.values()]
        if func in (F.embedding, torch.embedding):
            self.check_embedding(arguments)
        elif arguments and isinstance(arguments[0], Tensor):
            indices = next((value for value in arguments[1:] if _is_index(value)), None)
            if indices is not None and indices.numel():
                if func in (F.cross_entropy, F.nll_loss):
                    # ignore_index is the fifth parameter of both
                    default = args[4] if len(args) > 4 else IGNORE_INDEX
                    self.check_targets(arguments[0], indices, kwargs.get("ignore_index", default))
                else:
                    self.check_indices(func, args, kwargs, arguments, indices)
        return func(*args, **kwargs)

    def check_embedding(self, arguments: list[Any]) -> None:
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        table = next(value for value in tensors if value.is_floating_point())
        indices = next(value for value in tensors if not value.is_floating_point())
        if indices.numel() and int(indices.max()) >= len(table):
            raise IndexError(f"{int(indices.max())} is beyond the end of a table of {len(table)}")

    def check_indices(self, func: Any, args: Any, kwargs: Any, arguments: list[Any], indices: Tensor) -> None:
        """gather and index_select along an axis; indexing with one tensor of indices."""
        if func in (torch.gather, Tensor.gather, torch.index_select, Tensor.index_select):
            axis = kwargs.get("dim", next((value for value in args[1:] if isinstance(value, int)), 0))
        elif func is Tensor.__getitem__ and arguments[1] is indices:
            axis = 0
        else:
            return
        axis_size = arguments[0].shape[axis]
        if int(indices.max()) >= axis_size:
            raise IndexError(f"{int(indices.max())} is beyond the end of an axis of {axis_size}")

    def check_targets(self, logits: Tensor, targets: Tensor, ignore_index: int) -> None:
        num_classes = logits.shape[min(1, logits.dim() - 1)]
        invalid = targets[(targets != ignore_index) & ((targets < 0) | (targets >= num_classes))]
        if len(invalid):
            raise IndexError(f"Target {int(invalid[0])} is out of bounds: there are {num_classes} classes")


def _is_index(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


# -- weights and buffers -----------------------------------------------------------------------


@contextmanager
def randomize_zero_weights(module: nn.Module | None, seed: int = 0) -> Iterator[int]:
    """Weights that are all zero (a gate, an output projection before training) hide what lies behind them:
    for a while they are random. Yields how many there are.
    """
    rng = torch.Generator().manual_seed(seed)
    zero_weights: list[tuple[Tensor, Tensor | None]] = []
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
                # zeros may be negative: then they are copied, to be the same bits afterwards
                original = p.detach().clone() if p.detach().signbit().any() else None
                try:
                    with torch.no_grad():
                        p.copy_(torch.randn(p.shape, generator=rng) / math.sqrt(max(1, fan_in)) * 0.5)
                except RuntimeError:  # it cannot be written: sharded, or an inference tensor
                    continue
                zero_weights.append((p, original))
        yield len(zero_weights)
    finally:
        with torch.no_grad():
            for weight, original in zero_weights:
                weight.zero_() if original is None else weight.copy_(original)


def _has_nonzero(weight: Tensor) -> bool:
    """Is any element not zero? True for weights that cannot be read."""
    try:
        return bool(weight.detach().count_nonzero())
    except (RuntimeError, NotImplementedError):
        return True


@contextmanager
def cast_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The same module with its floating weights and buffers cast to a dtype; afterwards it has its own tensor
    objects again.
    """
    converted: dict[int, Any] = {}
    originals: list[tuple[nn.Module, str, Any]] = []

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
                        originals.append((submodule, name, tensor))
                        setattr(submodule, name, convert(tensor, is_parameter))
        yield
    finally:
        for submodule, name, tensor in originals:
            setattr(submodule, name, tensor)


@contextmanager
def preserve_state(module: nn.Module | None) -> Iterator[None]:
    """Restore buffers (running statistics, caches), modes and attributes afterwards, and remove what was
    added.
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
        restore_state(snapshot)


@dataclass
class SavedBuffer:
    """A buffer as it was: where it is kept, and what it held."""

    owner: dict[str, Tensor | None]
    name: str
    buffer: Tensor
    version: int
    value: Tensor

    def restore(self) -> bool:
        """Undo what has changed since, in place or by another tensor under its name; False if nothing has."""
        current = self.owner.get(self.name)
        # a table that has grown stays: other attributes may know how long it is
        is_replaced = (
            current is not self.buffer and current is not None and current.shape == self.buffer.shape
        )
        if is_replaced:
            self.owner[self.name] = self.buffer
        is_written = self.buffer._version != self.version and self.buffer.shape == self.value.shape
        if is_written:
            with torch.no_grad():
                self.buffer.copy_(self.value)
        self.version = self.buffer._version
        return is_replaced or is_written


@dataclass
class SavedAttributes:
    """What a module keeps beside its parameters and buffers, as it was: tensors, lists and dicts of them."""

    owner: dict[str, Any]
    values: dict[str, Any]
    contents: list[tuple[Any, Any]]  # a container or tensor, and a copy of what it held

    def restore(self) -> bool:
        is_changed = self.owner.keys() != self.values.keys() or any(
            self.owner[name] is not value for name, value in self.values.items()
        )
        if is_changed:
            self.owner.clear()
            self.owner.update(self.values)
        for kept, copied in self.contents:
            if isinstance(kept, Tensor):
                if kept.shape == copied.shape and not torch.equal(kept, copied):
                    with torch.no_grad():
                        kept.copy_(copied)
                    is_changed = True
            elif len(kept) != len(copied) or _differ(kept, copied):
                kept.clear()
                kept.update(copied) if isinstance(kept, dict | set) else kept.extend(copied)
                is_changed = True
        return is_changed


def _differ(kept: Any, copied: Any) -> bool:
    """Do two containers of one length hold different objects?"""
    if isinstance(kept, dict):
        return kept.keys() != copied.keys() or any(kept[key] is not value for key, value in copied.items())
    if isinstance(kept, set):
        return kept != copied
    return any(a is not b for a, b in zip(kept, copied, strict=True))


def _save_contents(value: Any, out: list[tuple[Any, Any]], depth: int = 3) -> None:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        out.append((value, value.detach().clone()))
    elif isinstance(value, dict | list | set | deque) and depth:
        out.append((value, copy.copy(value)))
        for item in value.values() if isinstance(value, dict) else value:
            _save_contents(item, out, depth - 1)


def snapshot_attributes(module: nn.Module) -> list[SavedAttributes]:
    """Of all submodules; nothing of torch's own."""
    out = []
    for submodule in module.modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            continue
        contents: list[tuple[Any, Any]] = []
        for name, value in vars(submodule).items():
            if name not in TORCH_ATTRIBUTES:
                _save_contents(value, contents)
        out.append(SavedAttributes(vars(submodule), dict(vars(submodule)), contents))
    return out


@contextmanager
def preserve_contents(module: nn.Module | None) -> Iterator[None]:
    """Restore what the lists, dicts and tensors among a module's attributes hold afterwards."""
    snapshot = snapshot_attributes(module) if module is not None else []
    try:
        yield
    finally:
        restore_state(snapshot)


StateSnapshot = Sequence[SavedBuffer | SavedAttributes]


def snapshot_buffers(module: nn.Module | None) -> list[SavedBuffer]:
    return [
        SavedBuffer(submodule._buffers, name, buffer, buffer._version, buffer.detach().clone())
        for submodule in (module.modules() if module is not None else ())
        for name, buffer in submodule._buffers.items()
        if buffer is not None and buffer.device.type != "meta" and not buffer.is_inference()
    ]


def restore_state(snapshot: StateSnapshot) -> list[SavedBuffer | SavedAttributes]:
    """Restore the buffers and attributes that have changed since, and say which had."""
    return [saved for saved in snapshot if saved.restore()]


# -- outputs used again ------------------------------------------------------------------------

_MISSING = object()


@contextmanager
def reuse_outputs(module: nn.Module | None) -> Iterator[None]:
    """A module directly below the model that is called with what its last call was given returns what it
    returned then: calls that differ in their labels alone compute the loss alone. For models that draw no
    random numbers.
    """
    submodules = list(_called_submodules(module)) if module is not None else []
    submodules = [each for each in submodules if "forward" not in vars(each)]
    try:
        for submodule in submodules:
            submodule.forward = _reusing(submodule.forward)
        yield
    finally:
        for submodule in submodules:
            vars(submodule).pop("forward", None)


def _called_submodules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules directly below, and in lists and dicts of modules, which are not called themselves."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_submodules(child)
        elif not isinstance(child, torch.jit.ScriptModule):
            yield child


def _reusing(function: Callable[..., Any]) -> Callable[..., Any]:
    last_arguments: Any = _MISSING
    last_output: Any = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal last_arguments, last_output
        arguments = (args, kwargs)
        if not _same_values(arguments, last_arguments):
            last_arguments = _MISSING
            last_output = function(*args, **kwargs)
            last_arguments = _copy_tensors(arguments)
        return last_output

    return call


def _same_values(a: Any, b: Any) -> bool:
    """Are these the same numbers, in the same structure? Objects that are neither are never the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same_values, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_values(value, b[key]) for key, value in a.items())
    return (a is None or isinstance(a, str | int | float | bool | torch.dtype | torch.device)) and a == b


def _copy_tensors(value: Any) -> Any:
    """The same structure with copies of its tensors, which later calls may change in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(map(_copy_tensors, value))
    if isinstance(value, dict):
        return {key: _copy_tensors(item) for key, item in value.items()}
    return value


# -- modes, flags and implementations ----------------------------------------------------------

_DROPOUT_NAME = re.compile(
    r"drop(out)?(_p|_prob|_rate|out)?$|"
    r"^(attn|attention|resid|embd|hidden|activation)\w*(drop|pdrop)\w*$|p_drop"
)


@contextmanager
def preserve_modes(module: nn.Module) -> Iterator[None]:
    """Restore train or eval mode afterwards, submodule by submodule."""
    original_modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, mode in original_modes:
            submodule.training = mode


class _NoDropout(TorchFunctionMode):
    """Functional dropout drops nothing, wherever it is called from."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout):
            return args[0] if args else kwargs["input"]
        if kwargs.get("dropout_p"):
            kwargs["dropout_p"] = 0.0
        if func is F.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        return func(*args, **kwargs)


class MasksOfOneDtype(TorchFunctionMode):
    """Attention masks get the dtype of the queries. On a CPU, PyTorch 2.13 reads a float32 mask under float64
    queries as if it were float64, from 33 keys on: an honest model in float64 would look like a leak.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            if len(args) > 3:
                args = (*args[:3], _cast_mask(args[3], query), *args[4:])
            elif "attn_mask" in kwargs:
                kwargs["attn_mask"] = _cast_mask(kwargs["attn_mask"], query)
        return func(*args, **kwargs)


def _cast_mask(mask: Any, query: Tensor) -> Any:
    is_float = isinstance(mask, Tensor) and mask.is_floating_point()
    return mask.to(query.dtype) if is_float else mask


@contextmanager
def train_mode(
    module: nn.Module, enabled: bool, *, patch_functional: bool = False, dropout: bool = False
) -> Iterator[None]:
    """Train mode with every dropout rate at 0, or eval mode. patch_functional: switch functional dropout off
    too, whose rate is no attribute. dropout: leave all of it on.
    """
    with ExitStack() as stack:
        module.train(enabled)
        if enabled and patch_functional and not dropout:
            stack.enter_context(_NoDropout())
        if enabled and not dropout:
            for submodule, name, value in list(_dropout_rates(module)):
                setattr(submodule, name, 0.0)
                stack.callback(setattr, submodule, name, value)
        yield


def has_dropout(module: nn.Module) -> bool:
    """Has it a dropout rate that is not zero among its attributes?"""
    return any(True for _ in _dropout_rates(module))


def _dropout_rates(module: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    """The submodules with a dropout rate that is not zero, its name and its value."""
    for submodule in module.modules():
        is_dropout = isinstance(submodule, nn.modules.dropout._DropoutNd)
        for name, value in vars(submodule).items():
            is_rate = (name == "p" and is_dropout) or bool(_DROPOUT_NAME.search(name))
            if is_rate and isinstance(value, float) and 0 < value < 1:
                yield submodule, name, value


@contextmanager
def as_if_compiled() -> Iterator[None]:
    """Code that asks whether torch.compile is at work is told that it is."""
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = False


@contextmanager
def with_flag(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Every attribute of that name and type in the module has another value for a while."""
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


@contextmanager
def with_implementation(module: nn.Module, name: str) -> Iterator[None]:
    """A Hugging Face model with another attention implementation for a while. Raises what transformers
    raises where the model does not support it.
    """
    if not getattr(module, "_can_set_attn_implementation", lambda: True)():
        raise RuntimeError("it is fixed once the model is built")
    with _preserve_config_attribute(module, "_attn_implementation"):
        cast(Any, module).set_attn_implementation(name)
        yield


@contextmanager
def with_eager_experts(module: nn.Module) -> Iterator[None]:
    """The experts of a Hugging Face model one after another: grouped matrix products have no float64."""
    with _preserve_config_attribute(module, "_experts_implementation") as configs:
        for config in configs:
            config._experts_implementation = "eager"
        yield


@contextmanager
def _preserve_config_attribute(module: nn.Module, attribute: str) -> Iterator[list[Any]]:
    """Yield the configurations in a module that have an attribute, and restore it in each afterwards."""
    configs = {
        id(config): config
        for submodule in module.modules()
        if (config := getattr(submodule, "config", None)) is not None and hasattr(config, attribute)
    }
    originals = [(config, getattr(config, attribute)) for config in configs.values()]
    try:
        yield list(configs.values())
    finally:
        for config, value in originals:
            setattr(config, attribute, value)
