"""What a wrong use is told: one line that names it, and what was perhaps meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

TYPE_DESCRIPTIONS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "dict": "names with values, as in '{dim: 256}'",
    "tuple": "several values, as in '[0.9, 0.98]'",
    "list": "several values, as in '[text, label]'",
}
DATA_FIELDS = ("path", "src", "tgt", "columns", "tag")  # what --train and --valid are made of


def explain_usage_error(message: str, parser: Any, arguments: Sequence[str] = ()) -> str:
    """The parser's message in our words, where we know better ones, in one line."""
    commands = _commands(parser)
    subparser = next((commands[word] for word in arguments if word in commands), None)
    options = sorted(_options(subparser or parser))
    if match := re.search(r"invalid choice: '?([^' ]+)'? \(choose from", message):
        return f"there is no command {match[1]!r}: {_suggest(match[1], commands)}"
    if match := re.search(r"unrecognized arguments?: (\S+)", message, re.I):
        return _unknown_option(match[1], options)
    if match := re.search(r"does not accept option '([^']+)'", message):  # in a file
        return _unknown_option(match[1], [option.removeprefix("--") for option in options])
    if match := re.search(r"argument (--[\w.-]+)\S*: expected (.*)", message):
        return f"{match[1]} stands alone: it needs {match[2].replace('argument', 'value')}"
    if match := re.search(r"File does not exist: '([^']+)'", message):
        return _missing_file(Path(match[1]))
    if match := re.search(r"Problems parsing config: (.*)", message, re.S):
        return "--config is not YAML: " + " ".join(match[1].replace('"<unicode string>"', "the file").split())
    if match := re.search(r'[Pp]arser key "([^"]+)"', message):
        return _invalid_value(match[1], message)
    if "subcommand" in message:
        return "say what to do: keepleft --help lists the commands"
    return " ".join(message.split())


def _unknown_option(argument: str, options: Sequence[str]) -> str:
    if not argument.startswith("--") and not any(
        option == argument or not option.startswith("--") for option in options
    ):
        return (
            f"{argument!r} is not an option: values go behind the option that they are for, as in --task lm"
        )
    name = argument.partition("=")[0]
    by_suffix = {option.rpartition(".")[2]: option for option in options}  # --steps is --recipe.steps to many
    suggestions = (
        [option for option in options if option.endswith("." + name.lstrip("-"))]
        or get_close_matches(name, options, 3, 0.85)
        or get_close_matches(name, options, 1)
        or [by_suffix[suffix] for suffix in get_close_matches(name.lstrip("-"), by_suffix, 1)]
    )
    return f"there is no option {name}: " + (
        f"did you mean {' or '.join(suggestions[:3])}?" if suggestions else "--help lists them all"
    )


def _missing_file(path: Path) -> str:
    """A file that is not there, as it was named if that is below this folder."""
    shown_path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if not path.parent.is_dir():
        return f"there is no file {shown_path}: there is no folder {shown_path.parent}"
    suggestions = get_close_matches(path.name, sorted(entry.name for entry in path.parent.iterdir()), 1)
    return f"there is no file {shown_path}: " + (
        f"did you mean {shown_path.with_name(suggestions[0])}?" if suggestions else "look at its name"
    )


def _invalid_value(key: str, message: str) -> str:
    """A value that its option cannot have."""
    if nested := re.search(r"NestedArg\(key='([^']+)'", message):
        return f"there is no option --{key}.{nested[1]}: there are {', '.join(DATA_FIELDS[:-1])} and {DATA_FIELDS[-1]}"
    if match := re.search(r"Unable to load config ['\"](.*?)['\"]", message):
        return (
            f"--{key} is {match[1]!r}: it takes a YAML file; single values go to its parts, as --help shows"
        )
    match = re.search(r"(?:Given|Got) value: (.*)", message)
    value = match[1].strip() if match else ""
    if choices := re.search(r"Literal\[(.*?)\]", message):
        names = re.findall(r"'([^']+)'", choices[1])
        return f"--{key} is {value!r}: {_suggest(value, names)}"
    descriptions = [
        TYPE_DESCRIPTIONS[type_name]
        for type_name in re.findall(r"Expected a <class '(\w+)'>", message)
        if type_name in TYPE_DESCRIPTIONS
    ]
    return f"--{key} is {value!r}: " + (
        f"it must be {descriptions[0]}" if descriptions else "--help says what it takes"
    )


def _suggest(value: str, names: Iterable[str]) -> str:
    """The closest name, or all of them."""
    suggestions = get_close_matches(value, names := list(names), 1)
    return f"did you mean {suggestions[0]}?" if suggestions else f"there are {', '.join(names)}"


def _commands(parser: Any) -> dict[str, Any]:
    return {
        name: subparser
        for action in parser._actions
        if isinstance(choices := getattr(action, "choices", None), dict)
        for name, subparser in choices.items()
    }


def _options(parser: Any) -> set[str]:
    """Those of one command; what texts are made of stands in no list of the parser's."""
    out = {
        option
        for option in parser._option_string_actions
        if option[:2] == "--" and not option.endswith(("+", ".help"))
    }
    return out | {
        f"{option}.{part}" for option in ("--train", "--valid") if option in out for part in DATA_FIELDS
    }
