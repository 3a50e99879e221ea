"""The argument parser of a command, built from the signature of its function.

A parameter without a default is positional; one whose default is False is a switch; a tuple of integers takes
several values. Every command has --threads, whether it has such a parameter or not. Six parameters have a
meaning of their own:

- inputs: all positional arguments of the command
- flags, job: dataclasses, each field an option of the command
- options: a GenerationConfig, likewise
- explicit_options: the names of the options that were given on the command line or in --config; not an option
itself
- with_: --with, which is a Python keyword

The parser prints no help: cli/option_table.py reads the same signatures for that. A command function must not
have a name of the public surface (kl.audit, kl.generate, kl.train): jsonargparse looks its name up in the
package, which would import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from inspect import signature
from itertools import zip_longest
from keyword import iskeyword
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser

from keepleft.cli.generation_flags import add_generation_flags, switch_names

DATACLASS_PARAMETERS = ("flags", "job", "options")
SPECIAL_PARAMETERS = {"inputs", "explicit_options", *DATACLASS_PARAMETERS}


def build_parser(command: Callable[..., int]) -> ArgumentParser:
    """The parser of one command. Its errors are raised, not printed."""
    parameters = signature(command).parameters
    parser = ArgumentParser(
        prog="keepleft",
        exit_on_error=False,
        allow_abbrev=False,
        add_help=False,
        print_config="--print-config" if "recipe" in parameters else None,
    )
    if "recipe" in parameters:
        parser.add_argument("--config", action="config")
    if "inputs" in parameters:
        parser.add_argument("inputs", nargs="*").required = False
    _add_parameters(parser, command)
    for name in {"flags", "job"} & parameters.keys():
        _add_parameters(parser, get_type_hints(command)[name])
    if "options" in parameters:
        add_generation_flags(parser)
    if "threads" not in parameters:
        parser.add_argument("--threads", type=int | None, default=None)
    _spell_with_hyphens(parser)
    return parser


def normalise_arguments(arguments: list[str], command: Callable[..., int]) -> list[str]:
    """Spell options as the parser knows them.

    Underscores in a name become hyphens: --max_new_tokens is --max-new-tokens. The keys of --design are
    fields of a Design and go the other way: --design.kv-heads is --design.kv_heads. The file of `--train FILE
    --train.columns …` gets its full name, --train.path, since the second option would otherwise replace it.
    A switch of GenerationConfig takes true or false, and no other word that follows it: --do-sample "A text".
    """
    arguments = [re.sub(r"^--[\w.-]+", lambda match: _normalise_name(match[0]), text) for text in arguments]
    for name in ("--train", "--valid"):
        if any(argument.startswith(f"{name}.") for argument in arguments):
            arguments = [re.sub(rf"^{name}(?==|$)", f"{name}.path", argument) for argument in arguments]
    if "options" in signature(command).parameters:
        switches = {f"--{name.replace('_', '-')}" for name in switch_names()}
        arguments = [
            f"{text}=true" if text in switches and after.lower() not in ("true", "false") else text
            for text, after in zip_longest(arguments, arguments[1:], fillvalue="")
        ]
    return arguments


def positionals_last(arguments: list[str], parser: ArgumentParser) -> list[str]:
    """The arguments with the positional ones last, behind --: argparse takes them in one piece only.

    So a text may follow an option: translate MODEL --to fr "A text". What follows -- is positional.
    """
    positionals: list[str] = []
    options: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--":
            positionals += remaining
            break
        if not re.match(r"--[\w.+-]", argument):
            positionals.append(argument)
            continue
        options.append(argument)
        action = parser._option_string_actions.get(argument)  # None for --name=value, and for what is unknown
        if action is None or action.nargs == 0:
            takes = 0 if "=" in argument or action is not None else len(remaining)
        else:
            takes = len(remaining) if action.nargs in ("+", "*") else 1
        while takes and remaining and not re.match(r"--[\w.+-]", remaining[0]):
            options.append(remaining.pop(0))
            takes -= 1
    return [*options, "--", *positionals] if positionals else options


def command_arguments(
    command: Callable[..., int], values: dict[str, Any], explicit_options: Iterable[str]
) -> dict[str, Any]:
    """The keyword arguments of a command from the values that were parsed."""
    arguments = {f"{name}_" if iskeyword(name) else name: value for name, value in values.items()}
    arguments.pop("config", None)
    if "threads" not in signature(command).parameters:
        del arguments["threads"]
    for parameter in DATACLASS_PARAMETERS:
        if parameter in signature(command).parameters:
            dataclass = get_type_hints(command)[parameter]
            names = [field.name for field in fields(dataclass)]
            arguments[parameter] = dataclass(**{name: arguments.pop(name) for name in names})
    if "explicit_options" in signature(command).parameters:
        arguments["explicit_options"] = frozenset(explicit_options) - {"threads"}
    return arguments


def _add_parameters(parser: ArgumentParser, source: Callable[..., Any]) -> None:
    """Add the parameters of a command, or the fields of a dataclass, as options."""
    hints = get_type_hints(source)
    # Left as strings, jsonargparse would resolve them by running the imports under TYPE_CHECKING: torch.
    (source.__init__ if isinstance(source, type) else source).__annotations__ = hints  # type: ignore[misc]
    defaults = {name: parameter.default for name, parameter in signature(source).parameters.items()}
    switches = sorted(name for name, default in defaults.items() if default is False)
    tuples = [name for name, default in defaults.items() if isinstance(default, tuple)]
    keywords = [name for name in defaults if iskeyword(name.rstrip("_"))]
    skipped: set[str | int] = {*switches, *tuples, *keywords, *SPECIAL_PARAMETERS}
    if isinstance(source, type):
        parser.add_class_arguments(source, as_group=False, skip=skipped)
    else:
        parser.add_function_arguments(source, as_group=False, as_positional=True, skip=skipped)
    for name in keywords:
        parser.add_argument(f"--{name.rstrip('_')}", type=hints[name], default=defaults[name])
    for name in tuples:
        parser.add_argument(f"--{name}", nargs="+", type=int, default=list(defaults[name]))
    for name in switches:
        parser.add_argument(f"--{name}", action="store_true")


def _spell_with_hyphens(parser: ArgumentParser) -> None:
    """Spell options --kv-cache-memory; jsonargparse takes parameter names as they are and has no setting."""
    registered = parser._option_string_actions
    for option, action in list(registered.items()):
        registered[_normalise_name(option)] = registered.pop(option)
        action.option_strings = [_normalise_name(name) for name in action.option_strings]


def _normalise_name(option: str) -> str:
    if option.startswith("--design."):
        return "--design." + option.removeprefix("--design.").replace("-", "_")
    return option.replace("_", "-")
