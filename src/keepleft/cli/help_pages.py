"""What `keepleft`, `keepleft COMMAND --help` and `--help-all` print."""

from __future__ import annotations

import os
import re
import shutil
import sys
from itertools import groupby
from textwrap import fill, wrap
from typing import TYPE_CHECKING

from keepleft.cli.command_table import COMMANDS, Command

if TYPE_CHECKING:
    from keepleft.cli.option_table import Option

MIN_WIDTH, MAX_WIDTH = 60, 100
EXAMPLE_WIDTH = 45  # of the column of examples in the list of commands
MAX_FLAG_WIDTH = 24  # an option that is longer has a line to itself
ABOUT = "keepleft trains, runs, serves, audits and inspects Transformer models."
FIRST_COMMAND = "New here? Type keepleft demo: it takes two minutes and needs nothing else."
MODELS_ARE = (
    "MODEL is a folder such as runs/lm/model, a GGUF file, the name of an installed model (keepleft doctor "
    "lists them) or a name on the Hugging Face hub."
)
MORE_HELP = "keepleft COMMAND --help shows examples and the common options; --help-all, all."


def command_list(width: int | None = None) -> str:
    """The commands by what one wants to do, each with an example: what `keepleft` prints."""
    width = width or terminal_width()
    lines = [ABOUT, "", FIRST_COMMAND]
    for title, commands in groupby(COMMANDS, key=lambda command: command.group):
        lines += ["", heading(title)]
        lines += [f"  {command.example:{EXAMPLE_WIDTH}}  {command.summary}" for command in commands]
    return "\n".join([*lines, "", *wrap(MODELS_ARE, width), "", *wrap(MORE_HELP, width)])


def command_help(command: Command, *, show_all: bool = False, width: int | None = None) -> str:
    """The help page of a command: its common options, or all of them."""
    from keepleft.cli.option_table import command_options, describe_command, group_options

    width = width or terminal_width()
    options = command_options(command)
    paragraphs = describe_command(command)
    groups = group_options(command, options, common_only=not show_all)
    parts = [f"{heading('Usage:')} {command.usage}"]
    if show_all:
        parts += [_fill_paragraph(text, width) for text in paragraphs]
    else:
        parts.append(fill(" ".join(paragraphs[:2]), width))
    parts.append("\n".join([heading("Examples"), *(f"  {example}" for example in command.examples)]))
    arguments = [option for option in options if option.is_positional]
    if arguments:
        groups = {"Arguments": arguments, **groups}
    column = 4 + max(
        (
            length
            for group in groups.values()
            for option in group
            if (length := len(invocation(option))) <= MAX_FLAG_WIDTH
        ),
        default=0,
    )
    for title, group in groups.items():
        lines = [line for option in group for line in _option_lines(option, column, width, show_all)]
        parts.append("\n".join([heading(title), *lines]))
    num_options = len(options) - len(arguments)
    shown = [option for group in groups.values() for option in group]
    if len(shown) < len(options) or len(paragraphs) > 2 or any(opt.summary != opt.help for opt in shown):
        what = "The option" if num_options == 1 else f"All {num_options} options"
        parts.append(f"{what}, in full: keepleft {command.name} --help-all")
    return "\n\n".join(parts)


def terminal_width() -> int:
    return min(MAX_WIDTH, max(MIN_WIDTH, shutil.get_terminal_size().columns))


def heading(text: str) -> str:
    """The text, bold where a terminal reads it."""
    is_plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if is_plain else f"\033[1m{text}\033[0m"


def invocation(option: Option) -> str:
    """The option with what stands for its value: --port N."""
    if option.is_positional:
        return option.metavar
    return f"{option.flag} {option.metavar}".rstrip()


def explanation(option: Option, *, complete: bool) -> str:
    """The sentence of an option, its choices and its default; only the first sentence unless `complete`."""
    text = option.help if complete else option.summary
    named = option.metavar == "|".join(option.choices) or all(choice in text for choice in option.choices)
    notes = [] if named or not option.metavar else [f"one of {', '.join(option.choices)}"]
    if (example := re.search(r"(several )?as in .*", option.takes)) and "several" not in text.lower():
        notes.append(example[0])
    if option.default:
        notes.append(f"default: {option.default}")
    return f"{text} ({'; '.join(notes)})" if notes else text


def _option_lines(option: Option, column: int, width: int, complete: bool) -> list[str]:
    left = f"  {invocation(option)}"
    text = wrap(explanation(option, complete=complete), width - column, break_on_hyphens=False)
    if len(left) + 2 > column:
        return [left, *(" " * column + line for line in text)]
    return [f"{left:{column}}{text[0]}", *(" " * column + line for line in text[1:])]


def _fill_paragraph(text: str, width: int) -> str:
    """Filled to the width; an indented paragraph is an example and stays as it is."""
    return text if text.startswith(" ") else fill(" ".join(text.split()), width)
