"""The command line: one file per command. Nothing heavy is imported before a command runs.

The list of commands is printed from cli/command_table.py alone; otherwise only the module of the command that
was asked for is imported.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from keepleft import __version__

if TYPE_CHECKING:
    from keepleft.cli.command_table import Command


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 success, 1 a finding or a failed quality gate, 2 a usage error."""
    from keepleft.cli.interrupts import repeat_lost_interrupts
    from keepleft.cli.streams import use_utf8

    use_utf8()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with repeat_lost_interrupts():
            exit_code = _print_help(arguments) if _asks_for_help(arguments) else _run_command(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        print("keepleft: stopped", file=sys.stderr)
        return getattr(interrupt, "exit_code", 130)
    except BrokenPipeError:  # the reader of our output has closed the pipe
        _discard_stdout()
        return 0
    except OSError as error:
        from keepleft.cli.usage_errors import explain_os_error

        print(f"keepleft: {explain_os_error(error)}", file=sys.stderr)
        return 2
    except (ValueError, ImportError, MemoryError, FloatingPointError) as error:
        print(f"keepleft: {error}", file=sys.stderr)
        return 2
    return exit_code


def _asks_for_help(arguments: list[str]) -> bool:
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return (
        not arguments
        or arguments[0] in ("help", "--version")
        or not {"-h", "--help", "--help-all", "--help_all"}.isdisjoint(options)
    )


def _print_help(arguments: list[str]) -> int:
    """Print the page that --help, --help-all or `help COMMAND` asks for."""
    from keepleft.cli.command_table import find_command
    from keepleft.cli.help_pages import command_help, command_list

    words = [argument for argument in arguments if not argument.startswith("-") and argument != "help"]
    if arguments and arguments[0] == "--version":
        print(f"keepleft {__version__}")
    elif words:
        show_all = not {"--help-all", "--help_all"}.isdisjoint(arguments)
        print(command_help(find_command(words[0]), show_all=show_all))
    else:
        print(command_list())
    return 0


def _run_command(arguments: list[str]) -> int:
    """Run the command that the first argument names. Raises ValueError where the arguments are wrong."""
    from argparse import ArgumentError
    from inspect import signature

    from keepleft.cli.command_table import find_command

    name, *arguments = arguments
    if name.startswith("-"):
        raise ValueError(
            f"{name} stands before a command: say what to do first, as in keepleft demo; keepleft alone "
            "lists the commands"
        )
    row = find_command(name)
    command = row.load()

    from keepleft.cli.parser import build_parser, command_arguments, normalise_arguments, positionals_last
    from keepleft.cli.threads import configure_threads

    arguments = normalise_arguments(arguments, command)
    parser = build_parser(command)
    if "inputs" in signature(command).parameters:
        arguments = positionals_last(arguments, parser)
    try:
        parsed = parser.instantiate(parser.parse_args(arguments))
        explicit_options = set(parser.parse_args(arguments, defaults=False).keys())
        threads = parsed.threads
        values = command_arguments(command, vars(parsed), explicit_options)
    except (ArgumentError, ValueError) as error:  # ValueError: an options dataclass rejects its values
        from keepleft.cli.usage_errors import explain_usage_error

        raise ValueError(explain_usage_error(str(error), row, arguments)) from error
    _check_arguments(row, values.get("inputs"))
    if explicit_options:
        from keepleft.cli.value_checks import check_values

        check_values(row.name, vars(parsed), explicit_options)
    configure_threads(threads)
    try:
        return command(**values)
    except ValueError as error:
        from keepleft.cli.usage_errors import name_option

        raise ValueError(name_option(str(error), row)) from error


def _check_arguments(row: Command, inputs: list[str] | None) -> None:
    """Raise ValueError if there are fewer positional arguments than the usage line asks for."""
    required = re.sub(r"\[.*?\]", "", row.arguments).split()  # brackets are around what may be left out
    if inputs is not None and len(inputs) < len(required):
        from keepleft.cli.usage_errors import missing_argument

        raise ValueError(missing_argument(row, len(inputs)))


def _discard_stdout() -> None:
    """Let the interpreter flush what is left into nothing, without an error on the way out."""
    with suppress(OSError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
