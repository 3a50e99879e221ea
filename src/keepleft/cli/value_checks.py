"""Values that no command can use, refused before PyTorch is imported."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from keepleft.cli.option_table import DESIGN_OPTIONS, make_option
from keepleft.decoding.generation_config import POSITIVE, Range, at_least

# Key, or command and key, of an option whose value nothing else checks at once.
RANGES: dict[str, Range] = {
    "alternatives": at_least(1),
    "batch_size": at_least(1),
    "count": at_least(1),
    "demo steps": at_least(0),
    "eval limit": at_least(1),
    "kv_cache_memory": POSITIVE,
    "logprobs": at_least(0),
    "max_model_len": at_least(1),
    "max_num_seqs": at_least(1),
    "max_requests": at_least(1),
    "n_best": at_least(1),
}


def check_values(command: str, values: Mapping[str, Any], explicit_options: Iterable[str]) -> None:
    """Raise ValueError for a number out of its range, or a field of a design that is misspelled or no number.

    `explicit_options` are the keys of the values that were given.
    """
    for key in explicit_options:
        valid = RANGES.get(f"{command} {key}") or RANGES.get(key)
        if valid is not None and not valid.holds(values[key]):
            raise ValueError(f"{_flag(key)} is {values[key]:g}: it must be {valid.requirement}")
    if isinstance(schema := values.get("json_schema"), str):
        _check_json(schema)
    for name, value in (values.get("design") or {}).items():
        _check_design_field(name, value)


def _check_design_field(name: str, value: Any) -> None:
    if name in DESIGN_OPTIONS:
        option = make_option(f"design.{name}", DESIGN_OPTIONS[name][0], None, "")
        if not _is_of_type(value, DESIGN_OPTIONS[name][0]):
            raise ValueError(f"{option.flag} is {value!r}: it must be {option.takes}")
    elif close := get_close_matches(name, DESIGN_OPTIONS, 1):
        hint = f"did you mean {_flag(f'design.{close[0]}')}?"
        raise ValueError(f"there is no option {_flag(f'design.{name}')}: {hint}")


def _check_json(schema: str) -> None:
    try:
        json.loads(schema)
    except ValueError as error:
        hint = f'for a file, give "$(cat {schema})"' if Path(schema).is_file() else f"{error}"
        raise ValueError(f"--json-schema is {schema!r}: it must be JSON; {hint}") from error


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _is_of_type(value: Any, expected: type) -> bool:
    if isinstance(value, bool):
        return expected is bool
    return isinstance(value, (int, float) if expected is float else expected)
