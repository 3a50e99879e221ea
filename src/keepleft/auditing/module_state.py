"""What a module keeps from call to call, buffers and attributes: saved, and restored afterwards."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


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
