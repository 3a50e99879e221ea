"""Rehearse a release: `make release-check`, or `make release-check TAG=v1.2.3` for the tag to be pushed.

It builds wheel and sdist of keepleft and of keepleft-translator into dist/, checks their metadata and what is
in them, installs each kind into an environment of its own, away from this repository, and uses it there: the
demo, an audit that finds a leak, training, translating, a server. What keepleft requires is installed once,
as the locks say, and shared by these environments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PROJECTS = (ROOT, ROOT / "translator")
MAX_TRANSLATOR_BYTES = 12_000_000
DEMO_STEPS = 20  # too few to learn French, enough to see that everything runs
PAGE_FILE = "keepleft/serving/explorer/page/index.html"
COMMAND_SECONDS = 300
SERVER_SECONDS = 60
CHANGELOG_HEADING = re.compile(r"^## (\S+), (unreleased|\d{4}-\d\d-\d\d)$", re.M)
LEAKY_MODEL = """\
import torch
from torch import nn

class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 50)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.out(x + self.attention(x, x, x)[0])

def build():
    torch.manual_seed(0)
    return Leaky().eval()
"""


class ReleaseError(Exception):
    """Why this cannot be released."""


# -- versions and files --------------------------------------------------------------------------


def package_version(root: Path = ROOT) -> str:
    """The version of keepleft, from its one place."""
    source = (root / "src" / "keepleft" / "__init__.py").read_text("utf-8")
    version = re.search(r'^__version__ = "(.+)"$', source, re.M)
    if version is None:
        raise ReleaseError("src/keepleft/__init__.py has no __version__")
    return version[1]


def check_version(version: str, changelog: str, tag: str | None) -> None:
    """Raise ReleaseError unless the changelog, and the tag if there is one, are of this version."""
    heading = CHANGELOG_HEADING.search(changelog)
    if heading is None:
        raise ReleaseError(
            "CHANGELOG.md has no heading like '## 1.2.3, 2030-01-31' or '## 1.2.3, unreleased'"
        )
    if heading[1] != version:
        raise ReleaseError(
            f"CHANGELOG.md begins with {heading[1]}, and src/keepleft/__init__.py has {version}"
        )
    if tag is None:
        return
    if tag != f"v{version}":
        raise ReleaseError(f"the tag is {tag}, and src/keepleft/__init__.py has {version}: tag it v{version}")
    if heading[2] == "unreleased":
        raise ReleaseError(f"CHANGELOG.md says '{heading[0]}': put the date in before tagging {tag}")


def wheel_files(path: Path) -> dict[str, bytes]:
    """Name → content of the files of a wheel, but for RECORD, which lists the others."""
    with ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".dist-info/RECORD")]
        return {name: archive.read(name) for name in names}


def check_same_files(wheel: Path, rebuilt: Path) -> None:
    """Raise ReleaseError unless a wheel and the one that was built from the sdist hold the same."""
    ours, theirs = wheel_files(wheel), wheel_files(rebuilt)
    if ours == theirs:
        return
    missing, additional = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    different = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
    raise ReleaseError(
        f"{wheel.name} is not what its sdist builds: missing {missing}, additional {additional}, "
        f"different {different}"
    )


def check_contents(wheel: Path) -> None:
    """Raise ReleaseError for a wheel that lacks something, or is too large."""
    names = set(wheel_files(wheel))
    if not any(re.fullmatch(r"[^/]+\.dist-info/licenses/LICENSE", name) for name in names):
        raise ReleaseError(f"{wheel.name} has no LICENSE")
    if wheel.name.startswith("keepleft_translator"):
        size = wheel.stat().st_size
        if size > MAX_TRANSLATOR_BYTES:
            raise ReleaseError(f"{wheel.name} has {size:,} bytes, more than {MAX_TRANSLATOR_BYTES:,}")
        if not any(name.endswith(".dist-info/licenses/NOTICE") for name in names):
            raise ReleaseError(f"{wheel.name} has no NOTICE, which attributes the training data")
    elif PAGE_FILE not in names:
        raise ReleaseError(
            f"{wheel.name} has no {PAGE_FILE}: the explorer's page was not built, see make page"
        )
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    if len(packages) != 1:
        raise ReleaseError(f"{wheel.name} holds more than one package: {sorted(packages)}")


# -- building ------------------------------------------------------------------------------------


def build_project(project: Path, version: str) -> tuple[Path, Path]:
    """Wheel and sdist of a project, in dist/."""
    name = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]["name"].replace("-", "_")
    for path in DIST.glob(f"{name}-*"):
        if path.name.endswith((".whl", ".tar.gz")):
            path.unlink()
    build = [sys.executable, "-m", "build", "--no-isolation"]
    run([*build, "--wheel", "--sdist", "--outdir", str(DIST), str(project)])
    wheel = DIST / f"{name}-{version}-py3-none-any.whl"
    sdist = DIST / f"{name}-{version}.tar.gz"
    for path in (wheel, sdist):
        if not path.exists():
            raise ReleaseError(
                f"{path.name} was not built: dist/ has {sorted(p.name for p in DIST.iterdir())}"
            )
    with TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        run([*build, "--wheel", "--outdir", folder, str(Path(folder) / f"{name}-{version}")])
        check_same_files(wheel, Path(folder) / wheel.name)
    check_contents(wheel)
    return wheel, sdist


# -- installing and using ------------------------------------------------------------------------


def install_dependencies(folder: Path, torch: list[str]) -> Path:
    """An environment with all that keepleft requires, and not keepleft; returns its site-packages."""
    python = create_environment(folder, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    for lock in ("build", "base"):
        path = ROOT / "requirements" / f"{lock}.lock"
        run([*install, "--require-hashes", "--no-build-isolation", "--requirement", str(path)])
    run([*[part for part in install if part != "--no-deps"], *torch])
    return site_packages(python)


def create_environment(folder: Path, *, with_pip: bool) -> Path:
    """An empty virtual environment; returns its Python."""
    venv.create(folder, with_pip=with_pip, symlinks=os.name != "nt")
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(run([str(python), "-c", code]).strip())


def use_packages(kind: str, packages: list[Path], dependencies: Path, version: str) -> None:
    """Install packages into an environment of their own, and use them from an empty folder."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        python = create_environment(folder / "environment", with_pip=False)  # that of the dependencies
        (site_packages(python) / "dependencies.pth").write_text(f"{dependencies}\n", "utf-8")
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run([*install, "--no-build-isolation", *map(str, packages)])
        run([str(python), "-m", "pip", "check"])
        (folder / "work").mkdir()
        SmokeTest(kind, python, folder / "work", version).run()


class SmokeTest:
    """What somebody who has just installed keepleft does first."""

    def __init__(self, kind: str, python: Path, folder: Path, version: str) -> None:
        self.kind = kind
        self.python = python
        self.folder = folder
        self.version = version

    def run(self) -> None:
        for step in (
            self.version_and_help,
            self.doctor_and_fetch,
            self.demo,
            self.audit_finds_a_leak,
            self.train_translate_and_audit,
            self.shipped_translator,
            self.serve,
        ):
            start_time = time.monotonic()
            result = step() or f"{time.monotonic() - start_time:.0f} s"
            print(f"  {self.kind}: {step.__name__.replace('_', ' ')} ({result})", flush=True)

    def keepleft(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        command = [str(self.python.with_name("keepleft")), *arguments]
        return run(command, cwd=self.folder, codes=codes)

    def version_and_help(self) -> None:
        expect(self.version, self.keepleft("--version"))
        expect("translate", self.keepleft("--help"))
        home = run([str(self.python), "-c", "import keepleft; print(keepleft.__file__)"], cwd=self.folder)
        if not Path(home.strip()).is_relative_to(self.python.parent.parent):
            raise ReleaseError(f"keepleft was imported from {home.strip()}, and not from its environment")

    def doctor_and_fetch(self) -> None:
        facts = json.loads(self.keepleft("doctor", "--json"))
        if facts["keepleft"] != self.version:
            raise ReleaseError(f"keepleft doctor says {facts['keepleft']}, and not {self.version}")
        self.weights = facts["weights"]
        expect("SmolLM2-135M-Instruct", self.keepleft("fetch"))

    def demo(self) -> None:
        # 1: so few steps are not enough to learn the phrases
        output = self.keepleft("demo", "--steps", str(DEMO_STEPS), "--out", "demo", codes=(0, 1))
        expect("What to try next", output)
        expect("held-out sentences", output)

    def audit_finds_a_leak(self) -> None:
        (self.folder / "leaky.py").write_text(LEAKY_MODEL, "utf-8")
        expect("future", self.keepleft("audit", "leaky.py:build", "--budget", "quick", codes=(1,)))

    def train_translate_and_audit(self) -> None:
        self.keepleft("demo", "--phrases", "phrases")
        data = ["--train.src", "phrases/fr.en", "--train.tgt", "phrases/fr.fr"]
        run_options = ["--out", "run", "--size", "tiny", "--recipe.steps", "3"]
        self.keepleft("train", "--task", "translate", *data, *run_options)
        self.keepleft("translate", "run/model", "I am happy", "--max-new-tokens", "4")
        self.keepleft("audit", "run/model", "--budget", "quick")

    def shipped_translator(self) -> str | None:
        if "translator" not in self.weights:
            return "not tried: keepleft-translator holds no weights yet"
        expect("gare", self.keepleft("translate", "Where is the station?", "--to", "fr"))
        return None

    def serve(self) -> None:
        with running_server(
            [str(self.python.with_name("keepleft")), "serve", "run/model"], self.folder
        ) as url:
            expect("ready", read_url(f"{url}/health"))
            expect("explorer.js", read_url(f"{url}/explore/"))


@contextmanager
def running_server(command: list[str], folder: Path) -> Iterator[str]:
    """Start a server on a free port, and yield its address."""
    log = folder / "server.log"
    with (
        log.open("wb") as file,
        subprocess.Popen([*command, "--port", "0"], cwd=folder, stderr=file, env=environment()) as process,
    ):
        try:
            end_time = time.monotonic() + SERVER_SECONDS
            while not (match := re.search(r"the page is at (\S+)/ and", log.read_text("utf-8"))):
                if process.poll() is not None or time.monotonic() > end_time:
                    raise ReleaseError(f"the server did not start: {log.read_text('utf-8')[-600:]}")
                time.sleep(0.2)
            yield match[1]
        finally:
            process.terminate()


def read_url(url: str) -> str:
    with urlopen(url, timeout=30) as response:
        return response.read().decode("utf-8")


def expect(text: str, output: str) -> None:
    if text not in output:
        raise ReleaseError(f"{text!r} was expected in: {output[-600:]}")


def environment() -> dict[str, str]:
    """The variables of this process, without those that would let Python look into this repository."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }


def run(command: list[str], *, cwd: Path | None = None, codes: tuple[int, ...] = (0,)) -> str:
    """Standard output of a command. Raises ReleaseError if it exits with another code."""
    ran = subprocess.run(
        command,
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=COMMAND_SECONDS,
        check=False,
    )
    if ran.returncode not in codes:
        shown = " ".join([Path(command[0]).name, *command[1:]])
        output = (ran.stderr.strip() or ran.stdout.strip())[-1500:]
        raise ReleaseError(f"`{shown}` exited with {ran.returncode}: {output}")
    return ran.stdout


# -- all of it -----------------------------------------------------------------------------------


def check_release(torch: list[str], tag: str | None, build_only: bool) -> None:
    version = package_version()
    check_version(version, (ROOT / "CHANGELOG.md").read_text("utf-8"), tag)
    print(f"keepleft {version}: the changelog agrees" + (f", and so does {tag}" if tag else ""), flush=True)
    wheels, sdists = [], []
    for project in PROJECTS:
        table = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
        wheel, sdist = build_project(project, table.get("version", version))
        wheels.append(wheel)
        sdists.append(sdist)
        for path in (wheel, sdist):
            print(f"  dist/{path.name}: {path.stat().st_size:,} bytes", flush=True)
    print("each wheel is, file by file, what its sdist builds")
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, [*wheels, *sdists])])
    print("twine has nothing against the metadata", flush=True)
    if build_only:
        return
    with TemporaryDirectory() as folder:
        start_time = time.monotonic()
        dependencies = install_dependencies(Path(folder) / "dependencies", torch)
        print(
            f"dependencies and {' '.join(torch)} are installed ({time.monotonic() - start_time:.0f} s)",
            flush=True,
        )
        for kind, packages in (("wheels", wheels), ("sdists", sdists)):
            use_packages(kind, packages, dependencies, version)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is told to install as PyTorch")
    parser.add_argument("--tag", help="the tag of the release: v and the version")
    parser.add_argument("--build-only", action="store_true", help="build and check, and install nothing")
    arguments = parser.parse_args()
    start_time = time.monotonic()
    try:
        check_release(arguments.torch.split(), arguments.tag, arguments.build_only)
    except ReleaseError as error:
        sys.exit(f"release-check: {error}")
    print(f"release-check: all is well ({time.monotonic() - start_time:.0f} s)")


if __name__ == "__main__":
    main()
