"""Folders that options name."""

from __future__ import annotations

from pathlib import Path


def check_folders(**options: str | None) -> None:
    """An error for an option that names a folder which is not there."""
    for option, folder in options.items():
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(
                f"--{option} is {folder!r}, and there is no such folder: look at its name, or leave it out"
            )


def model_name(model: str) -> str:
    """What a model is called: of a directory its own name, of runs/mine/model that is mine; a name on the hub
    as it is.
    """
    if not Path(model).exists():
        return model
    path = Path(model).resolve()
    return (
        path.stem
        if path.is_file()
        else path.parent.name
        if path.name == "model" and path.parent.name
        else path.name
    )
