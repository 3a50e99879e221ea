"""The command line: one short file per command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from inspect import signature
from keyword import iskeyword

SAID = "said"  # what a command may ask for: the names of the options that were given, defaults or not


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 fine, 1 a finding or a failed quality gate, 2 wrong use."""
    from argparse import ArgumentError

    from jsonargparse import ArgumentParser

    from keepleft import __version__
    from keepleft.cli.audit import look
    from keepleft.cli.compare import compare
    from keepleft.cli.demo import demo
    from keepleft.cli.doctor import doctor
    from keepleft.cli.explored import shown
    from keepleft.cli.export import give
    from keepleft.cli.generate import complete, summarize, translate
    from keepleft.cli.judge import classify, fill, score
    from keepleft.cli.judged import judged
    from keepleft.cli.train import teach

    commands: dict[str, Callable[..., int]] = {
        "demo": demo, "train": teach, "generate": complete, "translate": translate, "summarize": summarize,
        "classify": classify, "fill": fill, "score": score, "eval": judged, "audit": look, "compare": compare,
        "show": shown, "export": give, "doctor": doctor}
    parser = ArgumentParser(prog="keepleft", version=__version__, exit_on_error=False, allow_abbrev=False,
                            formatter_class=_layout(),  # of all commands
                            description="Train, run, serve, see and audit Transformers that do not peek.")
    chosen = parser.add_subcommands(metavar="command")
    for name, command in commands.items():
        chosen.add_subcommand(name, _parser(command), help=(command.__doc__ or "").splitlines()[0])
    arguments = spelt(sys.argv[1:] if arguments is None else arguments)
    try:
        given = parser.instantiate(parser.parse_args(arguments))
        said = parser.parse_args(arguments, defaults=False)[given.subcommand]
    except ArgumentError as error:
        from keepleft.cli.wrong import explained

        print(f"keepleft: {explained(str(error), parser, arguments)}", file=sys.stderr)
        return 2
    command = commands[given.subcommand]
    options = {f"{name}_" if iskeyword(name) else name: value for name, value in vars(given[given.subcommand]).items()
               if name != "config"}
    if SAID in signature(command).parameters:
        options[SAID] = frozenset(said.keys())
    try:
        if "options" in signature(command).parameters:
            from keepleft.cli.wishes import gathered

            options = gathered(options)
        return command(**options)
    except KeyboardInterrupt:
        print("keepleft: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        return 0
    except (ValueError, OSError, ImportError, MemoryError, FloatingPointError) as error:
        print(f"keepleft: {error}", file=sys.stderr)
        return 2


def spelt(arguments: list[str]) -> list[str]:
    """Options as the parser knows them: --max-new-tokens is --max_new_tokens, and the file of `--train FILE --train.columns …`
    has its full name, since the second option would otherwise replace it."""
    arguments = [re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), given) for given in arguments]
    for name in ("--train", "--valid"):
        if any(given.startswith(f"{name}.") for given in arguments):
            arguments = [f"{name}.path" if given == name else given.replace(f"{name}=", f"{name}.path=", 1)
                         if given.startswith(f"{name}=") else given for given in arguments]
    return arguments


def _layout():  # type: ignore[no-untyped-def]
    """Of a help text: paragraphs are filled, and examples, which are indented, keep their lines."""
    from jsonargparse import DefaultHelpFormatter

    class Layout(DefaultHelpFormatter):
        def _fill_text(self, text: str, width: int, indent: str) -> str:
            return "\n\n".join(part if part.startswith(" ") else super(Layout, self)._fill_text(part, width, indent)
                               for part in text.split("\n\n"))

    return Layout


def _parser(command: Callable[..., int]):  # type: ignore[no-untyped-def]
    """A command's own parser, from its signature and docstring; what has no default stands by itself, what is False
    unless asked for is a flag, and what is a tuple of whole numbers takes several. `with_` is --with, which no parameter may be
    called."""
    from typing import get_type_hints

    from docstring_parser import parse
    from jsonargparse import SUPPRESS, ArgumentParser

    said = parse(command.__doc__ or "")
    flags: set[str | int] = {name for name, parameter in signature(command).parameters.items() if parameter.default is False}
    parser = ArgumentParser(description="\n\n".join(filter(None, [said.short_description, said.long_description])),
                            exit_on_error=False, allow_abbrev=False)
    if "recipe" in signature(command).parameters:
        parser.add_argument("--config", action="config", help="a YAML file with any of these options; later ones win")
    several: dict[str | int, tuple[int, ...]] = {name: given.default for name, given in signature(command).parameters.items()
                                                 if isinstance(given.default, tuple)}
    help_ = {parameter.arg_name: parameter.description for parameter in said.params}
    made_here = {name for name in (SAID, "inputs", "options") if name in signature(command).parameters}
    words: set[str | int] = {name for name in signature(command).parameters if iskeyword(name.rstrip("_"))}
    parser.add_function_arguments(command, as_group=False, as_positional=True, skip=flags | several.keys() | made_here | words)
    for word in map(str, words):
        parser.add_argument(f"--{word.rstrip('_')}", type=get_type_hints(command)[word], help=help_.get(word),
                            default=signature(command).parameters[word].default)
    if "inputs" in made_here:
        parser.add_argument("inputs", nargs="*", help=help_.get("inputs"))
    for name, numbers in several.items():
        parser.add_argument(f"--{name}", nargs="+", type=int, default=list(numbers), help=help_.get(str(name)))
    for flag in sorted(map(str, flags)):
        parser.add_argument(f"--{flag}", action="store_true", help=help_.get(flag))
    if "options" in made_here:
        from keepleft.cli.wishes import add

        add(parser)
    for action in parser._actions:
        if action.dest.endswith(".help"):
            action.help = SUPPRESS  # a page of its own for --train.src and its like, which --train describes
    return parser
