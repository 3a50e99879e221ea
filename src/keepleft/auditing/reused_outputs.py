"""Submodules that are called with what they were called with last return what they returned then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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
