"""Folders that options name."""

from __future__ import annotations

from pathlib import Path


def folders(**given: str | None) -> None:
    """An error for an option that names a folder which is not there."""
    for option, folder in given.items():
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"--{option} is {folder!r}, and there is no such folder: look at its name, or leave it out")


def called(model: str) -> str:
    """What a model is called: of a directory its own name, of runs/mine/model that is mine; a name on the hub as it is."""
    if not Path(model).exists():
        return model
    found = Path(model).resolve()
    return found.stem if found.is_file() else found.parent.name if found.name == "model" and found.parent.name else found.name
