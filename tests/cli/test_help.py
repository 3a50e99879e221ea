"""keepleft COMMAND --help: a short usage line, and options spelled with hyphens."""

from __future__ import annotations

import re

import pytest

from keepleft.cli import main

COMMANDS = {
    "demo": "",
    "train": "",
    "generate": " [MODEL] [TEXT ...]",
    "translate": " MODEL [TEXT ...]",
    "summarize": " MODEL [TEXT ...]",
    "classify": " MODEL [TEXT ...]",
    "fill": " MODEL [TEXT ...]",
    "score": " MODEL [TEXT ...]",
    "eval": " MODEL DATA [DATA]",
    "audit": " [MODEL]",
    "compare": "",
    "serve": " MODEL",
    "show": " MODEL [TEXT]",
    "export": " MODEL",
    "push": " MODEL REPO",
    "doctor": "",
}


def help_of(capsys, *command):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_the_commands_are_listed(capsys):
    text = help_of(capsys)
    assert text.startswith("usage: keepleft COMMAND [options]\n\n")
    assert re.findall(r"^    (\w+) ", text, re.M) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_usage_is_one_line_and_options_have_hyphens(command, capsys):
    text = help_of(capsys, command)
    assert text.startswith(f"usage: keepleft {command}{COMMANDS[command]} [options]\n\n")
    options = re.findall(r"^  (--[\w.+-]+)", text, re.M)
    assert len(options) == len(set(options)) > 0
    assert not [option for option in options if "_" in option]
    assert "default: null" not in text
    assert "| null" not in text


def test_groups_are_dotted(capsys):
    text = help_of(capsys, "serve")
    assert "--limits.stop-strings STOP_STRINGS" in text
    assert "--kv-cache-memory KV_CACHE_MEMORY" in text


def test_an_underscore_is_read_as_a_hyphen(capsys):
    for option in ("--limits.stop-strings", "--limits.stop_strings"):
        assert main(["serve", "model", option, "x"]) == 2
        assert "--limits.stop-strings is 'x': it must be a whole number" in capsys.readouterr().err
