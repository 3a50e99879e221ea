"""What a wrong use is told: one line that names it, and what was perhaps meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "dict": "names with values, as in '{dim: 256}'",
         "tuple": "several values, as in '[0.9, 0.98]'", "list": "several values, as in '[text, label]'"}
TEXTS = ("path", "src", "tgt", "columns", "tag")  # what --train and --valid are made of


def explained(message: str, parser: Any, arguments: Sequence[str] = ()) -> str:
    """The parser's message in our words, where we know better ones, in one line."""
    commands = _commands(parser)
    chosen = next((commands[word] for word in arguments if word in commands), None)
    options = sorted(_options(chosen or parser))
    if found := re.search(r"invalid choice: '?([^' ]+)'? \(choose from", message):
        return f"there is no command {found[1]!r}: {_meant(found[1], commands)}"
    if found := re.search(r"unrecognized arguments?: (\S+)", message, re.I):
        return _unknown(found[1], options)
    if found := re.search(r"does not accept option '([^']+)'", message):  # in a file
        return _unknown(found[1], [option.removeprefix("--") for option in options])
    if found := re.search(r"argument (--[\w.-]+)\S*: expected (.*)", message):
        return f"{found[1]} stands alone: it needs {found[2].replace('argument', 'value')}"
    if found := re.search(r"File does not exist: '([^']+)'", message):
        return _missing(Path(found[1]))
    if found := re.search(r"Problems parsing config: (.*)", message, re.S):
        return "--config is not YAML: " + " ".join(found[1].replace('"<unicode string>"', "the file").split())
    if found := re.search(r'[Pp]arser key "([^"]+)"', message):
        return _value(found[1], message)
    if "subcommand" in message:
        return "say what to do: keepleft --help lists the commands"
    return " ".join(message.split())


def _unknown(word: str, options: Sequence[str]) -> str:
    if not word.startswith("--") and not any(option == word or not option.startswith("--") for option in options):
        return f"{word!r} is not an option: values go behind the option that they are for, as in --task lm"
    name = word.partition("=")[0]
    ends = {option.rpartition(".")[2]: option for option in options}  # --steps is --recipe.steps to many
    meant = ([option for option in options if option.endswith("." + name.lstrip("-"))]
             or get_close_matches(name, options, 3, 0.85) or get_close_matches(name, options, 1)
             or [ends[end] for end in get_close_matches(name.lstrip("-"), ends, 1)])
    return f"there is no option {name}: " + (f"did you mean {' or '.join(meant[:3])}?" if meant else "--help lists them all")


def _missing(path: Path) -> str:
    """A file that is not there, as it was named if that is below this folder."""
    here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if not path.parent.is_dir():
        return f"there is no file {here}: there is no folder {here.parent}"
    close = get_close_matches(path.name, sorted(entry.name for entry in path.parent.iterdir()), 1)
    return f"there is no file {here}: " + (f"did you mean {here.with_name(close[0])}?" if close else "look at its name")


def _value(key: str, message: str) -> str:
    """A value that its option cannot have."""
    if nested := re.search(r"NestedArg\(key='([^']+)'", message):
        return f"there is no option --{key}.{nested[1]}: there are {', '.join(TEXTS[:-1])} and {TEXTS[-1]}"
    if found := re.search(r"Unable to load config ['\"](.*?)['\"]", message):
        return f"--{key} is {found[1]!r}: it takes a YAML file; single values go to its parts, as --help shows"
    found = re.search(r"(?:Given|Got) value: (.*)", message)
    value = found[1].strip() if found else ""
    if choices := re.search(r"Literal\[(.*?)\]", message):
        names = re.findall(r"'([^']+)'", choices[1])
        return f"--{key} is {value!r}: {_meant(value, names)}"
    kinds = [KINDS[kind] for kind in re.findall(r"Expected a <class '(\w+)'>", message) if kind in KINDS]
    return f"--{key} is {value!r}: " + (f"it must be {kinds[0]}" if kinds else "--help says what it takes")


def _meant(word: str, names: Iterable[str]) -> str:
    """The closest name, or all of them."""
    close = get_close_matches(word, names := list(names), 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


def _commands(parser: Any) -> dict[str, Any]:
    return {name: one for action in parser._actions if isinstance(inner := getattr(action, "choices", None), dict)
            for name, one in inner.items()}


def _options(parser: Any) -> set[str]:
    """Those of one command; what texts are made of stands in no list of the parser's."""
    out = {option for option in parser._option_string_actions if option[:2] == "--" and not option.endswith(("+", ".help"))}
    return out | {f"{option}.{part}" for option in ("--train", "--valid") if option in out for part in TEXTS}
