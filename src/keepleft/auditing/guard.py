"""Around a call: a time limit, weights that are woken or cast for a while, modes and flags that go back to what they were."""

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

from keepleft.auditing.roles import CHOICES, CHOOSES, FLAGS


class HungError(BaseException):
    """A call took longer than it may. Not an Exception, so that a model's own `except Exception` does not swallow it."""


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Stop what runs longer. Only the main thread can be stopped; elsewhere there is no limit."""
    usable = seconds is not None and hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if not usable:
        yield
        return
    assert seconds is not None

    def ring(*_: Any) -> None:
        raise HungError(f"a call took longer than {seconds:g} s")

    before, left = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def woken(module: nn.Module | None, seed: int = 0) -> Iterator[int]:
    """Weights that are all zero (a gate, an output projection before training) hide what stands behind them: for a while
    they are not zero. Says how many there are."""
    chance, asleep = torch.Generator().manual_seed(seed), []
    try:
        for p in module.parameters() if module is not None else ():
            if p.requires_grad and p.is_floating_point() and p.numel() and p.device.type != "meta" and not _any(p):
                wide, was = p.shape[-1] if p.dim() > 1 else 4, p.detach().clone() if p.detach().signbit().any() else None
                try:
                    with torch.no_grad():
                        p.copy_(torch.randn(p.shape, generator=chance) / math.sqrt(max(1, wide)) * 0.5)
                except RuntimeError:  # it cannot be written: sharded, or made for inference
                    continue
                asleep.append((p, was))
        yield len(asleep)
    finally:
        with torch.no_grad():
            for p, was in asleep:
                p.zero_() if was is None else p.copy_(was)


def _any(weight: Tensor) -> bool:
    """Is any of it not zero? What cannot be looked at counts as awake."""
    try:
        return bool(weight.detach().count_nonzero())
    except (RuntimeError, NotImplementedError):
        return True


@contextmanager
def cast(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The same module with floating weights and buffers of another kind; afterwards it has its own objects back."""
    done: dict[int, Any] = {}
    swapped: list[tuple[nn.Module, str, Any, bool]] = []

    def other(tensor: Tensor, parameter: bool) -> Any:
        if id(tensor) not in done:
            new = tensor.detach().to(dtype)
            done[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if parameter else new
        return done[id(tensor)]

    try:
        for part in module.modules():
            for parameter, held in ((True, part._parameters), (False, part._buffers)):
                for name, tensor in list(held.items()):
                    if tensor is not None and tensor.is_floating_point() and tensor.dtype != dtype:
                        swapped.append((part, name, tensor, parameter))
                        setattr(part, name, other(tensor, parameter))
        yield
    finally:
        for part, name, tensor, _ in swapped:
            setattr(part, name, tensor)


@contextmanager
def modes(module: nn.Module) -> Iterator[None]:
    """Train and eval, part by part, as before afterwards."""
    before = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode


@contextmanager
def kept(module: nn.Module | None) -> Iterator[None]:
    """Buffers (running statistics, caches), modes and attributes are as before afterwards, and what was added is gone."""
    if module is None:
        yield
        return
    before = buffers(module)
    held = [(part, dict(vars(part)), dict(part._parameters), dict(part._buffers), set(part._non_persistent_buffers_set))
            for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    try:
        yield
    finally:
        for part, attributes, parameters, own, fleeting in held:
            vars(part).clear()
            vars(part).update(attributes)
            part._parameters.clear()
            part._parameters.update(parameters)
            part._buffers.clear()
            part._buffers.update(own)
            part._non_persistent_buffers_set.clear()
            part._non_persistent_buffers_set.update(fleeting)
        returned(before)


Kept = list[tuple[Tensor, int, Tensor]]


def buffers(module: nn.Module | None) -> Kept:
    """Every buffer with its version and its value."""
    return [(b, b._version, b.detach().clone()) for b in (module.buffers() if module is not None else ())
            if b.device.type != "meta" and not b.is_inference()]


def returned(before: Kept) -> bool:
    """Put buffers back that have changed since; says whether any had."""
    changed = [(b, value) for b, version, value in before if b._version != version and b.shape == value.shape]
    with torch.no_grad():
        for b, value in changed:
            b.copy_(value)
    for n, (b, _, value) in enumerate(before):
        before[n] = (b, b._version, value)
    return bool(changed)


class Within(TorchFunctionMode):
    """Look-ups beyond the end of a table are refused before a GPU stumbles over them: it would not get up again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        whole = (torch.int64, torch.int32)
        ids = next((value for value in given[1:] if isinstance(value, Tensor) and value.dtype in whole), None)
        if ids is not None and ids.numel() and isinstance(given[0], Tensor):
            longest = None
            if func in (torch.gather, Tensor.gather, torch.index_select, Tensor.index_select):
                axis = kwargs.get("dim", next((value for value in args[1:] if isinstance(value, int)), 0))
                longest = given[0].shape[axis]
            elif func is Tensor.__getitem__ and given[1] is ids:
                longest = given[0].shape[0]
            if longest is not None and int(ids.max()) >= longest:
                raise IndexError(f"{int(ids.max())} is beyond the end of an axis of {longest}")
            if func in (F.cross_entropy, F.nll_loss):
                kinds, ignored = given[0].shape[min(1, given[0].dim() - 1)], kwargs.get("ignore_index", (*args, *[-100] * 5)[4])
                wrong = ids[(ids != ignored) & ((ids < 0) | (ids >= kinds))]
                if len(wrong):
                    raise IndexError(f"Target {int(wrong[0])} is out of bounds: there are {kinds} kinds")
        if func in (F.embedding, torch.embedding):
            table = next(value for value in given if isinstance(value, Tensor) and value.is_floating_point())
            looked = next(value for value in given if isinstance(value, Tensor) and not value.is_floating_point())
            if looked.numel() and int(looked.max()) >= len(table):
                raise IndexError(f"{int(looked.max())} is beyond the end of a table of {len(table)}")
        return func(*args, **kwargs)


_DROP = re.compile(r"drop(out)?(_p|_prob|_rate|out)?$|^(attn|attention|resid|embd|hidden|activation)\w*(drop|pdrop)\w*$|p_drop")


class _Undropped(TorchFunctionMode):
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
def training(module: nn.Module, on: bool, *, deep: bool = False) -> Iterator[None]:
    """Train mode with every dropout at 0, or eval mode; deep: also where it is only called, not kept in an attribute."""
    with ExitStack() as later:
        module.train(on)
        if on and deep:
            later.enter_context(_Undropped())
        if on:
            for part in module.modules():
                for name, value in list(vars(part).items()):
                    drops = name == "p" and isinstance(part, nn.modules.dropout._DropoutNd)
                    if isinstance(value, float) and 0 < value < 1 and (drops or _DROP.search(name)):
                        setattr(part, name, 0.0)
                        later.callback(setattr, part, name, value)
        yield


def flags(module: nn.Module) -> list[tuple[str, Any]]:
    """Attributes that choose between implementations, each with a value that it does not have now."""
    out: dict[tuple[str, Any], None] = {}
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, bool) and any(word in name.lower() for word in FLAGS):
                out[name, not value] = None
            elif isinstance(value, str) and value.lower() in CHOICES and CHOOSES.search(name):
                out |= dict.fromkeys((name, other) for other in ("eager", "sdpa") if other != value)
    return list(out)


@contextmanager
def flagged(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """An attribute of that name, wherever it stands, has another value for a while."""
    before = [(part, vars(part)[name]) for part in module.modules() if isinstance(vars(part).get(name), type(value))]
    for part, _ in before:
        setattr(part, name, value)
    try:
        yield
    finally:
        for part, was in before:
            setattr(part, name, was)
