"""The command line: one short file per command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from inspect import signature
from keyword import iskeyword

EXPLICIT_OPTIONS = "explicit_options"  # what a command may ask for: the names of the options that were given, defaults or not


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 fine, 1 a finding or a failed quality gate, 2 wrong use."""
    from argparse import ArgumentError

    from jsonargparse import ArgumentParser

    from keepleft import __version__
    from keepleft.cli.audit import audit
    from keepleft.cli.compare import compare
    from keepleft.cli.demo import demo
    from keepleft.cli.doctor import doctor
    from keepleft.cli.eval import evaluate
    from keepleft.cli.export import export
    from keepleft.cli.generate import generate, summarize, translate
    from keepleft.cli.predict import classify, fill, score
    from keepleft.cli.serve import serve
    from keepleft.cli.show import show
    from keepleft.cli.train import train_model

    commands: dict[str, Callable[..., int]] = {
        "demo": demo,
        "train": train_model,
        "generate": generate,
        "translate": translate,
        "summarize": summarize,
        "classify": classify,
        "fill": fill,
        "score": score,
        "eval": evaluate,
        "audit": audit,
        "compare": compare,
        "serve": serve,
        "show": show,
        "export": export,
        "doctor": doctor,
    }
    parser = ArgumentParser(
        prog="keepleft",
        version=__version__,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=_help_formatter(),  # of all commands
        description="Train, run, serve, see and audit Transformers that do not peek.",
    )
    subcommands = parser.add_subcommands(metavar="command")
    for name, command in commands.items():
        subcommands.add_subcommand(name, _parser(command), help=(command.__doc__ or "").splitlines()[0])
    arguments = normalise_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        parsed = parser.instantiate(parser.parse_args(arguments))
        explicit_options = parser.parse_args(arguments, defaults=False)[parsed.subcommand]
    except (ArgumentError, ValueError) as error:  # the second from what is made of the options
        from keepleft.cli.usage_errors import explain_usage_error

        print(f"keepleft: {explain_usage_error(str(error), parser, arguments)}", file=sys.stderr)
        return 2
    command = commands[parsed.subcommand]
    options = {
        f"{name}_" if iskeyword(name) else name: value
        for name, value in vars(parsed[parsed.subcommand]).items()
        if name != "config"
    }
    if EXPLICIT_OPTIONS in signature(command).parameters:
        options[EXPLICIT_OPTIONS] = frozenset(explicit_options.keys())
    try:
        if "options" in signature(command).parameters:
            from keepleft.cli.generation_flags import collect_options

            options = collect_options(options)
        return command(**options)
    except KeyboardInterrupt:
        print("keepleft: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        return 0
    except (ValueError, OSError, ImportError, MemoryError, FloatingPointError) as error:
        print(f"keepleft: {error}", file=sys.stderr)
        return 2


def normalise_arguments(arguments: list[str]) -> list[str]:
    """Options as the parser knows them: --max-new-tokens is --max_new_tokens, and the file of `--train FILE
    --train.columns …` has its full name, since the second option would otherwise replace it.
    """
    arguments = [
        re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), argument)
        for argument in arguments
    ]
    for name in ("--train", "--valid"):
        if any(argument.startswith(f"{name}.") for argument in arguments):
            arguments = [
                f"{name}.path"
                if argument == name
                else argument.replace(f"{name}=", f"{name}.path=", 1)
                if argument.startswith(f"{name}=")
                else argument
                for argument in arguments
            ]
    return arguments


def _help_formatter():  # type: ignore[no-untyped-def]
    """Of a help text: paragraphs are filled, and examples, which are indented, keep their lines."""
    from jsonargparse import DefaultHelpFormatter

    class HelpFormatter(DefaultHelpFormatter):
        def _fill_text(self, text: str, width: int, indent: str) -> str:
            return "\n\n".join(
                part if part.startswith(" ") else super(HelpFormatter, self)._fill_text(part, width, indent)
                for part in text.split("\n\n")
            )

    return HelpFormatter


def _parser(command: Callable[..., int]):  # type: ignore[no-untyped-def]
    """A command's own parser, from its signature and docstring; what has no default stands by itself, what is
    False unless asked for is a flag, and what is a tuple of whole numbers takes several. `with_` is --with,
    which no parameter may be called.
    """
    from typing import get_type_hints

    from docstring_parser import parse
    from jsonargparse import SUPPRESS, ArgumentParser

    docstring = parse(command.__doc__ or "")
    flags: set[str | int] = {
        name for name, parameter in signature(command).parameters.items() if parameter.default is False
    }
    parser = ArgumentParser(
        description="\n\n".join(filter(None, [docstring.short_description, docstring.long_description])),
        exit_on_error=False,
        allow_abbrev=False,
    )
    if "recipe" in signature(command).parameters:
        parser.add_argument(
            "--config", action="config", help="a YAML file with any of these options; later ones win"
        )
    tuple_options: dict[str | int, tuple[int, ...]] = {
        name: parameter.default
        for name, parameter in signature(command).parameters.items()
        if isinstance(parameter.default, tuple)
    }
    help_texts = {parameter.arg_name: parameter.description for parameter in docstring.params}
    built_here = {
        name for name in (EXPLICIT_OPTIONS, "inputs", "options") if name in signature(command).parameters
    }
    keyword_names: set[str | int] = {
        name for name in signature(command).parameters if iskeyword(name.rstrip("_"))
    }
    parser.add_function_arguments(
        command,
        as_group=False,
        as_positional=True,
        skip=flags | tuple_options.keys() | built_here | keyword_names,
    )
    for keyword_name in map(str, keyword_names):
        parser.add_argument(
            f"--{keyword_name.rstrip('_')}",
            type=get_type_hints(command)[keyword_name],
            help=help_texts.get(keyword_name),
            default=signature(command).parameters[keyword_name].default,
        )
    if "inputs" in built_here:
        parser.add_argument("inputs", nargs="*", help=help_texts.get("inputs"))
    for name, defaults in tuple_options.items():
        parser.add_argument(
            f"--{name}", nargs="+", type=int, default=list(defaults), help=help_texts.get(str(name))
        )
    for flag in sorted(map(str, flags)):
        parser.add_argument(f"--{flag}", action="store_true", help=help_texts.get(flag))
    if "options" in built_here:
        from keepleft.cli.generation_flags import add_generation_flags

        add_generation_flags(parser)
    for action in parser._actions:
        if action.dest.endswith(".help"):
            action.help = SUPPRESS  # a page of its own for --train.src and its like, which --train describes
    return parser
