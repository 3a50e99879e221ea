"""JSON files of model directories: read whole, bounded, and of the expected type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keepleft.disk.regular_file import MAX_JSON_BYTES, read_file_in


def read_json(folder: Path, name: str, expected_type: type = dict) -> Any:
    """A JSON object, or a list. Raises FileNotFoundError; ValueError for a file that is damaged or unsafe."""
    path = folder / name
    try:
        data = json.loads(read_file_in(folder, name, max_bytes=MAX_JSON_BYTES).decode())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing: {_suggest_location(path)}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, expected_type):
        expected = "an object" if expected_type is dict else "a list"
        raise ValueError(f"{path} is JSON, but not {expected}: copy or download it again")
    return data


def _suggest_location(path: Path) -> str:
    """A hint where a missing file may be: a run keeps its model in a subfolder."""
    subfolder = path.parent / "model"
    if (subfolder / path.name).exists():
        return f"did you mean {subfolder}?"
    if len(path.parent.parts) == 1:  # in a clone, the folder `translator` is no model
        return (
            f"is {path.parent} a model directory? If an installed model was meant, `keepleft doctor` prints "
            "its path"
        )
    return f"is {path.parent} a model directory?"
