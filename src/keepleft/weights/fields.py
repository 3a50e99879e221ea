"""Configuration fields as a table read both ways: each row maps a field to paths in a design."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

from keepleft import checks
from keepleft.models.design import Design, StackDesign

_REQUIRED = object()


@dataclass(frozen=True)
class Field:
    config_key: str
    design_path: str | tuple[str, ...] | None  # "feedforward.width"; None: only allowed_values are understood
    default: Any = _REQUIRED  # of an absent field: a value, or a function of the configuration
    to_design: Callable[[Any], Any] = lambda value: value  # gives a tuple where design_path is one
    to_config: Callable[..., Any] = lambda value: value  # takes a value for each path
    allowed_values: tuple[Any, ...] = ()  # where there is no design_path


def same_field(config_key: str, design_path: str, default: Any = _REQUIRED) -> Field:
    """A field with the same value in both."""
    return Field(config_key, design_path, default)


def fixed_field(config_key: str, *values: Any) -> Field:
    """A field that changes what is computed, of which we support these values; the first is written."""
    return Field(config_key, None, values[0], allowed_values=values)


def choice_field(
    config_key: str, design_path: str, mapping: Mapping[str, str], default: Any = _REQUIRED
) -> Field:
    """A field whose values have other names here; of two names for one value the first is written."""

    def to_design(value: Any) -> str:
        if value not in mapping:
            raise ValueError(f"{value!r} is not understood: there are {', '.join(mapping)}")
        return mapping[value]

    inverse: dict[str, str] = {}
    for config_value, design_value in mapping.items():
        inverse.setdefault(design_value, config_value)
    return Field(config_key, design_path, default, to_design, lambda design_value: inverse[design_value])


def config_to_design(
    table: list[Field], config: Mapping[str, Any], template: Design, *, ignored: frozenset[str]
) -> Design:
    """The design that a configuration describes.

    Unknown, unsupported and contradictory fields are errors that name them.
    """
    unknown = sorted(config.keys() - {row.config_key for row in table} - ignored)
    if unknown:
        raise ValueError(
            f"the configuration has fields that keepleft does not know: {', '.join(unknown)}. If they do not "
            f"change what the model computes, name them: load(…, ignore={unknown!r})"
        )
    values: dict[str, tuple[str, Any]] = {}
    for row in table:
        config_value = config.get(row.config_key)
        if config_value is None:
            if row.default is _REQUIRED:
                raise ValueError(f"the configuration lacks {row.config_key!r}")
            config_value = row.default(config) if callable(row.default) else row.default
        if row.design_path is None:
            if config_value not in row.allowed_values:
                allowed = " or ".join(map(repr, row.allowed_values))
                raise ValueError(
                    f"{row.config_key!r} is {config_value!r}, but keepleft can only do {allowed}"
                )
            continue
        try:
            design_value = row.to_design(config_value)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{row.config_key!r} is {config_value!r}: {error}") from error
        design_values = design_value if isinstance(row.design_path, tuple) else (design_value,)
        for path, value in zip(_design_paths(row), design_values, strict=True):
            _check_value(row.config_key, value, template, path)
            previous_key, previous_value = values.setdefault(path, (row.config_key, value))
            if previous_value != value:
                raise ValueError(
                    f"{previous_key!r} says {previous_value!r} and {row.config_key!r} says {value!r}: "
                    f"keepleft has one {path} for both"
                )
    return _set(template, {path: value for path, (_, value) in values.items()})


def design_to_config(table: list[Field], design: Design) -> dict[str, Any]:
    """The configuration of a design, by the same table."""
    out: dict[str, Any] = {}
    for row in table:
        if row.design_path is None:
            out[row.config_key] = row.allowed_values[0]
        elif any(
            path.startswith("head.") and not hasattr(design.head, path[5:]) for path in _design_paths(row)
        ):
            out[row.config_key] = row.default  # another head has no such field
        else:
            out[row.config_key] = row.to_config(*(_get(design, path) for path in _design_paths(row)))
    return out


def _check_value(config_key: str, value: Any, template: Design, path: str) -> None:
    """Check the type by the design's annotation, in an error that names the configuration's field."""
    parent, _, name = path.rpartition(".")
    owner = _get(template, parent) if parent else template
    annotation = next(str(f.type) for f in fields(owner) if f.name == name)
    if value is None and annotation.endswith("None"):
        return
    if annotation.startswith("int"):
        checks.check_int(repr(config_key), value, minimum=0 if path == "token_types" else 1)
    elif annotation.startswith("float"):
        checks.check_number(repr(config_key), value)
    elif annotation.startswith("bool"):
        checks.check_bool(repr(config_key), value)


def _design_paths(row: Field) -> tuple[str, ...]:
    assert row.design_path is not None
    return row.design_path if isinstance(row.design_path, tuple) else (row.design_path,)


def _get(design: Design, path: str) -> Any:
    """The value at a path; what a stack leaves open is the design's."""
    value: Any = design
    for name in path.split("."):
        part = getattr(value, name)
        value = getattr(design, name) if part is None and isinstance(value, StackDesign) else part
    return value


def _set(value: Any, changes: Mapping[str, Any], inherited: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A copy with the values at these paths changed, all at once.

    A part that a stack leaves open starts as the inherited one, that of the design.
    """
    assert is_dataclass(value)
    updates: dict[str, Any] = {}
    # stacks last: they inherit the design's updated parts
    for name in sorted({path.split(".")[0] for path in changes}, key=("encoder", "decoder").__contains__):
        if name not in {f.name for f in fields(value)}:
            raise ValueError(f"a {type(value).__name__} has no {name}")
        if name in changes:
            updates[name] = changes[name]
        else:
            nested = {
                path.split(".", 1)[1]: change
                for path, change in changes.items()
                if path.startswith(f"{name}.")
            }
            part = getattr(value, name)
            updates[name] = _set(inherited[name] if part is None else part, nested, vars(value) | updates)
    return replace(value, **updates)  # type: ignore[type-var]
