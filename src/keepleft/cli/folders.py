"""Options that name folders."""

from __future__ import annotations

from pathlib import Path


def folders(**given: str | None) -> None:
    """An error for an option that names a folder which is not there."""
    for option, folder in given.items():
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"--{option} is {folder!r}, and there is no such folder: look at its name, or leave it out")
