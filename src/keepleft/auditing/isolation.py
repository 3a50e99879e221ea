"""Around a call: a time limit, a bounds check, and changes to weights, modes and flags that are undone."""

from __future__ import annotations

import math
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from keepleft.nn.loss import IGNORE_INDEX

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
