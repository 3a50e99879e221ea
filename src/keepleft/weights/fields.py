"""A foreign configuration as a table read both ways: each row ties one of their fields to places in a
design.
"""

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
    design_path: str | tuple[str, ...] | None  # "feedforward.width"; None: only `fixed` values are understood
    default: Any = _REQUIRED  # what an absent field means; a function of the configuration may say
    to_design: Callable[[Any], Any] = lambda value: value  # theirs → ours (a tuple where ours is one)
    to_config: Callable[..., Any] = lambda value: value  # ours → theirs
    allowed_values: tuple[Any, ...] = ()  # the only values that can be honoured


def same_field(config_key: str, design_path: str, default: Any = _REQUIRED) -> Field:
    return Field(config_key, design_path, default)


def fixed_field(config_key: str, *values: Any) -> Field:
    """A field that changes what is computed, and that only means one thing here.

    The first value is written.
    """
    return Field(config_key, None, values[0], allowed_values=values)


def choice_field(
    config_key: str, design_path: str, mapping: Mapping[str, str], default: Any = _REQUIRED
) -> Field:
    """A field whose words differ from ours; of two words that mean the same, the first is written."""

    def to_design(value: Any) -> str:
        if value not in mapping:
            raise ValueError(f"{value!r} is not understood: there are {', '.join(mapping)}")
        return mapping[value]

    inverse: dict[str, str] = {}
    for config_value, design_value in mapping.items():
        inverse.setdefault(design_value, config_value)
    return Field(config_key, design_path, default, to_design, lambda design_value: inverse[design_value])


def config_to_design(
    table: list[Field],
    config: Mapping[str, Any],
    template: Design,
    *,
    ignored: frozenset[str],
    extra: frozenset[str] = frozenset(),
) -> Design:
    """The design that a configuration describes.

    Unknown, unsupported and contradictory fields are errors by name.
    """
    unknown = sorted(config.keys() - {row.config_key for row in table} - ignored - extra)
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
                raise ValueError(
                    f"{row.config_key!r} is {config_value!r}, but keepleft can only do "
                    f"{' or '.join(map(repr, row.allowed_values))}"
                )
            continue
        try:
            design_value = row.to_design(config_value)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{row.config_key!r} is {config_value!r}: {error}") from error
        for path, value in zip(
            _design_paths(row),
            design_value if isinstance(row.design_path, tuple) else (design_value,),
            strict=True,
        ):
            _check_value(row.config_key, value, template, path)
            previous = values.setdefault(path, (row.config_key, value))
            if previous[1] != value:
                raise ValueError(
                    f"{previous[0]!r} says {previous[1]!r} and {row.config_key!r} says {value!r}: keepleft "
                    "has one "
                    f"{path} for both"
                )
    return _set(template, {path: value for path, (_, value) in values.items()})


def design_to_config(table: list[Field], design: Design) -> dict[str, Any]:
    """The same table the other way."""
    out: dict[str, Any] = {}
    for row in table:
        if row.design_path is None:
            out[row.config_key] = row.allowed_values[0]
        elif any(
            path.startswith("head.") and not hasattr(design.head, path[5:]) for path in _design_paths(row)
        ):
            out[row.config_key] = row.default  # a design with another head has nothing to say of it
        else:
            out[row.config_key] = row.to_config(*(_get(design, path) for path in _design_paths(row)))
    return out


def _check_value(config_key: str, value: Any, template: Design, path: str) -> None:
    """A number where a number belongs, said under their name."""
    *parents, name = path.split(".")
    annotation = {
        f.name: str(f.type) for f in fields(_get(template, ".".join(parents)) if parents else template)
    }[name]
    if value is None and annotation.endswith("None"):
        return
    if annotation.startswith("int"):
        checks.check_int(repr(config_key), value, minimum=0 if path == "token_types" else 1)
    elif annotation.startswith("float"):
        checks.check_number(repr(config_key), value)
    elif annotation.startswith("bool"):
        checks.check_bool(repr(config_key), value)


def _design_paths(row: Field) -> tuple[str, ...]:
    return row.design_path if isinstance(row.design_path, tuple) else (row.design_path,)  # type: ignore[return-value]


def _get(design: Design, path: str) -> Any:
    """What a design has at a path; what a stack leaves open is the design's."""
    value: Any = design
    for name in path.split("."):
        part = getattr(value, name)
        value = getattr(design, name) if part is None and isinstance(value, StackDesign) else part
    return value


def _set(value: Any, changes: Mapping[str, Any], inherited: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A frozen value with the given places changed, all at once; a part that it leaves open begins as the
    inherited one.
    """
    assert is_dataclass(value)
    updates: dict[str, Any] = {}
    stacks_last = sorted({path.split(".")[0] for path in changes}, key=("encoder", "decoder").__contains__)
    for name in stacks_last:
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
