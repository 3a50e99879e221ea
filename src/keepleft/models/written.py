"""A design as JSON and back: each choice under its name, each mask as it prints."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from keepleft.attention.masks import Mask
from keepleft.attention.reading import mask as read_mask
from keepleft.models import design
from keepleft.models.design import Design
from keepleft.nn import feedforward, norm, position

_KINDS = {kind.__name__: kind for room in (design, feedforward, norm, position) for kind in vars(room).values()
          if isinstance(kind, type) and is_dataclass(kind)}


def write(plan: Design) -> dict[str, Any]:
    """The design as plain dictionaries, lists, strings and numbers."""
    out = _write(plan)
    if read(out) != plan:  # a mask of one's own prints a name that means nothing elsewhere
        raise ValueError(f"the design {plan} does not survive being written down")
    return out


def read(data: dict[str, Any]) -> Design:
    """The way back; an unknown or missing field is an error that names it."""
    out = _read(data, "design")
    if not isinstance(out, Design):
        raise ValueError(f"the design is a {type(out).__name__}, not a Design")
    return out


def _write(value: Any) -> Any:
    if isinstance(value, Mask):
        return {"mask": repr(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__} | {f.name: _write(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_write(part) for part in value]
    return value


def _read(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return tuple(_read(part, where) for part in value)
    if not isinstance(value, dict):
        return value
    if value.keys() == {"mask"}:
        return read_mask(value["mask"])
    kind = _KINDS.get(value.get("kind", ""))
    if kind is None:
        raise ValueError(f"{where} has the kind {value.get('kind')!r}: there are {', '.join(sorted(_KINDS))}")
    known = {f.name for f in fields(kind)}
    unknown = sorted(value.keys() - known - {"kind"})
    if unknown:
        raise ValueError(f"{where} has unknown fields {', '.join(unknown)}: a {kind.__name__} has {', '.join(sorted(known))}")
    try:
        return kind(**{name: _read(part, f"{where}.{name}") for name, part in value.items() if name != "kind"})
    except TypeError as error:
        raise ValueError(f"{where} is no complete {kind.__name__}: {error}") from error
