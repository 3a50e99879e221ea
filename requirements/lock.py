"""Write the lock files of this folder: `make lock`, or `make lock UPGRADE=1` for newer versions.

With names as arguments (`python requirements/lock.py tools`) only those.

uv resolves pyproject.toml (dependencies, extras, dependency groups) under constraints.txt, for every platform
and every Python that keepleft supports, and lists the hashes of all files of a version. Versions that a lock
already holds are kept, unless they no longer fit or `--upgrade` is given.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
OLDEST_PYTHON = "3.11"
HEADER = """\
# {purpose}
# Written by `make lock` from pyproject.toml and constraints.txt, for Python {python} and newer; do not edit.
"""
ENTRY = re.compile(r"^[a-z0-9].*\n(?:[ ]+.*\n)*", re.M)  # a package at one version, with hashes and notes
# PyTorch and the CUDA libraries of its build on PyPI; other builds (CPU, ROCm) bring others, or none
TORCH_PACKAGE = re.compile(r"torch|triton|(?:cuda|nvidia)-.+")
DEVELOPER_EXTRAS = {"test", "docs"}
OWN_EXTRAS = {"translator"}  # a package of this repository: there is nothing to pin
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TESTED_VERSIONS = ("constraints.txt", "requirements/test.lock")
USER_EXTRAS = tuple(sorted(PROJECT["optional-dependencies"].keys() - DEVELOPER_EXTRAS - OWN_EXTRAS))


@dataclass(frozen=True)
class Lock:
    """One lock file: what it is for, and the extras or the dependency group that it resolves."""

    name: str
    purpose: str
    extras: tuple[str, ...] = ()
    group: str | None = None
    with_dependencies: bool = True
    constraints: tuple[str, ...] = ("constraints.txt",)


# test comes first: the locks of the same environment take their versions from it
LOCKS = (
    Lock(
        "test", "What `make test` needs, with all of base.lock and without PyTorch.", ("test", "hub", "gguf")
    ),
    Lock(
        "base",
        "What `make demo` needs, without PyTorch: keepleft with its extras gguf, grammar, metrics and serve.",
        ("gguf", "grammar", "metrics", "serve"),
        constraints=TESTED_VERSIONS,
    ),
    Lock(
        "extras",
        "All that users can install with keepleft, with every extra and without PyTorch; for `make sbom`.",
        USER_EXTRAS,
        constraints=TESTED_VERSIONS,
    ),
    Lock(
        "docs",
        "What `make docs` needs, with the dependencies of keepleft and without PyTorch.",
        ("docs",),
        constraints=TESTED_VERSIONS,
    ),
    Lock(
        "torch",
        "PyTorch as it is on PyPI, with its CUDA libraries; SECURITY.md says how to install it from here.",
        constraints=TESTED_VERSIONS,
    ),
    Lock(
        "build",
        "What builds keepleft, and those of its dependencies that are published as source only.",
        group="build",
        constraints=TESTED_VERSIONS,
    ),
    Lock(
        "weights",
        "Two small published models. Only their files are read, so what they require is left out.",
        group="weights",
        with_dependencies=False,
    ),
    Lock("node", "Node.js, to build the explorer's page where the machine has none.", group="node"),
    Lock(
        "tools",
        "What `make lock`, `make sbom`, `make audit-deps` and `make release-check` run, in an environment of "
        "their own.",
        group="tools",
        constraints=(),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    parser.add_argument("names", nargs="*", help="the locks to write; all, if there are none")
    arguments = parser.parse_args()
    names = [lock.name for lock in LOCKS]
    if unknown := set(arguments.names) - set(names):
        sys.exit(f"there is no lock {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    for lock in LOCKS:
        if arguments.names and lock.name not in arguments.names:
            continue
        text = resolve(lock, arguments.upgrade)
        (FOLDER / f"{lock.name}.lock").write_text(text, "utf-8")
        print(f"requirements/{lock.name}.lock: {len(split_entries(text))} packages")


def resolve(lock: Lock, upgrade: bool) -> str:
    """The text of a lock file."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        previous = FOLDER / f"{lock.name}.lock"
        if previous.exists() and not upgrade:
            # uv keeps the versions that it finds in its output
            output.write_text(previous.read_text("utf-8"), "utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-header"]
        command += ["--universal", "--python-version", OLDEST_PYTHON]
        command += ["--generate-hashes", "--output-file", str(output)]
        for constraint in lock.constraints:
            command += ["--constraint", constraint]
        if not lock.with_dependencies:
            command += ["--no-deps"]
        if lock.group is not None:
            command += ["--group", lock.group]
        else:
            command += ["pyproject.toml"]
            for extra in lock.extras:
                command += ["--extra", extra]
        subprocess.run(command, cwd=ROOT, check=True)
        resolved = output.read_text("utf-8")
    is_torch_lock = lock.name == "torch"
    entries = [
        drop_constraint_notes(entry)
        for name, entry in split_entries(resolved).items()
        if lock.group is not None or bool(TORCH_PACKAGE.fullmatch(name)) == is_torch_lock
    ]
    return HEADER.format(purpose=lock.purpose, python=OLDEST_PYTHON) + "".join(entries)


def split_entries(text: str) -> dict[str, str]:
    """Package name → the lines of a lock file about it; a package with two markers has two versions there."""
    entries: dict[str, str] = {}
    for entry in ENTRY.findall(text):
        name = re.match(r"[a-z0-9._-]+", entry)
        assert name is not None
        entries[name[0]] = entries.get(name[0], "") + entry
    return entries


def drop_constraint_notes(entry: str) -> str:
    """The entry without the notes that name a constraints file."""
    lines = [line for line in entry.splitlines() if not line.strip().startswith(("#   -c ", "# via -c "))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
