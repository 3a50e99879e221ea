"""Usage errors as one line: what is wrong, its value, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from keepleft.cli.command_table import COMMANDS, Command
from keepleft.cli.option_table import Option, command_options, join_words, spell_flags
from keepleft.cli.paths import installed_weights, similar_name
from keepleft.disk.missing_file import missing_file_message, similar_path

MODEL_WORDS = "a folder, a GGUF file, an installed model or a name on the Hugging Face hub"


def explain_usage_error(message: str, command: Command, arguments: Sequence[str] = ()) -> str:
    """The parser's error message, in one line and in our own words where we have better ones."""
    options = command_options(command)
    if match := re.search(r"unrecognized arguments?: (.*)", message, re.I | re.S):
        return _unknown_argument(match[1].split()[0], command, options, arguments)
    if match := re.search(
        r"(?:Group '([\w.]+)' )?does not accept option '([^']+)'", message
    ):  # in a config file
        return _unknown_key(".".join(filter(None, match.groups())), options)
    if match := re.match(r"Option '([^']+)' is not accepted", message):
        return _unknown_key(match[1], options)
    if match := re.search(r"argument (--[\w.-]+)\S*: expected (.*)", message):
        return _missing_value(match[1], match[2], options)
    if match := re.search(r"argument (--[\w.-]+): ignored explicit argument (.*)", message):
        return f"{match[1]} takes no value, and got {match[2]}: leave it out"
    if match := re.search(r"arguments are required: (.*)", message):
        return missing_argument(command, len(command.arguments.split()) - len(match[1].split(", ")))
    if match := re.search(r"File does not exist: '([^']+)'", message):
        return _missing_file(Path(match[1]))
    if match := re.search(r"Problems parsing config: (.*)", message, re.S):
        return "--config is not YAML: " + " ".join(match[1].replace('"<unicode string>"', "the file").split())
    if match := re.search(r"Unexpected config: (.*)", message, re.S):
        return f"--config holds {match[1].strip()[:40]!r}: it must name options with values, as in size: tiny"
    if keys := re.findall(r'[Pp]arser key "([^"]+)"', message):
        return _invalid_value(keys, message, options)
    return name_option(" ".join(message.split()), command)


def missing_argument(command: Command, num_given: int) -> str:
    """What to say where a command got too few positional arguments."""
    name = command.arguments.split()[num_given]
    choices = next((option.choices for option in command_options(command) if option.is_positional), ())
    explanation = MODEL_WORDS if name == "MODEL" else join_words(choices)
    example = command.examples[0] if "MODEL" in command.example else command.example
    return f"{command.name} needs {name}{explanation and f' ({explanation})'}, for example: {example}"


def name_option(message: str, command: Command) -> str:
    """The message of an error, with options in place of the names of parameters or fields.

    A name at its beginning, and anywhere those with an underscore, which are no words.
    """
    options = [option for option in command_options(command) if not option.is_positional]
    flags = {option.key: option.flag for option in options}
    match = re.match(r"(?:(?:the (limit) )|(?:(\w+): ))?([a-z][\w.]*) is ", message)
    if match is not None:
        limit, section, name = match.groups()
        prefix = "limits." if limit else f"{section}." if section else ""
        if flag := flags.get(prefix + name):
            message = f"{flag} is {message[match.end() :]}"
    return spell_flags(message, flags.keys())


def explain_os_error(error: OSError) -> str:
    """The message of an error of the system or of a missing file, without its number and with a remedy."""
    if error.errno is None:
        match = re.match(r"there is no (model )?directory ([^\s,]+)(.*)", str(error))
        if match is None:
            return str(error)
        if match[1] is None:  # nor is it on the hub
            close = similar_path(Path(match[2]))
            return f"there is no directory {match[2]}: did you mean {close}?" if close else str(error)
        return f"there is no model directory {match[2]}: {_suggest_model(match[2])}"
    if error.filename is None:
        return str(error.strerror or error)
    if isinstance(error, FileNotFoundError):
        return _missing_file(Path(error.filename).absolute())
    if isinstance(error, IsADirectoryError):
        return f"{error.filename} is a folder: name a file"
    return f"{error.filename} cannot be used: {str(error.strerror).lower()}"


def _suggest_model(model: str) -> str:
    """A model with a similar path, or with a similar name: of a run in this folder, or installed."""
    run_models = map(str, Path("runs").glob("*/model"))
    names = run_models if "/" in model else [*run_models, *installed_weights()]
    if suggestion := similar_path(Path(model)) or similar_name(model, names):
        return f"did you mean {suggestion}?"
    return "give a folder such as runs/lm/model, OWNER/NAME on the hub, or a name that keepleft doctor lists"


def _unknown_argument(
    argument: str, command: Command, options: Sequence[Option], arguments: Sequence[str]
) -> str:
    """The error for an argument that the parser has no place for: an option, or one value too many."""
    if argument.startswith("--"):
        return _unknown_option(argument.partition("=")[0], command, options)
    if re.match(r"-[a-zA-Z]", argument):
        long = [option.flag for option in options if option.key.startswith(argument[1])][:1] or ["--help"]
        return f"there is no option {argument}: options are spelled out, as in {long[0]}"
    whole = next((text for text in arguments if text.split()[:1] == [argument]), argument)
    for option in options:
        if whole in option.choices and option.metavar and not option.is_positional:
            return f"{whole!r} is not an option: did you mean {option.flag} {whole}?"
    if not command.arguments:
        return (
            f"{whole!r} is not an option, and {command.name} takes options only: a value follows its option"
        )
    return (
        f"{whole!r} is too much: {command.name} takes {command.arguments}, and options; "
        "a text with spaces goes into quotes"
    )


def _unknown_option(name: str, command: Command, options: Sequence[Option]) -> str:
    if name == "--version":
        return f"{command.name} has no option --version: keepleft --version prints the version"
    flags = [*(option.flag for option in options if not option.is_positional), "--help", "--help-all"]
    prefix = name.rpartition(".")[0]
    if prefix in ("--train", "--valid"):
        flags = [flag for flag in flags if flag.startswith(f"{prefix}.")]
    suggestions = _similar(name, flags)
    # many type --steps for --recipe.steps
    by_ending = [flag for flag in flags if flag.endswith("." + name.lstrip("-"))]
    if (
        not by_ending
        and get_close_matches(name, flags, 1, 0.85) == []
        and (others := _commands_with(name, command))
    ):
        return f"{command.name} has no option {name}: it is an option of keepleft {join_words(others)}"
    hint = (
        f"did you mean {' or '.join(suggestions)}?"
        if suggestions
        else f"keepleft {command.name} --help lists them"
    )
    return f"there is no option {name}: {hint}"


def _commands_with(flag: str, command: Command) -> list[str]:
    """The other commands that have an option."""
    return [
        other.name
        for other in COMMANDS
        if other != command and any(option.flag == flag for option in command_options(other))
    ]


def _unknown_key(key: str, options: Sequence[Option]) -> str:
    suggestions = _similar(key, [option.key for option in options if option.is_key])
    hint = (
        f"did you mean {' or '.join(suggestions)}?" if suggestions else "keepleft train --help-all lists them"
    )
    return f"there is no option {key}: {hint}"


def _similar(name: str, names: Sequence[str]) -> list[str]:
    """Up to three names that were probably meant."""
    by_ending = {known.rpartition(".")[2]: known for known in names}
    return (
        [known for known in names if known.endswith("." + name.lstrip("-"))]
        or get_close_matches(name, names, 3, 0.85)
        or get_close_matches(name, names, 1)
        or [by_ending[ending] for ending in get_close_matches(name.lstrip("-"), by_ending, 1)]
    )[:3]


def _missing_value(flag: str, expected: str, options: Sequence[Option]) -> str:
    option = next((option for option in options if option.flag == flag), None)
    takes = option.takes if option is not None and option.takes else expected.replace("argument", "value")
    return f"{flag} stands alone: it needs {takes}"


def _missing_file(path: Path) -> str:
    """Names the file relative to the current folder where it lies below it, as the user probably did."""
    shown_path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return missing_file_message(shown_path)


def _invalid_value(keys: Sequence[str], message: str, options: Sequence[Option]) -> str:
    """The error for a value of the wrong type. `keys` name the option, from the outside in."""
    by_key = {option.key: option for option in options}
    nested_key = f"{keys[0]}.{keys[-1]}"
    option = by_key.get(nested_key) or by_key.get(keys[0])
    if option is None:
        return " ".join(message.split())
    if unknown := re.search(r"Option '([^']+)' is not accepted", message):
        dashes = "--" if "NestedArg(" in message else ""  # on the command line, or in a config file
        parts = [key.rpartition(".")[2] for key in by_key if key.startswith(f"{option.key}.")]
        hint = _suggest(unknown[1], parts, f"{dashes}{option.key}.")
        return f"there is no option {dashes}{option.key}.{unknown[1]}: {hint}"
    if match := re.search(r"Unable to load config ['\"](.*?)['\"]", message):
        hint = "it takes a YAML file; single values go to its parts, as --help-all shows"
        return f"{option.flag} is {match[1]!r}: {hint}"
    name = option.metavar if option.is_positional else option.flag
    match = re.search(r"(?:Given|Got) value: (.*)", message)
    value = match[1].strip() if match else ""
    nested_value = re.search(r"val='(.*)'\)", value)
    value = nested_value[1] if nested_value else value
    is_bool = option.choices[:1] == ("true",)
    hint = _suggest(value, option.choices) if option.choices and not is_bool else f"it must be {option.takes}"
    return f"{name} is {value!r}: {hint}"


def _suggest(value: str, names: Iterable[str], prefix: str = "") -> str:
    """The closest name, or all of them."""
    suggestions = get_close_matches(value, names := list(names), 1)
    return f"did you mean {prefix}{suggestions[0]}?" if suggestions else f"there are {', '.join(names)}"
