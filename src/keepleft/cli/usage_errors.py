"""Usage errors as one line: what is wrong, and what was probably meant."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

TYPE_DESCRIPTIONS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "dict": "names with values, as in '{dim: 256}'",
    "tuple": "several values, as in '[0.9, 0.98]'",
    "list": "several values, as in '[text, label]'",
}
DATA_FIELDS = ("path", "src", "tgt", "columns", "tag")  # the fields of --train and --valid


def explain_usage_error(message: str, parser: ArgumentParser, arguments: Sequence[str] = ()) -> str:
    """The parser's error message, in one line and in our own words where we have better ones."""
    commands = _subparsers(parser)
    parser = next((commands[word] for word in arguments if word in commands), parser)
    if match := re.search(r"invalid choice: '?([^' ]+)'? \(choose from", message):
        return f"there is no command {match[1]!r}: {_suggest(match[1], commands)}"
    if match := re.search(r"unrecognized arguments?: (\S+)", message, re.I):
        return _unknown_option(match[1], _option_names(parser))
    if match := re.search(r"does not accept option '([^']+)'", message):  # in a config file
        return _unknown_option(match[1], _config_keys(parser))
    if match := re.search(r"argument (--[\w.-]+)\S*: expected (.*)", message):
        return f"{match[1]} stands alone: it needs {match[2].replace('argument', 'value')}"
    if match := re.search(r"File does not exist: '([^']+)'", message):
        return _missing_file(Path(match[1]))
    if match := re.search(r"Problems parsing config: (.*)", message, re.S):
        return "--config is not YAML: " + " ".join(match[1].replace('"<unicode string>"', "the file").split())
    if match := re.search(r'[Pp]arser key "([^"]+)"', message):
        return _invalid_value("--" + match[1].replace("_", "-"), message)
    if "subcommand" in message:
        return "say what to do: keepleft --help lists the commands"
    return " ".join(message.split())


def _unknown_option(argument: str, options: Sequence[str]) -> str:
    if not argument.startswith("--") and all(option.startswith("--") for option in options):
        return f"{argument!r} is not an option: a value follows the option that it is for, as in --task lm"
    name = argument.partition("=")[0]
    # many type --steps for --recipe.steps
    by_suffix = {option.rpartition(".")[2]: option for option in options}
    suggestions = (
        [option for option in options if option.endswith("." + name.lstrip("-"))]
        or get_close_matches(name, options, 3, 0.85)
        or get_close_matches(name, options, 1)
        or [by_suffix[suffix] for suffix in get_close_matches(name.lstrip("-"), by_suffix, 1)]
    )
    hint = f"did you mean {' or '.join(suggestions[:3])}?" if suggestions else "--help lists them all"
    return f"there is no option {name}: {hint}"


def _missing_file(path: Path) -> str:
    """Names the file relative to the current folder where it lies below it, as the user probably did."""
    shown_path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if not path.parent.is_dir():
        return f"there is no file {shown_path}: there is no folder {shown_path.parent}"
    suggestions = get_close_matches(path.name, sorted(entry.name for entry in path.parent.iterdir()), 1)
    return f"there is no file {shown_path}: " + (
        f"did you mean {shown_path.with_name(suggestions[0])}?" if suggestions else "look at its name"
    )


def _invalid_value(option: str, message: str) -> str:
    if nested := re.search(r"NestedArg\(key='([^']+)'", message):
        field_names = f"{', '.join(DATA_FIELDS[:-1])} and {DATA_FIELDS[-1]}"
        return f"there is no option {option}.{nested[1]}: there are {field_names}"
    if match := re.search(r"Unable to load config ['\"](.*?)['\"]", message):
        return (
            f"{option} is {match[1]!r}: it takes a YAML file; single values go to its parts, as --help shows"
        )
    match = re.search(r"(?:Given|Got) value: (.*)", message)
    value = match[1].strip() if match else ""
    if choices := re.search(r"Literal\[(.*?)\]", message):
        names = re.findall(r"'([^']+)'", choices[1])
        return f"{option} is {value!r}: {_suggest(value, names)}"
    descriptions = [
        TYPE_DESCRIPTIONS[type_name]
        for type_name in re.findall(r"Expected a <class '(\w+)'>", message)
        if type_name in TYPE_DESCRIPTIONS
    ]
    hint = f"it must be {descriptions[0]}" if descriptions else "--help says what it takes"
    return f"{option} is {value!r}: {hint}"


def _suggest(value: str, names: Iterable[str]) -> str:
    """The closest name, or all of them."""
    suggestions = get_close_matches(value, names := list(names), 1)
    return f"did you mean {suggestions[0]}?" if suggestions else f"there are {', '.join(names)}"


def _subparsers(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    return {
        name: subparser
        for action in parser._actions
        if isinstance(choices := getattr(action, "choices", None), dict)
        for name, subparser in choices.items()
    }


def _option_names(parser: ArgumentParser) -> list[str]:
    """The options of one parser; it does not list the fields of --train and --valid itself."""
    names = {
        option
        for option in parser._option_string_actions
        if option.startswith("--") and not option.endswith(("+", ".help"))
    }
    data_options = [option for option in ("--train", "--valid") if option in names]
    return sorted(names | {f"{option}.{field}" for option in data_options for field in DATA_FIELDS})


def _config_keys(parser: ArgumentParser) -> list[str]:
    """The same as keys of a config file, which are spelled with underscores."""
    return [option.removeprefix("--").replace("-", "_") for option in _option_names(parser)]
