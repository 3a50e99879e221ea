"""The one output that is audited: per position, wherever a model puts it and whichever axis is time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

PREFERRED = ("logits", "last_hidden_state", "lm_logits", "prediction_logits", "scores", "output", "outputs", "out")


def parts(value: Any, depth: int = 0) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every floating tensor in an output with the way to it, the preferred ones first."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield (), value
        return
    if depth > 3:
        return
    for key, part in sorted(named(value), key=lambda pair: pair[0] not in PREFERRED):
        for path, tensor in parts(part, depth + 1):
            yield (key, *path), tensor


def named(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a mapping, dataclass, named tuple, tuple or list, with their names."""
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(one.name, getattr(value, one.name)) for one in fields(value)]
    if hasattr(value, "_asdict"):
        return list(value._asdict().items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    return []


@dataclass(frozen=True)
class Selector:
    """Where the audited output stands."""

    way: tuple[Any, ...]
    time: int
    batch: int

    def __call__(self, value: Any) -> Tensor:
        """(B, T, …)"""
        for key in self.way:
            value = dict(named(value))[key]
        tensor: Tensor = value.movedim((self.batch, self.time), (0, 1))
        return tensor[..., None] if tensor.dim() == 2 else tensor

    def spelt(self) -> str:
        """As Python takes it from an output."""
        return "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in self.way)

    def __str__(self) -> str:
        return ".".join(map(str, self.way)) or "the output"


def selector(value: Any, batch: int, length: int) -> Selector | None:
    """The first tensor with a time axis. (B, T, …) before any other order."""
    for way, tensor in parts(value):
        if tensor.dim() >= 2 and tensor.shape[:2] == (batch, length):
            return Selector(way, 1, 0)
    for way, tensor in parts(value):
        if tensor.dim() >= 2 and tensor.shape[:2] == (length, batch):
            return Selector(way, 0, 1)
        if tensor.dim() >= 2 and tensor.shape[0] == batch and length in tensor.shape[2:]:
            return Selector(way, 2 + tuple(tensor.shape[2:]).index(length), 0)
    return None


def selectors(value: Any, batch: int, length: int) -> list[Selector]:
    """Every output for each position, (B, T, …)."""
    return [Selector(way, 1, 0) for way, tensor in parts(value) if tensor.dim() >= 2 and tensor.shape[:2] == (batch, length)]


def find(value: Any, names: tuple[str, ...]) -> Any:
    """The part with one of these names, or None."""
    held = dict(named(value))
    return next((held[name] for name in names if held.get(name) is not None), None)
