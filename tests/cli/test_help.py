"""`keepleft` lists the commands; --help teaches one of them on a screen; --help-all shows every option."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from keepleft.cli import main, option_table
from keepleft.cli.command_table import COMMANDS, find_command
from keepleft.cli.help_pages import EXAMPLE_WIDTH, command_help, command_list, invocation
from keepleft.cli.parser import build_parser, normalise_arguments

SCREEN_LINES = 45
NAMES = [command.name for command in COMMANDS]
every_command = pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
RAW_TYPES = re.compile(
    r"Optional|Union\[|Literal|dict\[|list\[|tuple\[|\bnull\b|\bNone\b|\btype:|\bint\b|\bstr\b|\bbool\b"
)


def output(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


# -- the list of commands


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_the_commands_are_listed_with_an_example_each(arguments, capsys):
    text = output(capsys, *arguments)
    assert re.findall(r"^  keepleft (\w+)", text, re.M) == NAMES
    assert "Type keepleft demo" in text
    for command in COMMANDS:
        assert f"\n{command.group}\n" in text
        assert command.example in text
        assert command.summary in text


def test_a_command_with_one_option_does_not_speak_of_all_options(capsys):
    page = output(capsys, "completion", "--help")
    assert page.endswith("The option, in full: keepleft completion --help-all\n")


def test_the_seed_of_a_chat_is_not_explained_by_prompts(capsys):
    assert re.search(r"--seed N +random seed of the answers\n", output(capsys, "chat", "--help"))


def test_the_list_fits_a_screen():
    lines = command_list(80).splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= 80


def test_commands_of_one_group_stand_together():
    groups = [command.group for command in COMMANDS]
    assert sorted(groups, key=groups.index) == groups


@every_command
def test_a_row_is_complete(command):
    assert command.load().__doc__
    assert command.example.startswith(f"keepleft {command.name}")
    assert len(command.example) <= EXAMPLE_WIDTH
    assert len(command.examples) == len(set(command.examples)) == 3
    assert command.summary[0].islower()
    assert not command.summary.endswith(".")


def test_no_command_is_called_twice():
    assert len(NAMES) == len(set(NAMES))


# -- the page of a command


@every_command
@pytest.mark.parametrize("width", [80, 100])
def test_the_page_of_a_command_fits_a_screen(command, width):
    lines = command_help(command, width=width).splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= width
    assert lines[0] == f"Usage: {command.usage}"


@every_command
def test_two_lines_say_what_a_command_does(command):
    _usage, about, examples, *_ = command_help(command, width=80).split("\n\n")
    assert len(about.splitlines()) <= 2
    assert examples.splitlines() == ["Examples", *(f"  {example}" for example in command.examples)]


@every_command
def test_common_options_are_few_and_the_rest_is_one_page_away(command):
    page = command_help(command, width=80)
    shown = re.findall(r"^  (--[\w.-]+)", page, re.M)
    assert len(shown) <= 16
    assert len(shown) == len(set(shown))
    shows_everything = command.name == "doctor"
    assert page.endswith(f": keepleft {command.name} --help-all") != shows_everything


@every_command
@pytest.mark.parametrize("width", [80, 100])
def test_the_page_of_all_options_fits_the_width(command, width):
    assert max(map(len, command_help(command, show_all=True, width=width).splitlines())) <= width


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("train", "span or denoise (required unless --resume)"),
        ("train", "texts and labels (required unless --resume)"),
        ("show", "the file to write (required)"),
        ("export", "gguf (for llama.cpp) (required)"),
        ("export", "the folder or file to write (required)"),
        ("generate", """wherever tokens begin and end (several as in '["a", "b"]')"""),
        ("generate", "one for all prompts or one for each (several as in '[1, 2]')"),
        ("push", "the branch to push to (default: main)"),
    ],
)
def test_what_is_required_and_how_lists_are_written(command, text):
    assert text in " ".join(command_help(find_command(command), width=100).split())


@every_command
@pytest.mark.parametrize("show_all", [False, True], ids=["common", "all"])
def test_no_page_shows_underscores_or_types_of_python(command, show_all):
    page = command_help(command, show_all=show_all, width=80)
    assert not re.findall(r"--[a-z.-]*_[\w.-]*", page)
    assert not RAW_TYPES.findall(page)


@every_command
def test_every_option_has_a_sentence_and_a_place(command):
    options = option_table.command_options(command)
    page = command_help(command, show_all=True, width=100)
    for option in options:
        assert len(option.help.split()) >= 2, option.key
        assert option.help[0] not in " ,;", option.key
        assert not option.help.endswith("."), option.key
        assert invocation(option) in page
    flags = re.findall(r"^  (--[\w.-]+)", page, re.M)
    assert sorted(flags) == sorted(option.flag for option in options if not option.is_positional)


@every_command
def test_the_pages_know_every_option_that_the_parser_takes(command):
    actions = build_parser(command.load())._actions
    taken = {
        name
        for action in actions
        for name in action.option_strings or [action.dest]
        if not name.endswith(("+", ".help")) and name not in ("-h", "--help")
    }
    options = option_table.command_options(command)
    known = {option.key if option.is_positional else option.flag for option in options}
    parts = {flag for flag in known if flag.startswith(("--train.", "--valid.", "--design."))}
    assert taken == known - parts


@every_command
def test_examples_are_understood(command):
    for example in (command.example, *command.examples):
        words = shlex.split(example)
        words = words[words.index("keepleft") :]
        words = words[: words.index(">")] if ">" in words else words
        assert words[1] == command.name
        function = command.load()
        values = build_parser(function).parse_args(normalise_arguments(words[2:], function))
        assert values is not None


def test_help_is_found_wherever_it_stands(capsys):
    page = output(capsys, "train", "--help")
    assert output(capsys, "train", "--task", "lm", "-h") == page
    assert output(capsys, "help", "train") == page
    assert output(capsys, "train", "--help-all") != page
    assert main(["trian", "--help"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_the_help_of_train_says_how_to_name_data(capsys):
    page = output(capsys, "train", "--help-all")
    for option in ("--train.src", "--train.tgt", "--train.columns", "--train.tag", "--valid.src"):
        assert option in page
    assert "--design.kv-heads N" in page


def test_groups_are_dotted(capsys):
    page = output(capsys, "serve", "--help-all")
    assert "--limits.stop-strings N" in page
    assert "--kv-cache-memory X" in page


def test_generation_options_all_have_a_title():
    titles = {option.group for option in option_table.command_options(find_command("generate"))}
    assert "More about generation" not in titles


def test_an_underscore_is_read_as_a_hyphen(capsys):
    for option in ("--limits.stop-strings", "--limits.stop_strings"):
        assert main(["serve", "model", option, "x"]) == 2
        assert "--limits.stop-strings is 'x': it must be a whole number" in capsys.readouterr().err


def test_only_the_module_of_the_command_is_imported():
    code = """
import sys
from keepleft.cli import main
main(["doctor", "--threads", "0"])
others = [name for name in sys.modules if name.startswith("keepleft.cli.")]
print(sorted(name.removeprefix("keepleft.cli.") for name in others))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    imported = ran.stdout
    for name in ("train", "serve", "generate", "audit", "predict", "show", "export"):
        assert f"'{name}'" not in imported
    assert "'doctor'" in imported


def test_a_reader_that_closes_the_pipe_is_no_error():
    pipe = f"{sys.executable} -m keepleft train --help-all | head -1"
    ran = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "Usage: keepleft train [options]\n"
    assert ran.stderr == ""
