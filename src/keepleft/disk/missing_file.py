"""What to say about a file that does not exist: one wording for every file that a user names."""

from __future__ import annotations

from difflib import get_close_matches
from itertools import islice
from pathlib import Path

MAX_ENTRIES = 10_000  # of a folder that are compared


def missing_file_message(path: Path) -> str:
    """The message, with a path that was probably meant, or what to check."""
    message = f"there is no file {path}"
    if close := similar_path(path):
        return f"{message}: did you mean {close}?"
    if not path.parent.is_dir():
        return f"{message}: there is no folder {path.parent}; check the path"
    return f"{message}: check its name, or the folder that you are in"


def similar_path(path: Path) -> Path | None:
    """An existing path with one name that differs from this one: that of a file, or of a folder around it."""
    for folder in path.parents:
        if folder.is_dir():
            name, *rest = path.relative_to(folder).parts
            names = sorted(entry.name for entry in islice(folder.iterdir(), MAX_ENTRIES))
            close = [f"{name}.gz"] if f"{name}.gz" in names else get_close_matches(name, names)
            return next(
                (found for found in (folder.joinpath(n, *rest) for n in close) if found.exists()), None
            )
    return None
