"""The argument parser, built from the signatures and docstrings of the commands.

A parameter without a default is positional; one whose default is False is a switch; a tuple of integers takes
several values. Every command has --threads, whether it has such a parameter or not. Five parameters have a
meaning of their own:

- inputs: all positional arguments of the command
- flags: a dataclass, each field an option of the command
- options: a GenerationConfig, likewise
- explicit_options: the names of the options that were given on the command line or in --config; not an option
itself
- with_: --with, which is a Python keyword

A command function must not have a name of the public surface (kl.audit, kl.generate, kl.train): jsonargparse
looks its name up in the package, which would import torch before --help.
"""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Callable, Iterable
from dataclasses import fields
from inspect import signature
from keyword import iskeyword
from typing import Any, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import SUPPRESS, ArgumentParser, DefaultHelpFormatter

from keepleft import __version__
from keepleft.cli.generation_flags import add_generation_flags

DATACLASS_PARAMETERS = ("flags", "options")
SPECIAL_PARAMETERS = {"inputs", "explicit_options", *DATACLASS_PARAMETERS}
# how usage lines show `inputs`
INPUTS_USAGE = {
    "generate": "[MODEL] [TEXT ...]",
    "eval": "MODEL DATA [DATA]",
    "audit": "[MODEL]",
    "show": "MODEL [TEXT]",
    "fetch": "[NAME ...]",
}
THREADS_HELP = "CPU threads at most; if not given, as many as there are cores for this process"
DEFAULT_INPUTS_USAGE = "MODEL [TEXT ...]"


def build_parser(commands: dict[str, Callable[..., int]], arguments: list[str]) -> ArgumentParser:
    """The parser of all commands; only the command that the arguments name gets its options."""
    requested = next((word for word in arguments if word in commands), None)
    parser = ArgumentParser(
        prog="keepleft",
        version=__version__,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=HelpFormatter,  # the parsers of the commands inherit it
        usage="keepleft COMMAND [options]",
        description="Train, run, serve, see and audit Transformers that do not peek.",
    )
    subcommands = parser.add_subcommands(metavar="COMMAND")
    for name, command in commands.items():
        summary = (command.__doc__ or "").splitlines()[0]
        subparser = _command_parser(name, command) if name == requested else ArgumentParser()
        subcommands.add_subcommand(name, subparser, help=summary)
    return parser


def normalise_arguments(arguments: list[str]) -> list[str]:
    """Spell options as the parser knows them.

    Underscores in a name become hyphens: --max_new_tokens is --max-new-tokens. The keys of --design are
    fields of a Design and go the other way: --design.kv-heads is --design.kv_heads. The file of `--train FILE
    --train.columns …` gets its full name, --train.path, since the second option would otherwise replace it.
    """
    arguments = [re.sub(r"^--[\w.-]+", lambda match: _normalise_name(match[0]), text) for text in arguments]
    for name in ("--train", "--valid"):
        if any(argument.startswith(f"{name}.") for argument in arguments):
            arguments = [re.sub(rf"^{name}(?==|$)", f"{name}.path", argument) for argument in arguments]
    return arguments


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


class HelpFormatter(DefaultHelpFormatter):
    """Fills paragraphs, except indented ones (examples); leaves out types that say nothing."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part if part.startswith(" ") else super(HelpFormatter, self)._fill_text(part, width, indent)
            for part in text.split("\n\n")
        )

    def _get_help_string(self, action: Action) -> str:
        text = super()._get_help_string(action)
        if action.default is None or action.default is False:
            text = re.sub(r"(, )?default: %\(default\)s", "", text).replace(" ()", "")
        is_choice = (self._get_type_str(action) or "").startswith("one of")
        return text.replace("type: %(type)s", "%(type)s") if is_choice else text

    def _get_type_str(self, action: Action) -> str | None:
        text = re.sub(r"Optional\[(.*)\]", r"\1", super()._get_type_str(action) or "")
        text = re.sub(r"(, | \| )null(?=\]|$)", "", text)
        if choices := re.fullmatch(r"Literal\[(.*)\]", text):
            return None if action.metavar else "one of " + choices[1].replace("'", "")
        is_obvious = text in ("", "str", "bool") or "dict[" in text or "Config" in text
        return None if is_obvious else text

    def _format_action_invocation(self, action: Action) -> str:
        """Leaves out --train+, which appends to a list."""
        text = super()._format_action_invocation(action)
        return ", ".join(part for part in text.split(", ") if not part.split(" ")[0].endswith("+"))


def _command_parser(name: str, command: Callable[..., int]) -> ArgumentParser:
    docstring = parse_docstring(command.__doc__ or "")
    parameters = signature(command).parameters
    parser = ArgumentParser(
        description="\n\n".join(filter(None, [docstring.short_description, docstring.long_description])),
        exit_on_error=False,
        allow_abbrev=False,
        print_config="--print-config",
    )
    if "recipe" in parameters:
        parser.add_argument(
            "--config", action="config", help="a YAML file with any of these options; later options win"
        )
    if "inputs" in parameters:
        help_text = next(param.description for param in docstring.params if param.arg_name == "inputs")
        usage = INPUTS_USAGE.get(name, DEFAULT_INPUTS_USAGE)
        parser.add_argument("inputs", nargs="*", metavar=usage, help=help_text).required = False
    _add_parameters(parser, command)
    if "flags" in parameters:
        _add_parameters(parser, get_type_hints(command)["flags"])
    if "options" in parameters:
        add_generation_flags(parser)
    if "threads" not in parameters:
        parser.add_argument("--threads", type=int | None, default=None, help=THREADS_HELP)
    _spell_with_hyphens(parser)
    positionals = []
    for action in parser._actions:
        if not action.option_strings:
            action.metavar = str(action.metavar or action.dest.upper())
            positionals.append(action.metavar)
        elif action.dest.endswith(".help"):
            action.help = SUPPRESS  # --train.help and its like, a help page of their own; --train says it all
    parser.usage = " ".join(["keepleft", name, *positionals, "[options]"])
    return parser


def _add_parameters(parser: ArgumentParser, source: Callable[..., Any]) -> None:
    """Add the parameters of a command, or the fields of a dataclass, as options."""
    hints = get_type_hints(source)
    # Left as strings, jsonargparse would resolve them by running the imports under TYPE_CHECKING: torch.
    (source.__init__ if isinstance(source, type) else source).__annotations__ = hints  # type: ignore[misc]
    help_texts = {param.arg_name: param.description for param in parse_docstring(source.__doc__ or "").params}
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
        parser.add_argument(
            f"--{name.rstrip('_')}", type=hints[name], default=defaults[name], help=help_texts.get(name)
        )
    for name in tuples:
        parser.add_argument(
            f"--{name}", nargs="+", type=int, default=list(defaults[name]), help=help_texts.get(name)
        )
    for name in switches:
        parser.add_argument(f"--{name}", action="store_true", help=help_texts.get(name))


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
