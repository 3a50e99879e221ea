"""A design as JSON and back: each choice is an object with its class name as `kind`, each mask its repr."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from keepleft.attention.mask_parser import parse_mask
from keepleft.attention.masks import Mask
from keepleft.models import design
from keepleft.models.design import Design
from keepleft.nn import feedforward, norm, position

_CLASSES = {
    cls.__name__: cls
    for module in (design, feedforward, norm, position)
    for cls in vars(module).values()
    if isinstance(cls, type) and is_dataclass(cls)
}
_OLD_NAMES = {  # class and field names of older files, which are read but no longer written
    "Stack": "StackDesign",
    "Vocabulary": "LMHead",
    "Masked": "MaskedLMHead",
    "Pooled": "PoolingHead",
    "Classes": "ClassificationHead",
    "Normal": "NormalInit",
    "Xavier": "XavierInit",
    "Folded": "T5Init",
    "Learned": "LearnedPositions",
    "Stretched": "LinearRopeScaling",
    "Llama3": "Llama3RopeScaling",
    "kinds": "token_types",
}


def to_json(model_design: Design) -> dict[str, Any]:
    """The design as dictionaries, lists, strings and numbers; ValueError where it would not read back."""
    out = _to_json(model_design)
    if from_json(out) != model_design:  # the name of a Where mask means nothing to another program
        raise ValueError(f"the design {model_design} cannot be written as JSON")
    return out


def from_json(data: dict[str, Any]) -> Design:
    """The design that to_json wrote; ValueError names an unknown or missing field."""
    out = _from_json(data, "design")
    if not isinstance(out, Design):
        raise ValueError(f"the design is a {type(out).__name__}, not a Design")
    return out


def _to_json(value: Any) -> Any:
    if isinstance(value, Mask):
        return {"mask": repr(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__} | {
            f.name: _to_json(getattr(value, f.name)) for f in fields(value)
        }
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item, path) for item in value)
    if not isinstance(value, dict):
        return value
    if value.keys() == {"mask"}:
        return parse_mask(value["mask"])
    value = {_OLD_NAMES.get(name, name): item for name, item in value.items()}
    kind = value.pop("kind", None)
    cls = _CLASSES.get(_OLD_NAMES.get(kind, kind))
    if cls is None:
        raise ValueError(f"{path} has the kind {kind!r}: there are {', '.join(sorted(_CLASSES))}")
    known = {f.name for f in fields(cls)}
    unknown = sorted(value.keys() - known)
    if unknown:
        raise ValueError(
            f"{path} has unknown fields {', '.join(unknown)}: a {cls.__name__} has {', '.join(sorted(known))}"
        )
    try:
        return cls(**{name: _from_json(item, f"{path}.{name}") for name, item in value.items()})
    except TypeError as error:
        raise ValueError(f"{path} is no complete {cls.__name__}: {error}") from error
