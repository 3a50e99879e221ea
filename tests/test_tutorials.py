"""Every tutorial runs from top to bottom, at toy size: its files are written, its commands and code run.

A block with a title is a file. The lines of a `console` block that begin with `$` are commands, `python`
blocks are code; all blocks of a page share a folder. A comment before a block says how it is tested:

    <!-- test: add --recipe.steps 2 -->     options to add to `keepleft train` and `keepleft eval`
    <!-- test: exit 1 -->                   the exit code of its last command
    <!-- test: server -->                   its command runs until the end of the page, on a free port
    <!-- test: needs translator -->         it runs where the translator is installed, or the page is built
    <!-- test: skip, REASON -->             it does not run
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keepleft.cli import main
from keepleft.cli.paths import installed_weights

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
SHELL_SYNTAX = re.compile(r"[|<>;]")
PORT = "8000"  # that a page names; the server of a test has another
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
AVAILABLE = {
    "translator": "translator" in installed_weights(),
    "page": (ROOT / "src" / "keepleft" / "serving" / "explorer" / "page" / "index.html").exists(),
}


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    body: str
    directive: str  # "add", "exit", "server", "needs", "skip" or ""
    argument: str

    def commands(self) -> list[str]:
        lines = self.body.replace("\\\n", " ").splitlines()
        return [
            line.removeprefix("$ ").partition("  #")[0].strip() for line in lines if line.startswith("$ ")
        ]


def read_blocks(page: str) -> list[Block]:
    pattern = r"^(?:<!-- test: (\w+),? ?([^\n]*?) ?-->\n)?```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$"
    return [
        Block(language, title or None, body, directive, argument)
        for directive, argument, language, title, body in re.findall(pattern, page, re.M | re.S)
    ]


class TutorialRun:
    """Runs the blocks of one page, in order, in the current folder."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "tutorial"}
        self.port = PORT
        self.servers = contextlib.ExitStack()

    def run(self, block: Block) -> None:
        if block.directive == "skip" or (block.directive == "needs" and not AVAILABLE[block.argument]):
            return
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.body, "utf-8")
        elif block.language == "python":
            exec(compile(self._with_port(block.body), "a tutorial", "exec"), self.names)
        elif block.language == "console":
            commands = block.commands()
            for n, command in enumerate(commands, 1):
                is_last = n == len(commands)
                self._run_command(
                    block, command, int(block.argument) if block.directive == "exit" and is_last else 0
                )

    def _run_command(self, block: Block, command: str, exit_code: int) -> None:
        command = self._with_port(command)
        if block.directive == "add" and command.startswith(("keepleft train", "keepleft eval")):
            command += f" {block.argument}"
        if command.startswith("pip install"):
            assert set(re.findall(r"\w+", command.partition("[")[2])) <= {*EXTRAS, "translator"}, command
        elif block.directive == "server":
            self.port = self.servers.enter_context(served(shlex.split(command)[1:]))
        elif command.startswith("keepleft ") and not SHELL_SYNTAX.search(
            re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
        ):
            assert main(shlex.split(command)[1:]) == exit_code, command
        else:
            folder = str(Path(sys.executable).parent)
            environment = {
                **os.environ,
                "PATH": folder + os.pathsep + os.environ["PATH"],
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            ran = subprocess.run(
                ["bash", "-c", command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert ran.returncode == exit_code, f"{command}: {ran.stdout}{ran.stderr}"

    def _with_port(self, text: str) -> str:
        return (
            re.sub(rf"(?<=localhost:|127\.0\.0\.1:){PORT}\b", self.port, text) if self.port != PORT else text
        )


@contextlib.contextmanager
def served(arguments: list[str]) -> Iterator[str]:
    """`keepleft serve` in a process of its own: the port that it took."""
    process = subprocess.Popen(
        [sys.executable, "-m", "keepleft", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    drain = threading.Thread(target=lambda: [None for _ in process.stderr], daemon=True)
    try:
        for line in process.stderr:
            if found := re.search(r"http://\S+:(\d+)/v1", line):
                drain.start()
                yield found[1]
                break
        else:
            pytest.fail(f"the server ended with {process.wait(30)}")
    finally:
        process.kill()
        process.wait(30)
        if drain.ident is not None:
            drain.join(30)
        process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_from_top_to_bottom(path, tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    tutorial = TutorialRun()
    with tutorial.servers:
        for block in read_blocks(path.read_text("utf-8")):
            tutorial.run(block)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_every_directive_of_a_tutorial_belongs_to_a_block(path):
    page = path.read_text("utf-8")
    directives = [block.directive for block in read_blocks(page) if block.directive]
    assert len(directives) == page.count("<!--"), f"a comment on {path.name} stands before no block"
    assert set(directives) <= {"add", "exit", "server", "needs", "skip"}
    assert sum(block.language == "console" for block in read_blocks(page)) >= 2
