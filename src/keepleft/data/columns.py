"""Which columns of a table hold the requested fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from keepleft.data.records import Record

Columns = Sequence[str | int]

# Other names of a field, the likeliest first; case does not matter.
# fmt: off
SYNONYMS: dict[str, tuple[str, ...]] = {
    "text": ("sentence", "content", "document", "review"),
    "src": ("source", "en", "english", "text", "article", "document", "dialogue", "input", "sentence"),
    "tgt": ("target", "summary", "highlights", "output",
            "fr", "de", "es", "it", "pt", "nl", "cs", "pl", "ru", "uk", "tr", "hi", "ar", "zh", "ja", "ko",
            "vi", "french", "german", "spanish", "italian", "portuguese", "dutch", "russian", "hindi"),
    "label": ("class", "category", "labels"),
}
# fmt: on


def check_columns(columns: Columns | None, fields: tuple[str, ...]) -> None:
    """Validate the request before any file is opened."""
    if not fields:
        raise ValueError("no fields are asked for: name at least one, such as ('text',)")
    if columns is None:
        return
    if isinstance(columns, str) or len(columns) != len(fields):
        raise ValueError(f"columns {columns!r} are not one for each of the fields {', '.join(fields)}")
    for column in columns:
        is_index = isinstance(column, int) and not isinstance(column, bool) and column >= 0
        if not isinstance(column, str) and not is_index:
            raise ValueError(f"column {column!r} is neither a name nor a number from 0 on")


def header(
    cells: Sequence[str], columns: Columns | None, fields: tuple[str, ...], location: str
) -> tuple[tuple[int, ...], bool]:
    """The column of each field, and whether these cells, the first row of the table, are its header."""
    names = [cell.strip() for cell in cells]
    if columns is not None and any(isinstance(column, str) for column in columns):
        return tuple(
            column if isinstance(column, int) else _only_index(column, names, location) for column in columns
        ), True
    if columns is None:
        matched = guess_columns(names, fields)
        return (
            (tuple(range(len(fields))), False)
            if matched is None
            else (tuple(_only_index(name, names, location) for name in matched), True)
        )
    indices = tuple(column for column in columns if isinstance(column, int))
    header_names = [names[index].lower() if index < len(names) else "" for index in indices]
    return indices, all(
        name in (field.lower(), *SYNONYMS.get(field, ()))
        for name, field in zip(header_names, fields, strict=True)
    )


def _only_index(column: str, names: Sequence[str], location: str) -> int:
    """The index of the column of that name. Raises ValueError if several have it."""
    name = match_name(column, names, location)
    indices = [index for index, other in enumerate(names) if other == name]
    if len(indices) > 1:
        numbers = " and ".join(map(str, indices))
        raise ValueError(
            f"{location} has {len(indices)} columns called {name!r}: rename all but one, or name columns by "
            f"their number from 0 (they are {numbers})"
        )
    return indices[0]


def keys(
    names: Sequence[str], columns: Columns | None, fields: tuple[str, ...], location: str
) -> tuple[str, ...]:
    """The column name of each field, in a table whose columns all have names."""
    if columns is None:
        matched = guess_columns(names, fields)
        if matched is None:
            raise ValueError(
                f"{location} has no column for each of {', '.join(fields)}: there are {format_names(names)}; "
                "say with `columns` which to take"
            )
        for name in matched:
            _only_index(name, names, location)
        return matched
    for column in columns:
        if isinstance(column, int) and column >= len(names):
            raise ValueError(
                f"{location} has {len(names)} columns, so there is no column {column} (they count from 0)"
            )
    return tuple(
        names[column if isinstance(column, int) else _only_index(column, names, location)]
        for column in columns
    )


def guess_columns(names: Sequence[str], fields: tuple[str, ...]) -> tuple[str, ...] | None:
    """The column name of each field, the field's own before synonyms; None unless every field has one."""
    by_lowercase = {name.lower(): name for name in reversed(names)}
    matched: list[str] = []
    for field in fields:
        candidates = [
            by_lowercase[name]
            for name in (field.lower(), *SYNONYMS.get(field, ()))
            if name in by_lowercase
            and by_lowercase[name] not in matched
            and (name == field.lower() or name not in fields)
        ]
        if not candidates:
            return None
        matched.append(candidates[0])
    return tuple(matched)


def match_name(column: str, names: Sequence[str], location: str) -> str:
    """The column of that name, or the only one that differs from it by case alone."""
    if column in names:
        return column
    matches = [name for name in names if name.lower() == column.lower()]
    if len(matches) != 1:
        raise ValueError(f"{location} has no column {column!r}: there are {format_names(names)}")
    return matches[0]


def format_names(names: Sequence[str]) -> str:
    """Names for an error message: at most twelve, shortened to 40 characters."""
    if not names:
        return "none"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(repr(name if len(name) <= 40 else name[:40] + "…") for name in names[:12]) + more


def picker(indices: tuple[int, ...]) -> Callable[[Sequence[str]], Record]:
    """A function from the cells of a row to a record; it raises IndexError if the row is too short."""
    if len(indices) > 1:
        return itemgetter(*indices)
    [index] = indices
    return lambda cells: (cells[index],)


def nested_names(row: dict[str, Any]) -> list[str]:
    """The keys of an object; those of an object within it as "translation.en"."""
    return [
        name
        for key, value in row.items()
        for name in ([f"{key}.{inner_key}" for inner_key in value] if isinstance(value, dict) else [str(key)])
    ]


def extract(row: dict[str, Any], names: tuple[str, ...], locate: Callable[[], str]) -> Record:
    """The values of these names as strings: text as it is, numbers and booleans as JSON writes them."""
    try:
        values = [row[name] for name in names]
    except KeyError:
        values = [_nested_value(row, name, locate) for name in names]
    for index, value in enumerate(values):
        if type(value) is not str:
            values[index] = _to_string(value, names[index], locate)
    return tuple(values)


def _nested_value(row: dict[str, Any], name: str, locate: Callable[[], str]) -> Any:
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    if inner and isinstance(row.get(outer), dict) and inner in row[outer]:
        return row[outer][inner]
    raise ValueError(f"{locate()} has no {name!r}: there are {format_names(nested_names(row))}")


def _to_string(value: Any, name: str, locate: Callable[[], str]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    type_name = {type(None): "null", list: "a list", dict: "an object"}.get(type(value), type(value).__name__)
    raise ValueError(f"{locate()}: {name!r} is {type_name}, not text")
