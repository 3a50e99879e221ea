"""keepleft completion: the scripts complete in bash, zsh and fish, without starting Python."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time

import pytest

from keepleft.cli import completion, main
from keepleft.cli.command_table import COMMANDS, find_command
from keepleft.cli.option_table import command_options

NAMES = {command.name for command in COMMANDS}
SHELLS = list(completion.SCRIPTS)


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


@pytest.fixture
def folder(tmp_path):
    """A folder with the scripts, two files, and the model of a run."""
    for shell, script in completion.SCRIPTS.items():
        (tmp_path / f"script.{shell}").write_text(script(["Tiny-1M", "Small-2M"]), "utf-8")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "job.yaml").touch()
    (tmp_path / "work" / "my corpus.txt").touch()
    (tmp_path / "work" / "runs" / "lm" / "model").mkdir(parents=True)
    return tmp_path


def run_shell(folder, shell: str, code: str) -> list[str]:
    """The lines that the code prints, in a shell that finds nothing but itself."""
    ran = subprocess.run(
        [shutil.which(shell), *(["--norc", "--noprofile"] if shell == "bash" else []), "-c", code],
        cwd=folder / "work",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={
            "PATH": "/nonexistent",
            "HOME": str(folder),
            "LC_ALL": "C.UTF-8",
            "XDG_CONFIG_HOME": str(folder),
        },
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout.splitlines()


def bash_completions(folder, *words: str) -> list[str]:
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"source ../script.bash; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _keepleft"
    lines = run_shell(folder, "bash", code + '; printf "%s\\n" "${COMPREPLY[@]}"')
    return [line for line in lines if line]


def fish_completions(folder, line: str) -> list[str]:
    lines = run_shell(folder, "fish", f"source ../script.fish; complete -C '{line}'")
    return [line.partition("\t")[0] for line in lines]


def zsh_lines(folder, lines: list[str]) -> list[str]:
    """Each line after the Tab key, in a zsh on a terminal."""
    (folder / "set_up.zsh").write_text(ZSH_SET_UP)
    terminal, shell_side = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"],
        cwd=folder / "work",
        env={"TERM": "dumb", "HOME": str(folder), "PATH": os.environ["PATH"]},
        stdin=shell_side,
        stdout=shell_side,
        stderr=shell_side,
        start_new_session=True,
    )
    os.close(shell_side)
    try:
        os.write(terminal, b"source ../set_up.zsh\n")
        for line in lines:
            os.write(terminal, line.encode() + CONTROL_T)
        os.write(terminal, b"exit\n")
        read_all(terminal)
    finally:
        os.close(terminal)
        shell.kill()
        shell.wait()
    return (folder / "lines").read_text().splitlines()


CONTROL_T = b"\x14"
ZSH_SET_UP = """
autoload -Uz compinit
compinit -u -D
source ../script.zsh
complete-and-store() { zle complete-word; print -r -- "$BUFFER" >> ../lines; BUFFER= }
zle -N complete-and-store
bindkey '^T' complete-and-store
"""


def read_all(terminal: int, timeout: float = 30.0) -> None:
    """Read until the shell has ended; it would wait for a reader otherwise."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                if not os.read(terminal, 65_536):
                    return
            except OSError:  # Linux's way to say that the other end is closed
                return
    pytest.fail("zsh did not end")


# -- what is in all scripts


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_printed(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in COMMANDS:
        for option in command_options(command):
            assert option.is_positional or option.flag[2:] in script
    assert "python" not in script.lower()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_accepts_the_script(shell, folder):
    needs(shell)
    subprocess.run([shell, "-n", folder / f"script.{shell}"], check=True, timeout=30)


def test_what_a_value_is_completed_with():
    options = {option.key: option for option in command_options(find_command("train"))}
    kinds = {key: value.kind for key, option in options.items() if (value := completion.option_value(option))}
    assert kinds["size"] == "choice"
    assert kinds["train.src"] == kinds["config"] == "file"
    assert kinds["out"] == "folder"
    assert kinds["init_from"] == "model"
    assert kinds["recipe.lr"] == "text"
    assert "resume" not in kinds


# -- bash


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["keepleft", ""], {*NAMES, "help", "--help", "--version"}),
        (["keepleft", "tr"], {"train", "translate"}),
        (["keepleft", "help", "se"], {"serve"}),
        (["keepleft", "train", "--siz"], {"--size"}),
        (
            ["keepleft", "train", "--recipe.l"],
            {"--recipe.lr", "--recipe.label-smoothing", "--recipe.log-every"},
        ),
        (["keepleft", "train", "--size", ""], {"tiny", "small", "base"}),
        (["keepleft", "train", "--size", "=", "t"], {"tiny"}),  # bash cuts words at =
        (["keepleft", "train", "--size", "="], {"tiny", "small", "base"}),
        (["keepleft", "train", "--config", ""], {"job.yaml", "my corpus.txt", "runs"}),
        (["keepleft", "train", "--out", ""], {"runs"}),
        (["keepleft", "train", "--recipe.lr", ""], set()),
        (["keepleft", "train", ""], set()),
        (["keepleft", "serve", "T"], {"Tiny-1M"}),
        (["keepleft", "serve", "runs/l"], {"runs/lm/model", "runs/lm"}),
        (["keepleft", "serve", "--port", "80", "S"], {"Small-2M"}),
        (["keepleft", "serve", "--dtype", "=", "int8", "S"], {"Small-2M"}),
        (["keepleft", "translate", "Tiny-1M", "T"], set()),  # a text
        (["keepleft", "eval", "Tiny-1M", "my"], {"my corpus.txt"}),
        (["keepleft", "translate", "Good morning", "--to", ""], {"fr", "de", "hi", "en"}),
        (["keepleft", "eval", "Tiny-1M", "--to", "=", "f"], {"fr"}),
        (["keepleft", "completion", ""], {"bash", "zsh", "fish"}),
        (["keepleft", "dance", ""], set()),
    ],
    ids=lambda value: " ".join(sorted(value) if isinstance(value, set) else value),
)
def test_bash_completes(words, expected, folder):
    needs("bash")
    assert set(bash_completions(folder, *words)) == expected


# -- fish


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("keepleft tr", {"train", "translate"}),
        ("keepleft --v", {"--version"}),
        ("keepleft help se", {"serve"}),
        ("keepleft train --siz", {"--size"}),
        ("keepleft train --size ", {"tiny", "small", "base"}),
        ("keepleft train --size=t", {"--size=tiny"}),
        ("keepleft train --config j", {"job.yaml"}),
        ("keepleft train --recipe.lr ", set()),
        ("keepleft train --task translate --alig", set()),  # an option of translate, which is no command here
        ("keepleft train ", set()),
        ("keepleft serve T", {"Tiny-1M"}),
        ("keepleft completion ", {"bash", "zsh", "fish"}),
        ("keepleft translate --to ", {"fr", "de", "hi", "en"}),
    ],
)
def test_fish_completes(line, expected, folder):
    needs("fish")
    assert set(fish_completions(folder, line)) == expected


def test_fish_describes_options(folder):
    needs("fish")
    lines = run_shell(folder, "fish", "source ../script.fish; complete -C 'keepleft train --recipe.lr'")
    assert lines == ["--recipe.lr\tthe peak learning rate"]


# -- zsh


def test_zsh_completes(folder):
    needs("zsh")
    completed = {
        "keepleft tra": "keepleft tra",  # train or translate
        "keepleft trai": "keepleft train ",
        "keepleft train --siz": "keepleft train --size=",
        "keepleft train --size ti": "keepleft train --size tiny ",
        "keepleft train --size=ti": "keepleft train --size=tiny ",
        "keepleft train --config j": "keepleft train --config job.yaml ",
        "keepleft train --recipe.warm": "keepleft train --recipe.warmup=",
        "keepleft train --resu": "keepleft train --resume ",
        "keepleft serve Ti": "keepleft serve Tiny-1M ",
        "keepleft serve --port 80 Sm": "keepleft serve --port 80 Small-2M ",
        "keepleft completion zs": "keepleft completion zsh ",
        "keepleft help comple": "keepleft help completion ",
    }
    lines = zsh_lines(folder, list(completed))
    assert dict(zip(completed, lines, strict=True)) == completed
