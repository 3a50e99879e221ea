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

from keepleft.auditing.roles import FLAGS


class HungError(TimeoutError):
    """A call took longer than it may."""


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

    before, left = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def woken(module: nn.Module | None, seed: int = 0) -> Iterator[int]:
    """Weights that are all zero (a gate, an output projection before training) hide what stands behind them: for a while
    they are not zero. Says how many there are."""
    asleep = [] if module is None else [p for p in module.parameters() if p.requires_grad and p.is_floating_point()
                                        and p.numel() and p.device.type != "meta" and not p.detach().count_nonzero()]
    if asleep:
        chance = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in asleep:
                wide = p.shape[-1] if p.dim() > 1 else 4
                p.copy_(torch.randn(p.shape, generator=chance) / math.sqrt(max(1, wide)) * 0.5)
    try:
        yield len(asleep)
    finally:
        with torch.no_grad():
            for p in asleep:
                p.zero_()


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
def kept(module: nn.Module | None) -> Iterator[None]:
    """Buffers (running statistics, caches) and modes are as before afterwards."""
    if module is None:
        yield
        return
    buffers = [(b, b.detach().clone()) for b in module.buffers() if b.device.type != "meta"]
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                if buffer.shape == value.shape and not torch.equal(buffer, value):
                    buffer.copy_(value)
        for part, mode in modes:
            part.training = mode


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


def flags(module: nn.Module) -> dict[str, bool]:
    """Attributes that choose between implementations, with what they are now."""
    out: dict[str, bool] = {}
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, bool) and any(word in name.lower() for word in FLAGS):
                out.setdefault(name, value)
    return out


@contextmanager
def flagged(module: nn.Module, name: str, value: bool) -> Iterator[None]:
    """An attribute of that name, wherever it stands, has another value for a while."""
    before = [(part, vars(part)[name]) for part in module.modules() if isinstance(vars(part).get(name), bool)]
    for part, _ in before:
        setattr(part, name, value)
    try:
        yield
    finally:
        for part, was in before:
            setattr(part, name, was)
