"""A foreign configuration as a table read both ways: each row ties one of their fields to places in a design."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from keepleft.models.design import Design
from keepleft.nn import sense

_REQUIRED = object()


@dataclass(frozen=True)
class Field:
    theirs: str
    ours: str | tuple[str, ...] | None                    # "feedforward.width"; None: only `fixed` values are understood
    default: Any = _REQUIRED                              # what an absent field means; a function of the configuration may say
    take: Callable[[Any], Any] = lambda value: value      # theirs → ours (a tuple where ours is one)
    give: Callable[..., Any] = lambda value: value        # ours → theirs
    fixed: tuple[Any, ...] = ()                           # the only values that can be honoured


def same(theirs: str, ours: str, default: Any = _REQUIRED) -> Field:
    return Field(theirs, ours, default)


def fixed(theirs: str, *values: Any) -> Field:
    """A field that changes what is computed, and that only means one thing here. The first value is written."""
    return Field(theirs, None, values[0], fixed=values)


def named(theirs: str, ours: str, words: Mapping[str, str], default: Any = _REQUIRED) -> Field:
    """A field whose words differ from ours; of two words that mean the same, the first is written."""
    def take(word: Any) -> str:
        if word not in words:
            raise ValueError(f"{word!r} is not understood: there are {', '.join(words)}")
        return words[word]
    back: dict[str, str] = {}
    for word, mine in words.items():
        back.setdefault(mine, word)
    return Field(theirs, ours, default, take, lambda mine: back[mine])


def read(table: list[Field], config: Mapping[str, Any], template: Design, *, ignored: frozenset[str],
         extra: frozenset[str] = frozenset()) -> Design:
    """The design that a configuration describes. Unknown, unsupported and contradictory fields are errors by name."""
    unknown = sorted(config.keys() - {row.theirs for row in table} - ignored - extra)
    if unknown:
        raise ValueError(f"the configuration has fields that keepleft does not know: {', '.join(unknown)}. If they do not "
                         f"change what the model computes, name them: load(…, ignore={unknown!r})")
    values: dict[str, tuple[str, Any]] = {}
    for row in table:
        given = config.get(row.theirs)
        if given is None:
            if row.default is _REQUIRED:
                raise ValueError(f"the configuration lacks {row.theirs!r}")
            given = row.default(config) if callable(row.default) else row.default
        if row.ours is None:
            if given not in row.fixed:
                raise ValueError(f"{row.theirs!r} is {given!r}, but keepleft can only do {' or '.join(map(repr, row.fixed))}")
            continue
        try:
            taken = row.take(given)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{row.theirs!r} is {given!r}: {error}") from error
        for place, value in zip(_places(row), taken if isinstance(row.ours, tuple) else (taken,), strict=True):
            _sensible(row.theirs, value, template, place)
            before = values.setdefault(place, (row.theirs, value))
            if before[1] != value:
                raise ValueError(f"{before[0]!r} says {before[1]!r} and {row.theirs!r} says {value!r}: keepleft has one "
                                 f"{place} for both")
    return _set(template, {place: value for place, (_, value) in values.items()})


def write(table: list[Field], design: Design) -> dict[str, Any]:
    """The same table the other way."""
    out: dict[str, Any] = {}
    for row in table:
        if row.ours is None:
            out[row.theirs] = row.fixed[0]
        elif any(place.startswith("head.") and not hasattr(design.head, place[5:]) for place in _places(row)):
            out[row.theirs] = row.default  # a design with another head has nothing to say of it
        else:
            out[row.theirs] = row.give(*(_get(design, place) for place in _places(row)))
    return out


def _sensible(theirs: str, value: Any, template: Design, place: str) -> None:
    """A number where a number belongs, said under their name."""
    *inner, name = place.split(".")
    kind = {f.name: str(f.type) for f in fields(_get(template, ".".join(inner)) if inner else template)}[name]
    if value is None and kind.endswith("None"):
        return
    if kind.startswith("int"):
        sense.whole(repr(theirs), value, least=0 if place == "kinds" else 1)
    elif kind.startswith("float"):
        sense.real(repr(theirs), value)
    elif kind.startswith("bool"):
        sense.flag(repr(theirs), value)


def _places(row: Field) -> tuple[str, ...]:
    return row.ours if isinstance(row.ours, tuple) else (row.ours,)  # type: ignore[return-value]


def _get(value: Any, place: str) -> Any:
    for name in place.split("."):
        value = getattr(value, name)
    return value


def _set(value: Any, changes: Mapping[str, Any]) -> Any:
    """A frozen value with the given places changed, all at once."""
    assert is_dataclass(value)
    own: dict[str, Any] = {}
    for name in {place.split(".")[0] for place in changes}:
        if name not in {f.name for f in fields(value)}:
            raise ValueError(f"a {type(value).__name__} has no {name}")
        if name in changes:
            own[name] = changes[name]
        else:
            inner = {place.split(".", 1)[1]: change for place, change in changes.items() if place.startswith(f"{name}.")}
            own[name] = _set(getattr(value, name), inner)
    return replace(value, **own)  # type: ignore[type-var]
